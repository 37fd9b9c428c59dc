"""What fails or differs on one rank alone is told on all, and all train on as if nothing was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from twinkle_core.testing import ranks

sys.path.insert(0, str(Path(__file__).parent))
from failing_jobs import ROWS, Failures, ready, state, trained

QUICK = {
    "dp": {"sizes": {"dp_size": 2}},
    "fsdp": {"sizes": {"fsdp_size": 2}},
}
SLOW = {
    "adapter": {"sizes": {"fsdp_size": 2}, "adapter": "a"},
    "untied": {"sizes": {"fsdp_size": 2}, "kind": "untied"},
    "tp": {"sizes": {"tp_size": 2}},
    "tokens": {"sizes": {"tp_size": 2, "sequence_parallel": True}},
    "ep": {"sizes": {"dp_size": 2, "ep_size": 2}, "kind": "moe"},
    "ep shards": {"sizes": {"fsdp_size": 2, "ep_size": 2}, "kind": "moe"},
    "ulysses": {"sizes": {"dp_size": 2, "ulysses_size": 2}},
}


@pytest.mark.parametrize("jobs", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_a_loss_or_metric_that_fails_on_one_rank_fails_on_all(jobs):
    first, second = ranks.run(Failures, "losses", 2, {"jobs": jobs}, timeout=200)
    for name, spec in jobs.items():
        one, two = first[name], second[name]
        own = ["ZeroDivisionError: of this loss", "SystemExit: of this loss", "ZeroDivisionError: division by zero"]
        own += ["KeyError: 'of this metric'"] * 2
        assert two["words"] == own, name
        whose = f"adapter '{spec['adapter']}'" if "adapter" in spec else "the base model"
        verbs = ["forward_backward"] * 4 + ["forward_only"]
        assert one["words"] == [
            f"FailedElsewhere: {verb} of {whose} failed on rank 1, and was given up on all ranks: {said}"
            for verb, said in zip(verbs, own, strict=True)
        ], name
        for found in (one, two):
            assert found["held"] == 0 and found["grads"] == 0, name
            assert found["seen"] == found["plain"], name
            assert all(torch.equal(v, found["plain weights"][k]) for k, v in found["weights"].items()), name
        alone = ready({}, spec.get("kind", "llama"), spec.get("adapter", ""))
        norms = trained(alone, ROWS, spec.get("adapter", ""))[2::3]
        assert one["seen"][2::3] == pytest.approx(norms, rel=2e-5), name
        for key, value in state(alone, spec.get("adapter", "")).items():
            torch.testing.assert_close(one["weights"][key], value, rtol=1e-4, atol=2e-5)


def elsewhere(verb, whose, said):
    return f"FailedElsewhere: {verb} of {whose} failed on rank 1, and was given up on all ranks: {said}"


def test_what_ranks_are_given_is_compared():
    """How gradients are clipped, everywhere; what a loss is given, where ranks compute together on the same rows."""
    meshes = {"dp": {"dp_size": 2}, "tp": {"tp_size": 2}, "fsdp": {"fsdp_size": 2}}
    parts = ranks.run(Failures, "differ", 2, {"meshes": meshes}, timeout=200)
    for name in meshes:
        for rank, part in enumerate(parts):
            words, norms = part[name]["words"], part[name]["norms"]
            for key, here, there in (
                ("norm", "clipped to a norm of 1 (norm_type 2)", "clipped to a norm of 2 (norm_type 2)"),
                ("kind", "clipped to a norm of 1 (norm_type 2)", "clipped to a norm of 1 (norm_type 3)"),
                ("temperature", "", " at temperature 2.0"),
                ("evaluated", "rank 0 in forward_only of the base model", "forward_only of the base model at temp"),
                ("anew", "after 1 updates", "after 0 updates"),
            ):
                assert words[key].startswith("RanksApart: ranks make the same call with different settings"), words
                first, _, second = words[key].partition("rank 1 in ")
                assert here in first and there in second, words[key]
            own = "BadArgument: max_grad_norm"
            assert words["none"].startswith(own if rank else "FailedElsewhere: clip_grad_and_step of the base model"), words
            for key in ("scalar", "list", "tensor"):
                assert words[key].startswith("RanksApart: ranks 0, 1 compute together") == (name == "tp"), (name, words[key])
                assert name == "tp" or words[key] == "nothing"
            assert norms[0] == norms[1] > 0 and norms[2] == norms[3] > 0, name
            assert all(torch.equal(v, part[name]["plain"][k]) for k, v in part[name]["built"].items()), name


@pytest.mark.parametrize("sizes", [{"dp_size": 2}, pytest.param({"fsdp_size": 2}, marks=pytest.mark.slow)], ids=["dp", "fsdp"])
def test_what_one_rank_cannot_read_is_read_on_none(sizes, tmp_path):
    first, second = ranks.run(Failures, "reading", 2, {"sizes": sizes, "home": str(tmp_path)}, timeout=200)
    one, two = first["words"], second["words"]
    for name, kind in (("missing", "NoSuchPath"), ("damaged", "CheckpointDamaged"), ("config", "BadAdapter")):
        assert two[name].startswith(kind), two[name]
        assert one[name].startswith(elsewhere("add_adapter_to_model", "adapter 'b'", kind)), one[name]
    for name, kind in (("load none", "CheckpointNotFound"), ("load damaged", "CheckpointDamaged")):
        assert two[name].startswith(kind), two[name]
        assert one[name].startswith("CheckpointNotRead") and "rank 1" in one[name], one[name]
    assert one["load argument"].startswith("FailedElsewhere: load of adapter 'a'"), one["load argument"]
    assert one["resume"].startswith("CheckpointNotRead") and two["resume"].startswith("CheckpointNotFound")
    for name, verb in (("others", "add_adapter_to_model of adapter 'b'"), ("load others", "load of adapter 'a'")):
        assert one[name] == two[name] and one[name].startswith("RanksApart"), one[name]
        assert f"rank 0 in {verb} of a checkpoint of step 0" in one[name], one[name]
        assert f"rank 1 in {verb} of a checkpoint of step 1" in one[name], one[name]
    assert one["made"].startswith("FailedElsewhere: to make TransformersModel failed on rank 1"), one["made"]
    for found in (first, second):
        assert found["kept"] and found["seen"][0] == found["seen"][1]


@pytest.mark.parametrize("sizes", [{"dp_size": 2}, pytest.param({"fsdp_size": 2}, marks=pytest.mark.slow)], ids=["dp", "fsdp"])
def test_what_one_rank_calls_alone_is_told(sizes):
    first, second = ranks.run(Failures, "alone", 2, {"sizes": sizes}, timeout=200)
    one, two = first["words"], second["words"]
    for name in ("remove_adapter", "apply_patch", "add_adapter_to_model", "load"):
        assert one[name] == two[name] and one[name].startswith("RanksApart"), one[name]
        assert f"rank 0 in {name} of " in one[name] and "; rank 1 in forward_backward of adapter 'a'" in one[name], one[name]
    assert one["step"].startswith("BadWindowSize") and two["step"].startswith("RanksApart"), (one["step"], two["step"])
    assert "rank 0 in apply_patch of adapter 'a': ValueHeadPatch" in one["one patch or another"], one["one patch or another"]
    assert two["a patch that fits not"] == "ZeroDivisionError: of this patch"
    assert one["a patch that fits not"].startswith("FailedElsewhere: apply_patch of "), one["a patch that fits not"]
    for found in (first, second):
        assert found["patches"] and found["seen"][0] == found["seen"][1]


def test_a_model_that_fails_in_the_middle_of_a_pass_is_told():
    """On all ranks alike, they go on. On one alone, no message of it can be taken for one of the pass: nothing is computed from
    it, on either rank."""
    jobs = {"tp": {"sizes": {"tp_size": 2}}, "fsdp": {"sizes": {"fsdp_size": 2}}}
    parts = ranks.run(Failures, "model", 2, {"jobs": jobs}, timeout=200)
    for rank, part in enumerate(parts):
        for name in jobs:
            assert part[name]["words"] == [f"ZeroDivisionError: of this layer on {rank}"] * 2, part[name]["words"]
            assert part[name]["seen"][0] == part[name]["seen"][1], name
        first, *later = part["alone"]["words"]
        own = "ZeroDivisionError: of this layer on 1"
        assert first == own if rank else first.startswith(elsewhere("forward_backward", "the base model", own)), first
        assert len(later) == 2
        assert later[0].startswith("RankLeft: forward_backward of the base model waits for all ranks"), later
        assert "rank 1 has left a pass in its middle (ZeroDivisionError: of this layer on 1)" in later[0], later
