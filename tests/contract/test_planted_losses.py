"""Faults that losses have been published with, each caught by the test that is about it."""

from __future__ import annotations

import pytest
import torch

from twinkle_core import IGNORE_INDEX, Loss, LossOutput
from twinkle_core.testing import LossSuite
from twinkle_core.testing.toys import random_rows


class Right(Loss):
    """What the others are changed from."""

    scope, token_local = "token", True

    def __call__(self, inputs, outputs):
        mask = inputs["labels"] != IGNORE_INDEX
        return LossOutput(-(outputs.logps * mask).sum(), mask.sum())


class MeanOfMeans(Right):
    def __call__(self, inputs, outputs):
        right = super().__call__(inputs, outputs)
        return LossOutput(right.sum / right.weight.clamp(min=1), (right.weight > 0).float())


class MeanTimesPositions(Right):
    """A mean, with the number of positions for a weight."""

    def __call__(self, inputs, outputs):
        right = super().__call__(inputs, outputs)
        return LossOutput(right.sum, right.sum.new_tensor(inputs["labels"].numel()) * (right.weight > 0))


class ForgetsMask(Right):
    """Entropy of all positions of its own logits."""

    needs = frozenset({"logits"})

    def __call__(self, inputs, outputs):
        logps = outputs.logits.log_softmax(-1)
        picked = logps.gather(-1, inputs["labels"].clamp(min=0)[..., None])[..., 0]
        return LossOutput(-picked.sum(), (inputs["labels"] != IGNORE_INDEX).sum())


class ForgetsMaskOfProbabilities(Right):
    """A constant for each masked position: log p is 0 there, and p is 1. No gradient tells."""

    def __call__(self, inputs, outputs):
        return LossOutput(outputs.logps.exp().sum() - 2 * outputs.logps.sum(), (inputs["labels"] != IGNORE_INDEX).sum())


class ReadsUndeclared(Right):
    def __call__(self, inputs, outputs):
        right = super().__call__(inputs, outputs)
        if outputs.entropies is not None:
            right.sum = right.sum - 0.1 * outputs.entropies.sum()
        return right


class ReadsWithGet(Right):
    def __call__(self, inputs, outputs):
        outputs.get("logits")
        return super().__call__(inputs, outputs)


class NeedsNonsense(Right):
    needs = frozenset({"logps", "log_probs"})


class Padding(Right):
    """Each row over its padded length."""

    def __call__(self, inputs, outputs):
        right = super().__call__(inputs, outputs)
        return LossOutput(right.sum / inputs["labels"].shape[1], right.weight)


class NotDifferentiable(Right):
    def __call__(self, inputs, outputs):
        right = super().__call__(inputs, outputs)
        return LossOutput(right.sum.detach() + 0 * right.sum, right.weight)


class Lambda(Right):
    def __init__(self):
        self.scale = lambda x: 2 * x

    def __call__(self, inputs, outputs):
        right = super().__call__(inputs, outputs)
        return LossOutput(self.scale(right.sum), right.weight)


class InPlace(Right):
    def __call__(self, inputs, outputs):
        mask = inputs["labels"] != IGNORE_INDEX
        return LossOutput((outputs.logps.neg_() * mask).sum(), mask.sum())


class Remembers(Right):
    """A running scale, which calls change."""

    def __init__(self):
        self.calls = 0

    def __call__(self, inputs, outputs):
        self.calls += 1
        right = super().__call__(inputs, outputs)
        return LossOutput(right.sum * (1 + self.calls % 2), right.weight)


class DetachedFactor(Right):
    """A focal factor without its gradient."""

    def __call__(self, inputs, outputs):
        mask = inputs["labels"] != IGNORE_INDEX
        factor = (1 - outputs.logps.detach().exp()) ** 2
        return LossOutput(-(factor * outputs.logps * mask).sum(), mask.sum())


