"""A loss or metric that fails on one rank alone ends the call on all, and all go on together afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from twinkle_core.contracts.loss import Loss
from twinkle_core.contracts.metric import Metric
from twinkle_core.data.sampler import share
from twinkle_core.errors import FailedElsewhere, ModelNotLoaded, NoSuchPath, RanksApart
from twinkle_core.testing.ranks import run
from twinkle_core.types import LossOutput
from twinkle_megatron.testing import built, steps, windows


class Failing(Loss):
    """Cross entropy by logps, which fails at the second micro-batch (``at``) of one rank."""

    needs = frozenset({"logps"})

    def __init__(self, here, at=2):
        self.here, self.at, self.calls = here, at, 0

    def __call__(self, inputs, outputs, **kwargs):
        self.calls += 1
        if self.here and self.calls == self.at:
            raise ZeroDivisionError("of this loss")
        labelled = inputs["labels"] != -100
        return LossOutput(-outputs["logps"][labelled].sum(), labelled.sum())


class Refusing(Metric):
    """Reads nothing, and fails where it is told to."""

    needs = frozenset({"logits"})  # large: it reads each micro-batch while the schedule runs
    here = True

    def accumulate(self, inputs, outputs):
        if self.here:
            raise KeyError("of this metric")

    def calculate(self):
        return {}

    def reset(self):
        """It holds nothing."""

    def state(self):
        return None

    def merge(self, state):
        """It holds nothing."""


def told(verb):
    try:
        verb()
    except (ZeroDivisionError, KeyError, FailedElsewhere, ModelNotLoaded, NoSuchPath, RanksApart) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Alone:
    """Run in processes of its own."""

    def fail(self, rank, world_size, folder, layouts):
        """What each rank is told, and whether the model then trains as one that has met no failure."""
        found = []
        for sizes in layouts:
            model, plain = built(folder, sizes), built(folder, sizes)
            for one in (model, plain):
                one.set_optimizer("default", lr=1e-2)
            last, rows = rank == world_size - 1, windows(1)[0]
            model.set_loss(Failing(last))
            words = [told(lambda m=model, r=rows: m.forward_backward(r, micro_batch_size=1))]
            held = max(float(model.engine.gradient(p).abs().max()) for p in model.module.parameters())
            model.set_loss("cross_entropy")
            metric = Refusing()
            metric.here = last
            model.add_metric(metric, is_training=False)
            words.append(told(lambda m=model, r=rows: m.forward_only(r, micro_batch_size=2)))
            metric.here = rank == 0
            words.append(told(lambda m=model, r=rows: m.forward_only(r, micro_batch_size=2)))
            metric.here = False
            shown = torch.equal(model.forward_only(rows).logits, plain.forward_only(rows).logits)
            words += [held, model.sessions[""].window.count, shown]
            found.append([*words, steps(model, windows(2)) == steps(plain, windows(2))])
            del model, plain, one, metric
        return found

    def split(self, rank, world_size, folder, layouts):
        """What each rank is told of a loss that fails on the second in ``calculate_loss`` and in ``backward``, and whether
        the window then holds what it holds without."""
        found = []
        for sizes in layouts:
            model, plain = built(folder, sizes), built(folder, sizes)
            rows, words = share(windows(1)[0], model.engine.mesh.data_rank, model.engine.mesh.data_world_size), []
            for one in (model, plain):
                one.set_optimizer("default", lr=1e-2)
                one.forward(rows)
                one.backward()
            for verb in ("calculate_loss", "backward"):
                model.set_loss(Failing(rank == 1, at=1))
                model.forward(rows)
                words.append(told(getattr(model, verb)))
            model.set_loss("cross_entropy")
            held = model.sessions[""].window.count
            found.append([*words, held, *(one.clip_grad_and_step() for one in (model, plain))])
            del model, plain, one
        return found

    def differ(self, rank, world_size, folder, layouts):
        """What each rank is told of rows that are not the other one's, and whether the model goes on."""
        found = []
        for sizes in layouts:
            model, plain = built(folder, sizes), built(folder, sizes)
            rows = windows(1)[0]
            mine = [
                ([{"input_ids": [rank + 1] * 4, "labels": [9] * 4}], 1),
                ([{"input_ids": [1] * 4, "labels": torch.tensor([9, 9, 9, 9 - rank])}], 1),
                ([{"input_ids": [1] * (4 + rank), "labels": [9] * (4 + rank)}], 1),
                (rows[: 2 - rank], 1),
                ([] if rank else rows, None),
                (rows, 1 + rank),
            ]
            words = []
            for one in (model, plain):
                one.set_optimizer("default", lr=1e-2)
            for given, size in mine:
                words.append(told(lambda m=model, r=given, n=size: m.forward_backward(r, micro_batch_size=n)))
            words.append(told(lambda m=model, r=mine[0][0]: m.forward_only(r)))
            table = "" if rank else model.get_train_configs()  # of one rank alone
            words.append(told(lambda m=model, r=rows, one=not rank: m.get_state_dict() if one else m.forward_only(r)))
            words.append(next((line.partition("  ")[2].strip() for line in table.splitlines() if "trainable" in line), ""))
            found.append([*words, steps(model, windows(2)) == steps(plain, windows(2))])
            del model, plain, one
        return found

    def read(self, rank, world_size, folder, home):
        """What each rank is told of files that the second one can't read, and whether the model goes on."""
        damaged = Path(home) / f"damaged{rank}"
        shutil.copytree(folder, damaged)
        if rank:
            file = damaged / "model.safetensors"
            file.write_bytes(file.read_bytes()[:1000])
        words = [told(lambda: built(str(damaged), {"tp_size": 2}))]
        model = built(folder, {"tp_size": 2})
        model.add_adapter_to_model("a", LoraConfig(r=2))
        model.save("a", home)
        place = Path(home) / ("b" if rank else "a")
        words.append(told(lambda: model.add_adapter_to_model("b", place)))
        model.add_adapter_to_model("b", Path(home) / "a")
        model.set_optimizer("default", lr=1e-2, adapter_name="b")
        return [*words, model.adapters.names(), steps(model, windows(2), "b")["losses"]]


