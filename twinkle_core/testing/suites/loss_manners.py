"""What a loss may read, keep and leave behind, whatever it computes (L2)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from twinkle_core.isolation import attempt, describe
from twinkle_core.testing.suites.loss_case import Case, number
from twinkle_core.testing.suites.loss_checks import LossChecks, has_graph, held_by_class, kept_on_class
from twinkle_core.testing.suites.outputs import COMPUTED, Watched, outputs_of
from twinkle_core.testing.suites.switches import changed as changed_switches
from twinkle_core.testing.suites.switches import switches
from twinkle_core.train import losses, micro


class LossManners(LossChecks):
    """What it reads and declares, and that nothing stays behind."""

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
        unread = sorted(set(loss.needs) - losses.OF_CORE - outputs.read)
        assert not unread, (
            f"it declares {', '.join(unread)} in needs, and does not read it: the engine computes it for nothing"
            + (", and logits are [B, T, V]" if "logits" in unread else "")
        )
        of_rows = case.inputs["labels"].shape != case.inputs["input_ids"].shape  # nothing can be computed from such labels
        everything = outputs_of(case.model, case.inputs, COMPUTED - (losses.FROM_LABELS if of_rows else set()))
        self._same(
            case.call(),
            loss(case.inputs, everything, **case.args),
            "where other fields are in the outputs too (a metric may read them) it gives another result: it takes what it does "
            f"not declare. needs is {sorted(loss.needs)}",
        )

    def test_changes_nothing_that_it_is_given(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Two calls with the same batch give the same, and leave it as it was."""
        case = Case(loss, rows, loss_args)
        standing = switches()
        outputs = outputs_of(case.model, case.inputs, case.needs)
        before = [_tensors(case.inputs), _tensors(outputs), _tensors(case.args)]
        case.call()  # what it returns is looked at there
        first, second = (loss(case.inputs, outputs, **case.args) for _ in range(2))
        for kept, now, what in zip(before, (case.inputs, outputs, case.args), ("inputs", "outputs", "arguments"), strict=True):
            changed = sorted(k for k, v in kept.items() if not torch.equal(v.nan_to_num(), now[k].detach().nan_to_num()))
            assert not changed, f"it changes {what}: {', '.join(changed)}. Others read them too; copy first"
        switched = changed_switches(standing)
        assert not switched, f"its call changes {switched[0]} for the whole process"
        backwards = [name for name, weight in case.model.named_parameters() if weight.grad is not None]
        assert not backwards, (
            f"it calls backward itself ({backwards[0]} has a gradient): return the sum, training goes backward"
        )
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
        again = case.call()
        graphs = sorted(k for k, v in vars(used).items() if has_graph(v))
        assert not graphs, (
            f"after a call its {graphs[0]} holds a tensor with a graph, and with it the memory of the whole step: keep "
            "x.detach(), or give numbers in LossOutput.metrics"
        )
        now = held_by_class(type(used))
        kept = sorted(
            k for k in now.keys() | kept_on_class(type(used)).keys() if now.get(k) != kept_on_class(type(used)).get(k)
        )
        assert not kept, f"its calls change {kept[0]}: what is kept on the class is shared by all objects, of all trainings"
        states = []
        with torch.random.fork_rng(devices=[]):
            for seed in (1, 2):
                torch.manual_seed(seed)
                loss(case.inputs, outputs, **case.args)
                states.append(torch.get_rng_state())
        more = sorted((set(case.inputs) - fields[0]) | (set(outputs) - fields[1]))
        assert not more, f"it puts {', '.join(more)} into the batch: others read it too; copy first"
        assert not torch.equal(*states), "it seeds torch's random numbers, and dropout with them: use a torch.Generator"
        self._same(first, again, "after another batch it gives another result: it keeps something of that one")

    def test_its_own_numbers_add_up(self, loss: Any, rows: Any, loss_args: Any) -> None:
        """Each of ``LossOutput.metrics`` is a sum and a weight without a graph; halves add up; padding is not in it."""
        whole = Case(loss, rows, loss_args)
        sizes = micro.group_sizes(loss, rows)
        numbers = whole.call().metrics or {}
        if not numbers:
            pytest.skip("it has no numbers of its own")
        graphs = [n for n, pair in numbers.items() if any(isinstance(v, torch.Tensor) and v.requires_grad for v in pair)]
        assert not graphs, f"metrics: {graphs[0]} has a graph, which keeps the memory of each step: .detach() it"
        if not self.deterministic:
            pytest.skip("deterministic is off")
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


def _tensors(fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in fields.items() if isinstance(v, torch.Tensor)}
