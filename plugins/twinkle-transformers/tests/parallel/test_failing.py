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