LAYOUTS = [
    {"dp_size": 2},
    {"pp_size": 2},
    {"pp_size": 2, "vpp_size": 2},
    {"tp_size": 2, "sequence_parallel": True},
    {"cp_size": 2},
]


@pytest.mark.slow
def test_a_loss_that_fails_on_one_rank_fails_on_all(llama):
    first, second = run(Alone, "fail", 2, {"folder": llama, "layouts": LAYOUTS}, timeout=200)
    for sizes, one, two in zip(LAYOUTS, first, second, strict=True):
        assert two[:2] == ["ZeroDivisionError: of this loss", "KeyError: 'of this metric'"], sizes
        assert one[0].startswith("FailedElsewhere") and "rank 1" in one[0] and "ZeroDivisionError: of this loss" in one[0], (
            sizes
        )
        assert one[1].startswith("FailedElsewhere") and "rank 1" in one[1], sizes
        assert one[2].startswith("KeyError") and two[2].startswith("FailedElsewhere") and "rank 0" in two[2], sizes
        for rank in (one, two):
            assert rank[3:] == [0.0, 0, True, True], sizes


@pytest.mark.slow
def test_a_loss_that_fails_by_itself_on_one_rank_fails_on_all(llama):
    """In a split step: the others would go back through the model without it, or count a window of their own."""
    layouts = [{"dp_size": 2}, {"tp_size": 2}, {"cp_size": 2}]
    first, second = run(Alone, "split", 2, {"folder": llama, "layouts": layouts}, timeout=200)
    for sizes, one, two in zip(layouts, first, second, strict=True):
        assert two[:2] == ["ZeroDivisionError: of this loss"] * 2, sizes
        for told_of, verb in zip(one[:2], ("calculate_loss", "backward"), strict=True):
            assert told_of.startswith(f"FailedElsewhere: {verb}") and "rank 1" in told_of and "of this loss" in told_of, sizes
        for held, norm, plain in (one[2:], two[2:]):
            assert held == 1 and norm == plain > 0, sizes


@pytest.mark.slow
def test_ranks_that_share_their_rows_are_given_the_same(llama):
    """Rows by RANK in place of the data rank: of equal lengths they are mixed in silence, of others the processes abort. And a
    verb in which ranks meet is told where one calls it alone, while a table is for whoever asks."""
    layouts = [{"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}]
    for rank, found in enumerate(run(Alone, "differ", 2, {"folder": llama, "layouts": layouts}, timeout=200)):
        for sizes, (*words, state, parameters, goes_on) in zip(layouts, found, strict=True):
            assert len(words) == 7 and goes_on, sizes
            assert all(word.startswith("RanksApart: ranks 0, 1 compute together") for word in words), (sizes, words)
            assert "rank 0 in get_state_dict of the base model; rank 1 in forward_only" in state, sizes
            held, _, of = parameters.partition(" trainable, ")
            assert rank or (held and of == f"{held} in this rank's part of the base model"), (sizes, parameters)


@pytest.mark.slow
def test_experts_go_through_a_failing_loss_together(moe):
    layouts = [{"dp_size": 2, "ep_size": 2}]
    first, second = run(Alone, "fail", 2, {"folder": moe, "layouts": layouts}, timeout=200)
    assert first[0][0].startswith("FailedElsewhere") and second[0][0].startswith("ZeroDivisionError")
    assert first[0][3:] == second[0][3:] == [0.0, 0, True, True]


@pytest.mark.slow
def test_what_one_rank_cannot_read_is_made_on_none(llama, tmp_path):
    first, second = run(Alone, "read", 2, {"folder": llama, "home": str(tmp_path)}, timeout=200)
    assert second[0].startswith("ModelNotLoaded") and "SafetensorError" in second[0]
    assert first[0].startswith("ModelNotLoaded") and "rank 1 could not read its part: SafetensorError" in first[0]
    assert second[1].startswith("NoSuchPath")
    assert first[1].startswith("FailedElsewhere") and "NoSuchPath" in first[1] and "rank 1" in first[1]
    assert first[2:] == second[2:] and first[2] == ["a", "b"]
