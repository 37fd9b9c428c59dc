"""Faults of metrics, each caught by the test that is about it."""

from __future__ import annotations

import pytest
import torch

from twinkle_core import IGNORE_INDEX, Metric
from twinkle_core.testing import MetricSuite


class Right(Metric):
    """Mean log probability of the labels."""

    needs = frozenset({"logps"})

    def __init__(self):
        self.total, self.count = 0.0, 0

    def accumulate(self, inputs, outputs):
        self.total = self.total + outputs.logps.detach().sum()
        self.count = self.count + (inputs["labels"] != IGNORE_INDEX).sum()

    def state(self):
        return {"total": float(self.total), "count": int(self.count)}

    def merge(self, state):
        self.total, self.count = self.total + state["total"], self.count + state["count"]

    def calculate(self):
        return {"logp": float(self.total) / int(self.count)} if int(self.count) else {}

    def reset(self):
        self.total, self.count = 0.0, 0


class MeanOfMeans(Right):
    """A mean a batch, and the number of batches."""

    def accumulate(self, inputs, outputs):
        labelled = int((inputs["labels"] != IGNORE_INDEX).sum())
        if labelled:
            self.total, self.count = self.total + float(outputs.logps.sum()) / labelled, self.count + 1


class MergesMeans(Right):
    """Sums while it accumulates; ranks meet as means."""

    def merge(self, state):
        if not state["count"]:
            return
        mean = state["total"] / state["count"]
        own = float(self.total) / int(self.count) if int(self.count) else mean
        self.total, self.count = (own + mean) / 2, 1


class MergeForgets(Right):
    """The last rank wins."""

    def merge(self, state):
        self.total, self.count = state["total"], state["count"]


class NeverResets(Right):
    def reset(self):
        pass


class HalfResets(Right):
    """Empty to look at, until the next window."""

    def reset(self):
        self.count = 0


class NaN(Right):
    def calculate(self):
        return {"logp": float(torch.as_tensor(self.total) / torch.as_tensor(self.count))}


class Forgets(Right):
    """Reading it empties it."""

    def calculate(self):
        numbers = super().calculate()
        self.reset()
        return numbers


class CountsPadding(Right):
    def accumulate(self, inputs, outputs):
        super().accumulate(inputs, outputs)
        self.count = self.count + (inputs["labels"] == IGNORE_INDEX).sum()


class Undeclared(Right):
    def accumulate(self, inputs, outputs):
        super().accumulate(inputs, outputs)
        if outputs.entropies is not None:
            self.total = self.total + outputs.entropies.sum()


class KeepsGraph(Right):
    def accumulate(self, inputs, outputs):
        self.total = self.total + outputs.logps.sum()
        self.count = self.count + (inputs["labels"] != IGNORE_INDEX).sum()

    def state(self):
        return {"total": self.total, "count": self.count}


class Aliases(Right):
    """Takes a list of another's state for its own."""

    def __init__(self):
        self.parts = []

    def accumulate(self, inputs, outputs):
        self.parts.append([float(outputs.logps.sum()), int((inputs["labels"] != IGNORE_INDEX).sum())])

    def state(self):
        return {"parts": self.parts}

    def merge(self, state):
        if self.parts:
            self.parts = self.parts + state["parts"]
        else:
            self.parts = state["parts"]

    def calculate(self):
        count = sum(n for _, n in self.parts)
        return {"logp": sum(total for total, _ in self.parts) / count} if count else {}

    def reset(self):
        self.parts = []


class Tensors(Right):
    def calculate(self):
        return {"logp": self.total / self.count} if int(self.count) else {}


class Writes(Right):
    def accumulate(self, inputs, outputs):
        super().accumulate(inputs, outputs)
        inputs["labels"].fill_(0)


class StateIsEmptied(Right):
    """``state`` gives the tensors that ``reset`` sets to zero in place."""

    def __init__(self):
        self.total, self.count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.long)

    def state(self):
        return {"total": self.total, "count": self.count}

    def reset(self):
        self.total = self.total.clone() if self.total.requires_grad else self.total.zero_()
        self.count = self.count.zero_()


class Pending(Right):
    """The last batch waits until numbers are asked for."""

    waiting = None

    def _flush(self):
        if self.waiting is not None:
            super().accumulate(*self.waiting)
            self.waiting = None

    def accumulate(self, inputs, outputs):
        self._flush()
        self.waiting = inputs, outputs

    def calculate(self):
        self._flush()
        return super().calculate()

    def reset(self):
        super().reset()
        self.waiting = None


class ReadsTheMask(Right):
    def accumulate(self, inputs, outputs):
        inputs["attention_mask"].sum()
        super().accumulate(inputs, outputs)


class CountsRows(Right):
    """A mean over rows, as ``[B, T]`` has them."""

    def accumulate(self, inputs, outputs):
        self.total = self.total + outputs.logps.detach().sum()
        self.count = self.count + len(inputs["labels"])


SHARED = {"total": 0.0, "count": 0}


