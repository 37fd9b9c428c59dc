"""The compliance suite of metrics (L2)."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from twinkle_core.contracts.metric import Metric, StepResult
from twinkle_core.isolation import attempt, describe
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.suites.base import Suite
from twinkle_core.testing.suites.outputs import COMPUTED, Watched, needs_a_set, outputs_of, tiny_lm
from twinkle_core.testing.suites.switches import changed as changed_switches
from twinkle_core.testing.suites.switches import put_back, switches
from twinkle_core.testing.toys import random_rows
from twinkle_core.train.losses import OF_CORE
from twinkle_core.types import IGNORE_INDEX, InputFeature, ModelOutput


class MetricSuite(Suite):
    """Checks of a Metric. After each window of batches ``on_step`` is called, as in training.

    Fixtures to override:

    * ``metric``: a fresh object; others are copies of it.
    * ``rows``: encoded rows; by default six of different lengths with some labels masked.
    * ``outputs``: a function ``inputs -> ModelOutput``; by default what a model of 11 words gives, the fields in ``needs`` and
      the loss.

    Class attributes:

    * ``tolerance``: relative, of numbers that are gathered in another order; by default 1e-6.
    * ``group``: rows that belong together (2 for pairs): batches are cut at its multiples alone. Give at least 4 groups.
    * ``by_the_clock``: numbers of ``calculate`` that depend on the time (tokens a second); they are not compared.
    """

    kind: ClassVar[str] = "metric"
    group: ClassVar[int] = 1
    by_the_clock: ClassVar[frozenset[str]] = frozenset()
    tolerance: ClassVar[float] = 1e-6

    def build(self, **options: Any) -> Any:
        """A new metric."""
        built = super().build(**options)
        needs_a_set(self, built)
        return built

    @pytest.fixture(autouse=True)
    def _switches_stay(self) -> Iterator[None]:
        """For the next test; one is about them."""
        with put_back():
            yield

    @pytest.fixture
    def metric(self) -> Any:
        """The metric to check."""
        return self.build()

    @pytest.fixture
    def subject(self, metric: Any) -> Any:
        """The same, by the name that all suites know it by."""
        return metric

    @pytest.fixture
    def rows(self) -> Sequence[InputFeature]:
        """Encoded rows."""
        return random_rows([5, 3, 7, 2, 4, 6])

    @pytest.fixture
    def outputs(self, metric: Any) -> Any:
        """What the model gives for a collated batch."""
        return lambda inputs: _outputs(inputs, metric.needs)

    # ------------------------------------------------------------------------------------------------ accumulating

    def test_two_accumulations_are_one(self, metric: Any, rows: Any, outputs: Any) -> None:
        """Batches of different sizes one after the other give what they give as one batch."""
        cut = self.group
        apart = self._after(metric, [[rows[:cut], rows[cut:]]], outputs)
        whole = self._after(metric, [[rows]], outputs)
        assert whole, (
            "it gives no number for a batch with labels; override the fixture 'rows' or 'outputs' with what it measures"
        )
        self._same(
            apart,
            whole,
            "accumulating two batches differs from accumulating them as one. Keep the sum and the count of items, and "
            "divide in calculate(): a mean of means weights batches, not items",
        )

    def test_numbers_are_numbers(self, metric: Any, rows: Any, outputs: Any) -> None:
        """``calculate`` gives name -> a finite number, the same when asked again."""
        numbers = self._after(metric, [[rows], [rows[: 2 * self.group]]], outputs, keep=(kept := copy.deepcopy(metric)))
        for name, value in numbers.items():
            good = (
                isinstance(name, str)
                and isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            )
            assert good, (
                f"calculate() gives {name!r}: {value!r}; names are texts and values finite Python numbers (use float(x))"
            )
        self._same(kept.calculate(), numbers, "calculate() gives something else when it is called again: only reset() forgets")

    def test_nothing_labelled_is_no_number(self, metric: Any, rows: Any, outputs: Any) -> None:
        """A batch in which every label is -100 neither fails nor leaves a NaN."""
        silent: list[Any] = [{**row, "labels": [IGNORE_INDEX] * len(row["input_ids"])} for row in rows]
        alone = self._after(metric, [[silent]], outputs)
        bad = sorted(name for name, value in alone.items() if not math.isfinite(value))
        assert not bad, (
            f"without any label {', '.join(bad)} is no finite number: leave it out of calculate() while the count is 0"
        )

    def test_padding_changes_nothing(self, metric: Any, rows: Any, outputs: Any) -> None:
        """More padding in a batch changes no number."""
        self._same(
            self._after(metric, [[rows]], outputs),
            self._after(metric, [[rows]], outputs, pad_to_multiple_of=16),
            "more padding changes it: count only where inputs['labels'] != -100 (or where the attention mask is 1)",
        )

    def test_asks_for_what_it_declares(self, metric: Any, rows: Any) -> None:
        """It is given the fields in ``needs`` and the loss, and nothing else."""
        strange = set(metric.needs) - COMPUTED - OF_CORE
        assert not strange, f"needs has {sorted(strange)}; outputs are {', '.join(sorted(COMPUTED | OF_CORE))}"
        inputs = InputProcessor().collate(rows)
        outputs = Watched(_outputs(inputs, metric.needs))
        outcome = attempt(lambda: metric.accumulate(inputs, outputs))
        asked = sorted(outputs.asked)
        needs = sorted(metric.needs | outputs.asked)
        assert not asked, f"it reads {', '.join(asked)}, which it does not declare: needs = frozenset({needs})"
        assert outcome.error is None, (
            f"it fails with what it declares in needs: {describe(outcome.error)}" if outcome.error else ""
        )
        metric.state(), metric.calculate()  # it may have kept the outputs, and read them now
        unread = sorted(set(metric.needs) - OF_CORE - outputs.read)
        assert not unread, (
            f"it declares {', '.join(unread)} in needs, and does not read it: the engine computes it for nothing"
            + (", and logits are [B, T, V]" if "logits" in unread else "")
        )

    def test_changes_nothing_that_it_is_given(self, metric: Any, rows: Any, outputs: Any) -> None:
        """Batches are left as they were, and so are torch's random numbers: a metric that is added changes no training."""
        inputs = InputProcessor().collate(rows)
        given = outputs(inputs)
        fields = [set(inputs), set(given)]
        before = {k: v.detach().clone() for k, v in {**inputs, **given}.items() if isinstance(v, torch.Tensor)}
        numbers, standing = torch.get_rng_state(), switches()
        metric.accumulate(inputs, given)
        assert torch.equal(numbers, torch.get_rng_state()), (
            "accumulate() draws or seeds torch's random numbers, and dropout changes with them: use a torch.Generator"
        )
        switched = changed_switches(standing)
        assert not switched, f"accumulate() changes {switched[0]} for the whole process"
        other = sorted((fields[0] ^ set(inputs)) | (fields[1] ^ set(given)))
        assert not other, f"accumulate() puts {', '.join(other)} into the batch or takes it out: others read it too; copy first"
        after: Mapping[str, Any] = {**inputs, **given}
        changed = sorted(k for k, v in before.items() if not torch.equal(v.nan_to_num(), after[k].detach().nan_to_num()))
        assert not changed, f"accumulate() changes {', '.join(changed)}: others read them too; copy first"

    # ------------------------------------------------------------------------------------------------ the window

    def test_an_empty_window_has_no_numbers(self, metric: Any) -> None:
        """Nothing was accumulated: ``{}``."""
        empty = metric.calculate()
        assert empty == {}, f"an empty window gives {empty!r}; return {{}} while nothing was accumulated"

    def test_reset_forgets_everything(self, metric: Any, rows: Any, outputs: Any) -> None:
        """After ``reset`` the window is empty, and the next one is as if it were the first."""
        fresh = self._after(metric, [[rows[: 2 * self.group]]], outputs)
        used = copy.deepcopy(metric)
        self._after(metric, [[rows], [rows]], outputs, keep=used)
        used.reset()
        left = used.calculate()
        assert left == {}, (
            f"after reset() there is {left!r}; set everything that accumulate(), on_step() and merge() add to, anew"
        )
        self._same(
            self._after(used, [[rows[: 2 * self.group]]], outputs),
            fresh,
            "after reset() the next window is not what a new metric gives: something of the last one is left",
        )

    # ------------------------------------------------------------------------------------------------ ranks

    def test_ranks_merge_into_one(self, metric: Any, rows: Any, outputs: Any) -> None:
        """The states of ranks with different numbers of rows, merged, are what one rank with all rows gives."""
        cut = 2 * self.group
        parts = self._ranks(metric, [rows[:cut], rows[cut:]], outputs)
        parts[0].merge(_travelled(parts[1].state()))
        self._same(
            parts[0].calculate(),
            self._after(metric, [[rows]], outputs),
            "two ranks merged differ from one rank with all rows: state() must carry sums and counts, and merge() add them",
        )

    def test_merging_is_associative(self, metric: Any, rows: Any, outputs: Any) -> None:
        """(a + b) + c = a + (b + c), in whatever order ranks meet; and c + b + a too."""
        parts = [rows[: self.group], rows[self.group : 3 * self.group], rows[3 * self.group :]]
        a, b, c = self._ranks(metric, parts, outputs)
        a.merge(_travelled(b.state()))
        a.merge(_travelled(c.state()))
        x, y, z = self._ranks(metric, parts, outputs)
        y.merge(_travelled(z.state()))
        x.merge(_travelled(y.state()))
        why = (
            "the order in which ranks merge changes the numbers: add sums and counts in merge(), and divide in calculate() only"
        )
        self._same(a.calculate(), x.calculate(), why)
        u, v, w = self._ranks(metric, parts, outputs)
        w.merge(_travelled(v.state()))
        w.merge(_travelled(u.state()))
        self._same(a.calculate(), w.calculate(), why)

    def test_an_empty_rank_changes_nothing(self, metric: Any, rows: Any, outputs: Any) -> None:
        """A rank without rows, merged from either side."""
        numbers = self._after(metric, [[rows]], outputs)
        (full,) = self._ranks(metric, [rows], outputs)
        full.merge(_travelled(copy.deepcopy(metric).state()))
        why = "merging a rank that saw no rows changes the numbers: an empty state must add nothing"
        self._same(full.calculate(), numbers, why)
        (full,) = self._ranks(metric, [rows], outputs)
        empty = copy.deepcopy(metric)
        empty.merge(_travelled(full.state()))
        self._same(empty.calculate(), numbers, why)

    def test_the_state_is_plain(self, metric: Any, rows: Any, outputs: Any) -> None:
        """Numbers and tensors without a graph, in dicts and lists, that can be sent; merging it elsewhere leaves it alone."""
        (full,) = self._ranks(metric, [rows], outputs)
        state = full.state()
        assert isinstance(state, dict), f"state() gives {type(state).__name__}, not a dict"
        strange = [type(v).__name__ for v in _leaves(state) if not isinstance(v, int | float | str | None | torch.Tensor)]
        assert not strange, f"state() holds {', '.join(sorted(set(strange)))}; ranks exchange numbers, texts and tensors"
        graphs = any(isinstance(v, torch.Tensor) and v.requires_grad for v in _leaves(state))
        assert not graphs, "state() holds a tensor with a graph, which keeps every step's memory: .detach() in accumulate()"
        before = pickle.dumps(state)
        other = copy.deepcopy(metric)
        other.merge(state)
        self._after(other, [[rows]], outputs, keep=other)
        assert pickle.dumps(state) == before, "merge() keeps the state it is given and goes on adding to it: copy what it takes"

    def test_its_state_outlives_a_reset(self, metric: Any, rows: Any, outputs: Any) -> None:
        """As ``calculate_metric`` does, on one rank too: take the state, reset, merge it again, calculate. Then the next."""
        used = copy.deepcopy(metric)
        cut = self.group
        for window in ([[rows[: 2 * cut], rows[2 * cut :]]], [[rows[cut:]]]):
            self._feed(used, window, outputs)
            state = used.state()
            used.reset()
            used.merge(state)
            self._same(
                used.calculate(),
                self._after(metric, window, outputs),
                "state(), reset(), merge() of that state and calculate() is what calculate_metric does; it gives other numbers "
                "than calculate() alone. state() must hold all that was accumulated, and copies that reset() does not empty",
            )
            used.reset()

    def test_objects_share_nothing(self, metric: Any, rows: Any, outputs: Any) -> None:
        """Training has one and evaluation another: what one takes in is not in the other, nor what was set anew."""
        one, other = copy.deepcopy(metric), copy.deepcopy(metric)
        self._feed(one, [[rows]], outputs)
        left = other.calculate()
        assert left == {}, f"what one object has accumulated is in another: {left!r}. Keep it on self, not on the class"

    def test_packing_changes_nothing(self, metric: Any, rows: Any, outputs: Any) -> None:
        """Rows in one sequence (``[1, T]`` with ``seq_lens``, no attention mask) give what they give padded."""
        got = attempt(lambda: self._after(metric, [[rows]], outputs, padding_free=True))
        assert got.error is None, f"it fails on packed rows, which have no padding and no attention_mask: {got.why}"
        if not {"embeddings", "hidden"} & set(metric.needs):
            why = "packed rows give other numbers than padded ones: count where inputs['labels'] != -100, never rows or shapes"
            self._same(got.value or {}, self._after(metric, [[rows]], outputs), why)

    # ------------------------------------------------------------------------------------------------ how

    def _after(
        self, metric: Metric, windows: Any, outputs: Any, keep: Metric | None = None, **processor: Any
    ) -> dict[str, float]:
        """The numbers after windows, each a list of batches, each a list of rows; in ``keep``, or in a copy."""
        used = keep if keep is not None else copy.deepcopy(metric)
        self._feed(used, windows, outputs, **processor)
        numbers = used.calculate()
        assert isinstance(numbers, dict), f"calculate() gives {numbers!r}, no dict: name -> number, {{}} for an empty window"
        return numbers

    def _feed(self, used: Metric, windows: Any, outputs: Any, **processor: Any) -> None:
        """The windows, without asking for numbers."""
        for number, window in enumerate(windows):
            for rows in window:
                inputs = InputProcessor(**processor).collate(rows)
                used.accumulate(inputs, outputs(inputs))
            used.on_step(StepResult(acted=True, cur_step=number + 1, grad_norm=0.5, lr=1e-3, weight=1.0))

    def _ranks(self, metric: Metric, parts: Any, outputs: Any) -> list[Metric]:
        """A metric for each rank, which saw its rows."""
        ranks = [copy.deepcopy(metric) for _ in parts]
        for rank, rows in zip(ranks, parts, strict=True):
            self._feed(rank, [[rows]], outputs)
        return ranks

    def _same(self, one: Mapping[str, float], other: Mapping[str, float], why: str) -> None:
        a, b = ({k: v for k, v in numbers.items() if k not in self.by_the_clock} for numbers in (one, other))
        within = [
            a.keys() == b.keys() and all(math.isclose(a[k], b[k], rel_tol=share, abs_tol=share / 1000) for k in a)
            for share in (self.tolerance, 1e-3)
        ]
        hint = "\n    They agree to 1e-3: if it is float32's rounding, sum in float64 or raise 'tolerance'" if within[1] else ""
        assert within[0], f"{why}\n    {a} against {b}{hint}"


def _outputs(inputs: InputFeature, needs: Any) -> ModelOutput:
    """The fields in ``needs``, and a loss with numbers of its own, as in training: cross entropy of the batch."""
    model = tiny_lm()
    if inputs["labels"].shape != inputs["input_ids"].shape:  # one label a row: no cross entropy
        rows = len(inputs["labels"])
        output = outputs_of(model, inputs, needs)
        output.loss, output.num_items, output["loss_metrics"] = torch.tensor(0.5), rows, {"own": (torch.tensor(1.0), rows)}
        return output
    output = outputs_of(model, inputs, {*needs, "logps"})
    items = int((inputs["labels"] != IGNORE_INDEX).sum())
    total = -output.logps.detach().sum()
    if "logps" not in needs:
        del output["logps"]
    output.loss, output.num_items = total / max(items, 1), items
    output["loss_metrics"] = {"own": (total / 2, float(items))}
    return output


def _travelled(state: Any) -> Any:
    """A state as another rank gets it."""
    return pickle.loads(pickle.dumps(state))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for v in value.values() for leaf in _leaves(v)]
    if isinstance(value, list | tuple):
        return [leaf for v in value for leaf in _leaves(v)]
    return [value]