class InfiniteGradient(Right):
    """A root of what is 0 where the model is sure."""

    def __call__(self, inputs, outputs):
        mask = inputs["labels"] != IGNORE_INDEX
        return LossOutput(((1 - outputs.logps.exp()).sqrt() * mask).sum(), mask.sum())


class FirstRowCounts(Right):
    def __call__(self, inputs, outputs):
        mask = inputs["labels"] != IGNORE_INDEX
        weights = torch.ones_like(outputs.logps)
        weights[:, 0] = 3  # of whichever token the batch begins with
        return LossOutput(-(outputs.logps * mask * weights).sum(), mask.sum())


class RowOrder(Right):
    """Rows by their place in the batch."""

    scope, token_local = "row", False

    def __call__(self, inputs, outputs):
        place = 1 + torch.arange(len(outputs.logps))[:, None] / 2
        mask = inputs["labels"] != IGNORE_INDEX
        return LossOutput(-(outputs.logps * mask * place).sum(), mask.sum())


class SaysBatch(Right):
    scope, token_local = "batch", False


class NoGraph(Right):
    """A fresh zero for a batch without labels."""

    def __call__(self, inputs, outputs):
        right = super().__call__(inputs, outputs)
        return right if right.weight > 0 else LossOutput(torch.zeros(()), 0)


class Means(Right):
    def __call__(self, inputs, outputs):
        right = super().__call__(inputs, outputs)
        return right.sum / right.weight


class NotOpen(Loss):
    """Forgets its method."""


class NeedsArgument(Right):
    def __init__(self, gamma):
        self.gamma = gamma


class Raises(Right):
    def __init__(self):
        raise RuntimeError("no device\nis there")


class NeedsText(Right):
    needs = "logps"


class NeedsAdvantages(Right):
    """One for each row."""

    token_local = False

    def __call__(self, inputs, outputs, *, advantages):
        mask = inputs["labels"] != IGNORE_INDEX
        each = outputs.logps * mask * advantages[:, None] if len(advantages) == len(mask) else None
        if each is None:  # packed
            row = (inputs["position_ids"] == 0).cumsum(1) - 1
            each = outputs.logps * mask * advantages[row]
        return LossOutput(-each.sum(), mask.sum())


@pytest.fixture
def _advantages(self):
    return {"advantages": torch.linspace(-1, 1, 6)}


ADVANTAGES = _advantages


CONTEXTS = {"test_padding_changes_nothing", "test_packing_changes_nothing"}
HALVES, SLICES = "test_halves_add_up_as_its_scope_says", "test_slices_of_rows_add_up_where_it_is_token_local"
SILENT, NONE = "test_a_row_without_labels_adds_nothing", "test_a_batch_without_labels_is_zero"
IDS = "test_minus_100_alone_is_ignored"
MASKED, GRADIENTS = "test_positions_without_label_do_not_count", "test_gradients_are_those_of_the_formula"


def test_the_right_one_passes(caught):
    assert caught(LossSuite, Right) == set(), caught.texts


@pytest.mark.parametrize(
    ("loss", "tests"),
    [
        (MeanOfMeans, {HALVES, SLICES}),
        (MeanTimesPositions, {HALVES, SILENT, IDS, *CONTEXTS}),
        (ForgetsMask, {MASKED, SILENT, NONE, IDS, *CONTEXTS, HALVES}),
        (ForgetsMaskOfProbabilities, {SILENT, NONE, IDS, *CONTEXTS, HALVES}),
        (ReadsUndeclared, {"test_asks_for_what_it_declares"}),
        (ReadsWithGet, {"test_asks_for_what_it_declares"}),
        (NeedsNonsense, {"test_asks_for_what_it_declares"}),
        (Padding, {*CONTEXTS, HALVES, SLICES}),
        (NotDifferentiable, {"test_is_differentiable", GRADIENTS}),
        (Lambda, {"test_survives_pickling"}),
        (InPlace, {"test_changes_nothing_that_it_is_given"}),
        (DetachedFactor, {GRADIENTS}),
        (InfiniteGradient, {"test_is_finite_where_the_model_is_sure"}),
        (FirstRowCounts, {SLICES, *CONTEXTS}),
        (RowOrder, {"test_row_order_changes_nothing", HALVES, "test_packing_changes_nothing"}),
        (SaysBatch, {HALVES}),
        (NoGraph, {NONE}),
    ],
)
def test_a_fault_is_caught_by_the_tests_about_it(caught, loss, tests):
    assert caught(LossSuite, loss) == tests, caught.texts


