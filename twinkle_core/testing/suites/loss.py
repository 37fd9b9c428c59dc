"""The compliance suite of losses (L2)."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from twinkle_core.isolation import attempt, describe
from twinkle_core.testing.suites.base import Suite, capability
from twinkle_core.testing.suites.loss_case import Case, assert_finite, number
from twinkle_core.testing.suites.outputs import COMPUTED, HiddenStates, Watched, outputs_of
from twinkle_core.testing.toys import random_rows
from twinkle_core.train import losses, micro
from twinkle_core.types import IGNORE_INDEX, InputFeature, LossOutput

#: fields of a batch that belong to its tokens
_PER_TOKEN = ("input_ids", "labels", "attention_mask", "position_ids")
#: of sums in another order: in float64, and for what computes in float32 whatever it is given
_FLOAT64, _FLOAT32 = (1e-9, 1e-10), (1e-4, 1e-5)


class LossSuite(Suite):
    """Checks of a Loss. It sees what a float64 model of 11 words gives: exactly the fields in ``needs``.

    Fixtures to override:

    * ``loss``: the object.
    * ``rows``: encoded rows; by default six of different lengths with some labels masked. Give pairs, groups or rows with more
      fields where the loss needs them; lengths should differ.
    * ``loss_args``: keyword arguments of the call; those with one entry for each row are cut with the rows.

    Capabilities:

    * ``float64``: computes in float64 when it is given float64 (needed by ``test_gradients_are_those_of_the_formula``). Without
      it sums are compared as float32 rounds them.
    * ``packing``: takes packed batches ``[1, T]`` with ``seq_lens`` as well as padded ones.
    """

    kind: ClassVar[str] = "loss"
    float64: ClassVar[bool] = True
    packing: ClassVar[bool] = True

    def build(self, **options: Any) -> Any:
        """A new loss; a plain function as training takes it."""
        built = super().build(**options)
        return losses.FunctionLoss(built) if inspect.isfunction(built) else built

    @pytest.fixture
    def loss(self) -> Any:
        """The loss to check."""
        return self.build()

    @pytest.fixture
    def subject(self, loss: Any) -> Any:
        """The same, by the name that all suites know it by."""
        return loss

    @pytest.fixture
    def rows(self) -> Sequence[InputFeature]:
        """Encoded rows."""
        return random_rows([5, 3, 7, 2, 4, 6])

    @pytest.fixture
    def loss_args(self) -> Mapping[str, Any]:
        """Keyword arguments of the call."""
        return {}

    # ------------------------------------------------------------------------------------------------ what it returns

    def test_returns_a_sum_and_a_weight(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """LossOutput: a scalar with a graph, and the number of items, without one."""
        result = Case(loss, rows, loss_args).call(train=True)
        assert number(result.weight) > 0, (
            f"the weight is {number(result.weight)} for rows with labels: count the items of the sum"
        )
        graph = isinstance(result.weight, torch.Tensor) and result.weight.requires_grad
        assert not graph, "the weight has a graph: it is a count; use .detach(), or count the labels"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_is_finite_in_lower_precision(self, loss: Any, rows: Any, loss_args: Any, dtype: torch.dtype) -> None:
        """Sum and gradients are finite in the dtypes that models train in."""
        case = Case(loss, rows, loss_args, dtype=dtype)
        assert_finite(case, f"on {str(dtype).removeprefix('torch.')} outputs")

    def test_is_finite_where_the_model_is_sure(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Also where probabilities are 0 and 1 as far as float32 goes."""
        case = Case(loss, rows, loss_args, dtype=torch.float32)
        with torch.no_grad():
            case.model.output_layer.weight.mul_(200)
        assert_finite(case, "where the model gives probabilities of 0 and 1 (clamp before log, mask before power or division)")

    def test_is_differentiable(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Gradients reach the model."""
        case = Case(loss, rows, loss_args)
        result = case.call(train=True)
        assert bool(case.gradient(result.sum).abs().sum() > 0), (
            "no gradient reaches the model: between outputs and sum there is an argmax, a comparison, .detach(), .item() or "
            "no_grad"
        )

    def test_asks_for_what_it_declares(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """The engine computes the fields in ``needs`` and nothing else."""
        strange = set(loss.needs) - COMPUTED - losses.OF_CORE
        assert not strange, f"needs has {sorted(strange)}; outputs are {', '.join(sorted(COMPUTED))}"
        case = Case(loss, rows, loss_args)
        outputs = Watched(outputs_of(case.model, case.inputs, case.needs))
        outcome = attempt(lambda: loss(case.inputs, outputs, **case.args))
        asked = sorted(outputs.asked)
        assert not asked, (
            f"it reads {', '.join(asked)}, which it does not declare: needs = frozenset({sorted(loss.needs | outputs.asked)})"
        )
        assert outcome.error is None, (
            f"it fails with what it declares in needs: {describe(outcome.error)}" if outcome.error else ""
        )

    def test_changes_nothing_that_it_is_given(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Two calls with the same batch give the same, and leave it as it was."""
        case = Case(loss, rows, loss_args)
        outputs = outputs_of(case.model, case.inputs, case.needs)
        before = [_tensors(case.inputs), _tensors(outputs)]
        first, second = (loss(case.inputs, outputs, **case.args) for _ in range(2))
        for kept, now, what in zip(before, (case.inputs, outputs), ("inputs", "outputs"), strict=True):
            changed = sorted(k for k, v in kept.items() if not torch.equal(v.nan_to_num(), now[k].detach().nan_to_num()))
            assert not changed, f"it changes {what}: {', '.join(changed)}. Metrics and other losses read them too; copy first"
        self._same(first, second, "the second call with the same batch differs from the first: keep nothing between calls")

    def test_keeps_nothing_between_batches(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """After another batch it gives what it gives first; batches get no fields from it, and random numbers go on."""
        stop = sum(micro.group_sizes(loss, rows)[:1])
        first = Case(copy.deepcopy(loss), rows, loss_args).call()
        used = copy.deepcopy(loss)
        Case(used, rows, loss_args).rows_from(range(stop)).call()
        case = Case(used, rows, loss_args)
        outputs = outputs_of(case.model, case.inputs, case.needs)
        fields = [set(case.inputs), set(outputs)]
        self._same(first, case.call(), "after another batch it gives another result: it keeps something of that one")
        states = []
        with torch.random.fork_rng(devices=[]):
            for seed in (1, 2):
                torch.manual_seed(seed)
                loss(case.inputs, outputs, **case.args)
                states.append(torch.get_rng_state())
        more = sorted((set(case.inputs) - fields[0]) | (set(outputs) - fields[1]))
        assert not more, f"it puts {', '.join(more)} into the batch: others read it too; copy first"
        assert not torch.equal(*states), "it seeds torch's random numbers, and dropout with them: use a torch.Generator"

    def test_its_own_numbers_add_up(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Each of ``LossOutput.metrics`` is a sum and a weight without a graph; halves add up; padding is not in it."""
        whole = Case(loss, rows, loss_args)
        sizes = micro.group_sizes(loss, rows)
        numbers = whole.call().metrics or {}
        if not numbers:
            pytest.skip("it has no numbers of its own")
        graphs = [n for n, pair in numbers.items() if any(isinstance(v, torch.Tensor) and v.requires_grad for v in pair)]
        assert not graphs, f"metrics: {graphs[0]} has a graph, which keeps the memory of each step: .detach() it"
        padded = Case(loss, rows, loss_args, pad_to_multiple_of=16).call().metrics or {}
        cut = sum(sizes[: len(sizes) // 2])
        parts = [whole.rows_from(part).call().metrics or {} for part in (range(cut), range(cut, len(rows)))]
        for name, pair in numbers.items():
            mine = [number(v) for v in pair]
            wide = [number(v) for v in padded[name]]
            assert all(self._close(a, b) for a, b in zip(mine, wide, strict=True)), (
                f"metrics: more padding changes {name}, {mine} against {wide}: count where inputs['labels'] != -100"
            )
            if loss.scope != "batch":
                added = [sum(number(part[name][i]) for part in parts if name in part) for i in range(2)]
                assert all(self._close(a, b) for a, b in zip(mine, added, strict=True)), (
                    f"metrics: {name} of the batch is {mine} (sum, weight), and its halves give {added}: give the sum and the "
                    "number of items, not a mean"
                )

    def test_survives_pickling(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Workers on other machines get it as a pickle."""
        copied = attempt(lambda: pickle.loads(pickle.dumps(loss)))
        assert copied.error is None, (
            f"it can't be pickled ({copied.why}): keep no lambda, local function, lock or open file in it; a function of a "
            "module will do"
        )
        self._same(
            Case(loss, rows, loss_args).call(),
            Case(copied.value, rows, loss_args).call(),
            "its pickle gives another result: what __init__ sets must be in its state",
        )

    # ------------------------------------------------------------------------------------------------ what is not trained

    def test_positions_without_label_do_not_count(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """-100 is ignored: what the model says there changes nothing, and gets no gradient."""
        case = Case(loss, rows, loss_args)
        if "embeddings" in loss.needs or "aux_loss" in loss.needs or not _has_labels(rows):
            pytest.skip("it reads what belongs to whole rows")
        hidden = case.model(case.inputs).detach().requires_grad_()
        masked = case.inputs["labels"] == IGNORE_INDEX
        result = case.call(HiddenStates(case.model, hidden))
        (gradient,) = torch.autograd.grad(result.sum, [hidden])
        leaked = int((gradient[masked].abs().sum(-1) > 0).sum())
        assert not leaked, (
            f"{leaked} of {int(masked.sum())} positions with label -100 get a gradient: multiply or index with "
            "inputs['labels'] != -100 before the sum"
        )
        other = torch.where(masked[..., None], -3 * hidden + 1, hidden).detach().requires_grad_()
        self._same(
            result,
            case.call(HiddenStates(case.model, other)),
            "what the model says at positions with label -100 changes the loss: mask with inputs['labels'] != -100",
        )

    def test_a_row_without_labels_adds_nothing(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Neither to the sum nor to the weight (token losses)."""
        if loss.scope != "token" or not _has_labels(rows):
            pytest.skip(f"its scope is {loss.scope}")
        if any(micro.of_rows(v, len(rows)) for v in loss_args.values()) or max(loss.groups(rows)) > 1:
            pytest.skip("rows come with arguments of their own, or in groups")
        silent = [*rows, _unlabelled(rows[0])]
        self._same(
            Case(loss, rows, loss_args).call(),
            Case(loss, silent, loss_args).call(),
            "a row in which every label is -100 changes it: count and sum only where inputs['labels'] != -100",
        )

    def test_a_batch_without_labels_is_zero(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Sum 0 that still has a graph, and weight 0: a rank without items must go through backward with the others."""
        if loss.scope != "token" and not loss.needs & (losses.FROM_LABELS | {"labels"}):
            pytest.skip("its items are not labels")
        if not _has_labels(rows):
            pytest.skip("the rows have no labels")
        case = Case(loss, [_unlabelled(row) for row in rows], loss_args)
        result = case.call()
        total, weight = number(result.sum), number(result.weight)
        assert total == 0 and weight == 0, (
            f"without any label the sum is {total} and the weight {weight}; both must be 0. A mean over nothing is NaN: return "
            "the sum, and let the window divide"
        )
        assert result.sum.requires_grad, (
            "without any label the sum has no graph: multiply by the mask; never build a fresh zero"
        )
        assert bool(case.gradient(result.sum).isfinite().all()), "without any label the gradient is not finite"

    # ------------------------------------------------------------------------------------------------ how it may be cut

    def test_halves_add_up_as_its_scope_says(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Sum, weight and gradients of a batch are those of its halves added; for scope ``batch`` they are not."""
        assert loss.scope in ("token", "row", "group", "batch"), f"scope is {loss.scope!r}; it is token, row, group or batch"
        whole = Case(loss, rows, loss_args)
        sizes = micro.group_sizes(loss, rows)
        assert len(sizes) > 1, "the fixture 'rows' holds one group only, which can't be halved: give two or more"
        cut = sum(sizes[: len(sizes) // 2])
        halves = [whole.rows_from(range(cut)), whole.rows_from(range(cut, len(rows)))]
        result, parts = whole.call(), [half.call() for half in halves]
        total, weight = sum(number(p.sum) for p in parts), sum(number(p.weight) for p in parts)
        same = self._close(number(result.sum), total) and self._close(number(result.weight), weight)
        shown = (
            f"sum {number(result.sum):.6g} and weight {number(result.weight):.6g} of the batch, "
            f"{total:.6g} and {weight:.6g} of its halves"
        )
        if loss.scope == "batch":
            assert not same, (
                f"its scope is 'batch', but its halves add up ({shown}): declare scope 'row', or 'group' with groups(), so "
                "that it may be trained in micro-batches"
            )
            return
        assert same, (
            f"its scope is '{loss.scope}', but its halves do not add up: {shown}. Return the sum over items, not their mean, "
            "and how many items it sums; or declare scope 'batch' if it compares rows with each other"
            + self._hint([(number(result.sum), total), (number(result.weight), weight)])
        )
        gradient = sum(half.gradient(part.sum) for half, part in zip(halves, parts, strict=True))
        torch.testing.assert_close(
            whole.gradient(result.sum),
            gradient,
            msg="the gradients of its halves do not add up: something is detached or shared",
            rtol=self.tolerances[0],
            atol=self.tolerances[1],
        )

    def test_slices_of_rows_add_up_where_it_is_token_local(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Ranks that hold slices of a row may call a ``token_local`` loss on their slices."""
        if not loss.token_local:
            pytest.skip("it is not token_local")
        case = Case(loss, rows, loss_args)
        length = case.inputs["input_ids"].shape[1]
        if any(isinstance(v, torch.Tensor) and v.dim() > 1 for v in case.args.values()):
            pytest.skip("its arguments have one entry for each token")
        outputs = outputs_of(case.model, case.inputs, case.needs)
        parts = [
            loss(_columns(case.inputs, columns, _PER_TOKEN), _columns(outputs, columns, tuple(micro.PER_TOKEN)), **case.args)
            for columns in (slice(0, length // 2), slice(length // 2, length))
        ]
        added = LossOutput(parts[0].sum + parts[1].sum, parts[0].weight + parts[1].weight)
        self._same(
            case.call(),
            added,
            "it says token_local = True, but the slices of the rows do not add up: the loss of a token depends on other tokens",
        )

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_padding_changes_nothing(self, loss: Any, rows: Any, loss_args: Any, side: str) -> None:
        """More padding, on either side, changes neither sum nor weight nor gradients."""
        self._assert_alike(
            Case(loss, rows, loss_args),
            Case(loss, rows, loss_args, padding_side=side, pad_to_multiple_of=16),
            f"more padding on the {side} changes it: count and sum only where inputs['labels'] != -100 (never with .mean(), "
            ".numel() or shape)",
        )

    @capability("packing")
    def test_packing_changes_nothing(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Rows in one sequence give what they give padded."""
        self._assert_alike(
            Case(loss, rows, loss_args),
            Case(loss, rows, loss_args, padding_free=True),
            "packed rows ([1, T] with seq_lens) give another result than padded ones: tell rows apart by "
            "twinkle_core.processors.input.unpack, or say packing = False in its suite and in its text",
        )

    def test_row_order_changes_nothing(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Groups of rows in another order give the same."""
        stops = list(itertools.accumulate(micro.group_sizes(loss, rows)))
        blocks = [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
        order = [i for block in reversed(blocks) for i in block]
        self._assert_alike(
            Case(loss, rows, loss_args),
            Case(loss, [rows[i] for i in order], {k: _taken(v, order) for k, v in loss_args.items()}),
            "the order of the rows changes it: declare in groups() which rows belong together, or list this test in "
            "expected_failures with the reason",
        )

    # ------------------------------------------------------------------------------------------------ its gradients

    @capability("float64")
    def test_gradients_are_those_of_the_formula(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """torch.autograd.gradcheck: gradients against differences of the sum, in float64."""
        stop = next(s for s in itertools.accumulate(micro.group_sizes(loss, rows)) if s >= min(2, len(rows)))
        case = Case(loss, rows, loss_args).rows_from(range(stop))
        hidden = case.model(case.inputs).detach().requires_grad_()

        def total(given: torch.Tensor) -> torch.Tensor:
            return case.call(HiddenStates(case.model, given)).sum

        assert total(hidden).dtype == torch.float64, (
            "its sum is not float64 for float64 outputs: cast with .float() only what is of lower precision, or say "
            "float64 = False"
        )
        checked = attempt(lambda: torch.autograd.gradcheck(total, (hidden,), atol=1e-6, rtol=1e-4, nondet_tol=1e-12))
        assert checked.error is None, (
            "its gradients are not those of its sum: a detached factor, a custom backward, or a jump in the formula. If it is "
            f"meant so (a straight-through estimate, a stopped gradient), list this test in expected_failures.\n{checked.why}"
        )

    # ------------------------------------------------------------------------------------------------ how

    @property
    def tolerances(self) -> tuple[float, float]:
        """Relative and absolute."""
        return _FLOAT64 if self.float64 else _FLOAT32

    def _close(self, a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=self.tolerances[0], abs_tol=self.tolerances[1])

    def _hint(self, pairs: Sequence[tuple[float, float]]) -> str:
        """What numbers that are nearly the same are told."""
        near = self.float64 and all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6) for a, b in pairs)
        return "\n    They agree to float32's rounding: if it computes in float32, say float64 = False" if near else ""

    def _same(self, one: LossOutput, other: LossOutput, why: str) -> None:
        pairs = [(number(one.sum), number(other.sum)), (number(one.weight), number(other.weight))]
        shown = f"sum {pairs[0][0]:.8g} and weight {pairs[1][0]:.8g}, against {pairs[0][1]:.8g} and {pairs[1][1]:.8g}"
        assert all(self._close(a, b) for a, b in pairs), f"{why}\n    {shown}{self._hint(pairs)}"

    def _assert_alike(self, one: Case, other: Case, why: str) -> None:
        """Sum, weight and gradients."""
        first, second = one.call(), other.call()
        self._same(first, second, why)
        rtol, atol = self.tolerances
        torch.testing.assert_close(
            one.gradient(first.sum), other.gradient(second.sum), msg=f"{why} (its gradients)", rtol=rtol, atol=atol
        )


def _unlabelled(row: InputFeature) -> InputFeature:
    row = copy.copy(row)
    row["labels"] = [IGNORE_INDEX] * len(row["labels"])
    return row


def _taken(value: Any, order: Sequence[int]) -> Any:
    if not micro.of_rows(value, len(order)):
        return value
    return value[torch.tensor(order)] if isinstance(value, torch.Tensor) else [value[i] for i in order]


def _columns(fields: Mapping[str, Any], columns: slice, names: Sequence[str]) -> Any:
    cut = copy.copy(fields)
    for name in names:
        if isinstance(fields.get(name), torch.Tensor):
            cut[name] = fields[name][:, columns]  # type: ignore[index]
    return cut


def _tensors(fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in fields.items() if isinstance(v, torch.Tensor)}


def _has_labels(rows: Sequence[InputFeature]) -> bool:
    """Whether the rows have a label for each token."""
    return all(row.get("labels") is not None and len(row["labels"]) == len(row["input_ids"]) for row in rows)
