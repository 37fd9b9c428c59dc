"""The compliance suite of losses (L2)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from twinkle_core.isolation import attempt
from twinkle_core.testing.suites.base import capability
from twinkle_core.testing.suites.loss_case import Case, assert_finite, number
from twinkle_core.testing.suites.loss_manners import LossManners
from twinkle_core.testing.suites.outputs import HiddenStates, outputs_of, tiny_lm
from twinkle_core.testing.suites.training import seeded
from twinkle_core.train import losses, micro
from twinkle_core.types import IGNORE_INDEX, InputFeature, LossOutput

#: fields of a batch that belong to its tokens
_PER_TOKEN = ("input_ids", "labels", "attention_mask", "position_ids")


class LossSuite(LossManners):
    """Checks of a Loss. It sees what a float64 model of 11 words gives: exactly the fields in ``needs``.

    Fixtures to override:

    * ``loss``: the object.
    * ``rows``: encoded rows; by default six of different lengths with some labels masked. Give pairs, groups or rows with more
      fields where the loss needs them; lengths should differ.
    * ``loss_args``: keyword arguments of the call; those with one entry for each row are cut with the rows.

    Capabilities:

    * ``float64``: computes in float64 when it is given float64 (needed by ``test_gradients_are_those_of_the_formula``). Without
      it sums are compared as float32 rounds them.
    * ``deterministic``: gives the same for the same batch. A loss that draws random numbers says False: what compares two calls
      is left out, and gradients are checked with torch's seed set.
    * ``packing``: takes packed batches ``[1, T]`` with ``seq_lens`` as well as padded ones.
    """

    # ------------------------------------------------------------------------------------------------ what it returns

    def test_returns_a_sum_and_a_weight(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """LossOutput: a scalar with a graph, and the number of items, without one."""
        result = Case(loss, rows, loss_args).call(train=True)
        assert number(result.weight) > 0, (
            f"the weight is {number(result.weight)} for rows with labels: count the items of the sum"
        )
        graph = isinstance(result.weight, torch.Tensor) and result.weight.requires_grad
        assert not graph, "the weight has a graph: it is a count; use .detach(), or count the labels"

    def test_the_weight_counts(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """It is a number of items, which is the same whatever the model says."""
        one, other = Case(loss, rows, loss_args), Case(loss, rows, loss_args)
        other.model = tiny_lm(seed=1)
        found = [number(case.call().weight) for case in (one, other)]
        assert self._close(*found), (
            f"the weight is {found[0]:g}, and {found[1]:g} with another model: count items (labels that are not -100, rows, "
            "pairs). Where the loss picks its items by what the model says, list this test in expected_failures"
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_is_finite_in_lower_precision(self, loss: Any, rows: Any, loss_args: Any, dtype: torch.dtype) -> None:
        """Sum and gradients are finite in the dtypes that models train in."""
        case = Case(loss, rows, loss_args, dtype=dtype)
        assert_finite(case, f"on {str(dtype).removeprefix('torch.')} outputs")
        total = case.call().sum
        assert dtype == torch.bfloat16 or total.dtype in (torch.float32, torch.float64), (
            f"the sum of float32 outputs is {total.dtype}, which rounds a batch's sum to 3 digits: add up in float32 or above"
        )

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

    def test_minus_100_alone_is_ignored(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """All other labels count, whichever ids they have: 0 as any, and the smallest of a batch in which none is masked."""
        if loss.scope != "token" or not loss.needs & {"logps", "logits"} or not _has_labels(rows):
            pytest.skip("its items are not tokens to be predicted")
        if loss_args or max(loss.groups(rows)) > 1:
            pytest.skip("rows come with arguments of their own, or in groups")
        case = Case(loss, rows, loss_args)
        hidden = HiddenStates(case.model, case.model(case.inputs).detach())
        result, order = case.call(hidden), torch.tensor([4, 7, 0, 9, 1, 10, 3, 8, 2, 6, 5])
        ids, labels, layer = case.inputs["input_ids"], case.inputs["labels"], case.model.output_layer
        case.inputs["input_ids"] = order[ids]
        case.inputs["labels"] = torch.where(labels == IGNORE_INDEX, labels, order[labels.clamp(min=0)])
        with torch.no_grad():
            for tensor in (layer.weight, layer.bias):
                tensor[order] = tensor.clone()
        self._same(
            result,
            case.call(hidden),
            "where tokens have other ids (the output layer's rows and the labels in another order alike) it gives another "
            "result: mask labels == -100 and nothing else. If it weighs some ids on purpose, list this test in "
            "expected_failures",
        )
        whole = [copy.copy(rows[0]), _unlabelled(rows[0])]
        whole[0]["labels"] = [max(label, 1) for label in rows[0]["labels"]]
        self._same(
            Case(loss, whole[:1], loss_args).call(),
            Case(loss, whole, loss_args).call(),
            "where no label of a batch is -100 it leaves some out: mask labels == -100, not the smallest label",
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

    @capability("deterministic")
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
            with seeded():
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


def _has_labels(rows: Sequence[InputFeature]) -> bool:
    """Whether the rows have a label for each token."""
    return all(row.get("labels") is not None and len(row["labels"]) == len(row["input_ids"]) for row in rows)