def test_a_loss_that_remembers_is_caught(caught):
    assert "test_changes_nothing_that_it_is_given" in caught(LossSuite, Remembers)


def test_a_mean_instead_of_a_sum_is_told_what_to_return(caught):
    caught(LossSuite, Means)
    assert "Means returned a tensor []" in caught.texts["test_returns_a_sum_and_a_weight"]


def test_what_is_to_be_done_is_said(caught):
    caught(LossSuite, MeanOfMeans)
    assert "Return the sum over items, not their mean" in caught.texts[HALVES]
    caught(LossSuite, ReadsUndeclared)
    assert "needs = frozenset(['entropies', 'logps'])" in caught.texts["test_asks_for_what_it_declares"]


def test_what_can_not_be_built_is_told_how(caught):
    told = [caught.once(LossSuite, loss) for loss in (NotOpen, NeedsArgument, Raises, NeedsText, NeedsAdvantages)]
    assert "it leaves __call__(inputs, outputs) of its contract open" in told[0]
    assert "missing a required argument: 'gamma'" in told[1]
    assert '[project.entry-points."twinkle.testing"]' in told[1] and '[project.entry-points."twinkle.testing"]' in told[4]
    assert "loss Raises can't be built for its checks: its constructor raises RuntimeError: no device" in told[2]
    assert "test_planted_losses.py:" in told[2]
    assert told[3] == "needs of NeedsText is 'logps' (str); it must be a set of names: frozenset({'logps'})"
    assert (
        "without its loss arguments: advantages" in told[4] and "def loss_args(self): return {'advantages': [...]}" in told[4]
    )
    assert caught(LossSuite, NeedsAdvantages, loss_args=ADVANTAGES) == set(), caught.texts
    assert caught(LossSuite, NeedsArgument, arguments={"gamma": 1}) == set()


def test_expected_failures_are_strict(caught):
    reason = "the mask is left to the template"
    marked = {"expected_failures": dict.fromkeys((SILENT, NONE, IDS, *CONTEXTS, HALVES), reason)}
    assert caught(LossSuite, ForgetsMaskOfProbabilities, **marked) == set()
    assert caught.expected[HALVES] == reason
    assert caught(LossSuite, Right, **marked) == set(marked["expected_failures"])
    assert "take it out there" in caught.texts[HALVES]