class OnTheClass(Right):
    """All objects add to one sum, which each reset sets back."""

    def __init__(self):
        pass

    total = property(lambda self: SHARED["total"], lambda self, value: SHARED.update(total=value))
    count = property(lambda self: SHARED["count"], lambda self, value: SHARED.update(count=value))


class InFloat32(Right):
    """Sums that are rounded; the numbers are right to a part in 10 000."""

    def accumulate(self, inputs, outputs):
        self.total = self.total + outputs.logps.detach().sum().bfloat16().double()
        self.count = self.count + (inputs["labels"] != IGNORE_INDEX).sum()


class DeclaresUnread(Right):
    """The engine makes [B, T, V] for it."""

    needs = frozenset({"logps", "logits"})


class NeedsText(Right):
    needs = "logps"


class Draws(Right):
    """A random number that nobody needs."""

    def accumulate(self, inputs, outputs):
        torch.rand(1)
        super().accumulate(inputs, outputs)


class SaysYes(Right):
    """Whether there is a number, beside it."""

    def calculate(self):
        return {**super().calculate(), "counted": True} if int(self.count) else {}


class AddsAField(Right):
    def accumulate(self, inputs, outputs):
        inputs["trained"] = inputs["labels"] != -100
        super().accumulate(inputs, outputs)


class TakesAField(Right):
    def accumulate(self, inputs, outputs):
        super().accumulate(inputs, outputs)
        outputs.pop("logps")


class TurnsGradientsOff(Right):
    def accumulate(self, inputs, outputs):
        torch.set_grad_enabled(False)
        super().accumulate(inputs, outputs)


class GivesANumber(Right):
    def calculate(self):
        return next(iter(super().calculate().values()), {})


RANKS = {"test_ranks_merge_into_one", "test_merging_is_associative"}
EMPTY, RESET = "test_an_empty_window_has_no_numbers", "test_reset_forgets_everything"
PACKED, OUTLIVES = "test_packing_changes_nothing", "test_its_state_outlives_a_reset"


def test_the_right_one_passes(caught):
    assert caught(MetricSuite, Right) == set(), caught.texts


@pytest.mark.parametrize(
    ("metric", "tests"),
    [
        (MeanOfMeans, {"test_two_accumulations_are_one", "test_ranks_merge_into_one"}),
        (MergesMeans, RANKS),
        (MergeForgets, {*RANKS, "test_an_empty_rank_changes_nothing"}),
        (NeverResets, {RESET, OUTLIVES}),
        (HalfResets, {RESET, OUTLIVES}),
        (NaN, {EMPTY, RESET, "test_nothing_labelled_is_no_number", "test_objects_share_nothing"}),
        (
            CountsPadding,
            {
                "test_packing_changes_nothing",
                "test_padding_changes_nothing",
                "test_two_accumulations_are_one",
                "test_ranks_merge_into_one",
            },
        ),
        (Undeclared, {"test_asks_for_what_it_declares"}),
        (Aliases, {"test_the_state_is_plain"}),
        (DeclaresUnread, {"test_asks_for_what_it_declares"}),
        (Draws, {"test_changes_nothing_that_it_is_given"}),
        (AddsAField, {"test_changes_nothing_that_it_is_given"}),
        (TakesAField, {"test_changes_nothing_that_it_is_given"}),
        (TurnsGradientsOff, {"test_changes_nothing_that_it_is_given"}),
        (SaysYes, {"test_numbers_are_numbers"}),
        (Tensors, {"test_numbers_are_numbers"}),
        (Writes, {"test_changes_nothing_that_it_is_given"}),
        (StateIsEmptied, {OUTLIVES}),
        (Pending, {OUTLIVES, *RANKS, "test_an_empty_rank_changes_nothing"}),
        (ReadsTheMask, {PACKED}),
        (CountsRows, {PACKED}),
    ],
)
def test_a_fault_is_caught_by_the_tests_about_it(caught, metric, tests):
    assert caught(MetricSuite, metric) == tests, caught.texts


def test_a_metric_that_keeps_graphs_or_forgets_what_it_is_asked(caught):
    assert "test_the_state_is_plain" in caught(MetricSuite, KeepsGraph)
    assert "test_numbers_are_numbers" in caught(MetricSuite, Forgets)


def test_a_metric_that_keeps_its_sums_on_the_class_is_caught(caught):
    assert "test_objects_share_nothing" in caught(MetricSuite, OnTheClass)


def test_rounding_is_told_from_a_fault_and_allowed_by_a_tolerance(caught):
    assert caught(MetricSuite, InFloat32)
    assert caught(MetricSuite, InFloat32, tolerance=1e-2) == set(), caught.texts


def test_numbers_without_names_are_told(caught):
    caught(MetricSuite, GivesANumber)
    assert "no dict: name -> number" in caught.texts["test_two_accumulations_are_one"]


def test_needs_that_are_no_set_are_told_once(caught):
    assert caught.once(MetricSuite, NeedsText).startswith("needs of NeedsText is 'logps' (str); it must be a set of names")


def test_what_is_to_be_done_is_said(caught):
    caught(MetricSuite, MeanOfMeans)
    assert "a mean of means weights batches, not items" in caught.texts["test_two_accumulations_are_one"]