class Pairs(Loss):
    """Rows in pairs: the logistic loss of the difference of their scores."""

    scope = "group"

    def groups(self, rows):
        return [2] * (len(rows) // 2)

    def __call__(self, inputs, outputs, *, margin=None):
        scores = outputs.logps.sum(-1)
        gap = scores[0::2] - scores[1::2] - (0 if margin is None else margin[0::2])
        return LossOutput(torch.nn.functional.softplus(-gap).sum(), len(gap))


class Triples(Pairs):
    """Says that three rows belong together, and takes two."""

    def groups(self, rows):
        return [3] * (len(rows) // 3)


def test_groups_and_arguments_of_rows(caught):
    class PairSuite(LossSuite):
        packing = False
        expected_failures = {NONE: "a pair counts, whatever of it is trained"}

        @pytest.fixture
        def rows(self):
            return random_rows([4, 3, 6, 2, 5, 7])

        @pytest.fixture
        def loss_args(self):
            return {"margin": torch.linspace(0, 1, 6)}

    assert caught(PairSuite, Pairs) == set(), caught.texts
    assert set(caught.left_out) >= {SILENT, SLICES, "test_packing_changes_nothing"}
    assert HALVES in caught(PairSuite, Triples)


class Summed(Loss):
    """Right: the sum over labels, and a number of its own."""

    needs = frozenset({"logps"})

    def total(self, inputs, outputs):
        return -(outputs.logps * (inputs["labels"] != -100)).sum()

    def __call__(self, inputs, outputs):
        count = (inputs["labels"] != -100).sum()
        total = self.total(inputs, outputs)
        return LossOutput(total, count, metrics=self.own(inputs, total, count))

    def own(self, inputs, total, count):
        return {"nll": (total.detach(), count)}


class OwnMean(Summed):
    def own(self, inputs, total, count):
        return {"nll": (total.detach() / count.clamp(min=1), 1)}


class OwnGraph(Summed):
    def own(self, inputs, total, count):
        return {"nll": (total, count)}


class OwnPadding(Summed):
    def own(self, inputs, total, count):
        return {"nll": (total.detach(), inputs["labels"].numel())}


class RemembersTheFirst(Summed):
    scale = None

    def total(self, inputs, outputs):
        total = super().total(inputs, outputs)
        self.scale = float(total.detach()) if self.scale is None else self.scale
        return total * (1 + self.scale)


class Seeds(Summed):
    def total(self, inputs, outputs):
        torch.manual_seed(0)
        return super().total(inputs, outputs)


class Adds(Summed):
    def total(self, inputs, outputs):
        inputs["trained"] = inputs["labels"] != -100
        return super().total(inputs, outputs)


class Float32(Summed):
    def total(self, inputs, outputs):
        return -(outputs.logps.float() * (inputs["labels"] != -100)).sum()


class DeclaresUnread(Summed):
    """The engine makes [B, T, V] for it."""

    needs = frozenset({"logps", "logits"})


class TakesWhatIsThere(Summed):
    """Of all fields, a metric's too."""

    def total(self, inputs, outputs):
        fields = dict(outputs)
        return super().total(inputs, outputs) - 0.1 * fields.get("entropies", torch.zeros(())).sum()


class WeightOfTheModel(Summed):
    def __call__(self, inputs, outputs):
        held = (inputs["labels"] != -100) * outputs.logps.detach().exp()
        return LossOutput(self.total(inputs, outputs), held.sum())


class SmallestIsMasked(Summed):
    def __call__(self, inputs, outputs):
        held = inputs["labels"] != inputs["labels"].min()
        return LossOutput(-(outputs.logps * held).sum(), held.sum())


class ZeroIsMasked(Summed):
    def __call__(self, inputs, outputs):
        held = inputs["labels"] > 0
        return LossOutput(-(outputs.logps * held).sum(), held.sum())


class SumsInBfloat16(Summed):
    def total(self, inputs, outputs):
        logps = outputs.logps if outputs.logps.dtype == torch.float64 else outputs.logps.bfloat16()
        return -(logps * (inputs["labels"] != -100)).sum()


class OnItsClass(Summed):
    """A baseline of the first batch that any object met."""

    seen = {}

    def total(self, inputs, outputs):
        total = super().total(inputs, outputs)
        return total * (1 + self.seen.setdefault("first", float(total.detach())))


class KeepsItsGraph(Summed):
    """The last sum, for a log."""

    def total(self, inputs, outputs):
        self.last = super().total(inputs, outputs)
        return self.last


class KeepsANumber(KeepsItsGraph):
    """Right: without the graph."""

    def total(self, inputs, outputs):
        total = super().total(inputs, outputs)
        self.last = total.detach()
        return total


class GoesBackward(Summed):
    def total(self, inputs, outputs):
        total = super().total(inputs, outputs)
        if total.requires_grad:
            total.backward(retain_graph=True)
        return total


class SwitchesTheDtype(Summed):
    def total(self, inputs, outputs):
        torch.set_default_dtype(torch.float64)
        return super().total(inputs, outputs)


class ClampsItsArguments(Summed):
    def __call__(self, inputs, outputs, *, advantages):
        return LossOutput(*self.cut(inputs, outputs, advantages.clamp_(-0.5, 0.5)))

    def cut(self, inputs, outputs, advantages):
        held = inputs["labels"] != -100
        return -(outputs.logps.detach() * 0 + outputs.logps * held * advantages.detach().clone()[:, None]).sum(), held.sum()


class Drops(Summed):
    """Some tokens, at random."""

    def total(self, inputs, outputs):
        held = (inputs["labels"] != -100).to(outputs.logps.dtype)
        return -(outputs.logps * torch.nn.functional.dropout(held, 0.5)).sum()


class NoLoss:
    needs = frozenset({"logps"})

    def __call__(self, inputs, outputs):
        return LossOutput(outputs.logps.sum(), 1)


ASKS = "test_asks_for_what_it_declares"
GIVEN = "test_changes_nothing_that_it_is_given"
OWN, KEEPS = "test_its_own_numbers_add_up", "test_keeps_nothing_between_batches"


@pytest.mark.parametrize(
    ("loss", "tests"),
    [
        (Summed, set()),
        (OwnMean, {OWN}),
        (OwnGraph, {OWN}),
        (OwnPadding, {OWN}),
        (Seeds, {KEEPS}),
        (Adds, {KEEPS}),
        (DeclaresUnread, {ASKS}),
        (TakesWhatIsThere, {ASKS}),
        (WeightOfTheModel, {"test_the_weight_counts"}),
        (SmallestIsMasked, {IDS}),
        (ZeroIsMasked, {IDS}),
        (SumsInBfloat16, {"test_is_finite_in_lower_precision"}),
        (OnItsClass, {KEEPS}),
        (KeepsItsGraph, {KEEPS}),
        (KeepsANumber, set()),
        (GoesBackward, {GIVEN}),
    ],
)
def test_what_is_beside_the_sum_is_looked_at(caught, loss, tests):
    assert caught(LossSuite, loss) == tests, caught.texts


def test_a_loss_that_remembers_its_first_batch_is_caught(caught):
    assert KEEPS in caught(LossSuite, RemembersTheFirst)


def test_a_switch_of_the_process_is_told_and_put_back(caught):
    caught(LossSuite, SwitchesTheDtype)
    assert caught.texts[GIVEN].startswith("its call changes the default dtype (torch.float32 before, torch.float64 after)")
    assert torch.get_default_dtype() == torch.float32


def test_arguments_that_are_changed_are_told(caught):
    suite = type("Suite", (LossSuite,), {"packing": False, "loss_args": ADVANTAGES})
    caught(suite, ClampsItsArguments)
    assert caught.texts[GIVEN].startswith("it changes arguments: advantages")


def test_random_numbers_are_told_from_a_fault_and_allowed(caught):
    assert HALVES in caught(LossSuite, Drops)
    assert all("say deterministic = False" in caught.texts[test] for test in (HALVES, KEEPS, GIVEN))
    assert caught(LossSuite, Drops, deterministic=False) == set(), caught.texts
    assert caught.left_out[HALVES] == "deterministic is off"
    assert KEEPS in caught(LossSuite, type("DropsSeeded", (Seeds, Drops), {}), deterministic=False)


def test_what_is_no_loss_is_told_once(caught):
    assert "Write: class NoLoss(Loss)" in caught.once(LossSuite, NoLoss)


def test_float32_is_told_from_a_fault_and_allowed(caught):
    caught(LossSuite, Float32)
    assert any("say float64 = False" in text for text in caught.texts.values())
    assert caught(LossSuite, Float32, float64=False) == set(), caught.texts
