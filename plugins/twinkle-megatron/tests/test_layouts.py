"""Every layout trains as one process does: ten updates in fp32, rows and ranks with different numbers of tokens."""

from __future__ import annotations

import pytest

from twinkle_core.testing.ranks import run
from twinkle_megatron.testing import Layouts

DENSE = [
    {"tp_size": 2},
    {"pp_size": 2},
    {"dp_size": 2},
    {"tp_size": 2, "sequence_parallel": True},
    {"cp_size": 2},
    {"pp_size": 2, "vpp_size": 2},
]
EXPERTS = [
    {"dp_size": 2, "ep_size": 2},
    {"pp_size": 2},
    {"tp_size": 2, "sequence_parallel": True, "ep_size": 2},
    {"tp_size": 2, "sequence_parallel": True, "etp_size": 2},
]
OF_FOUR = [
    {"tp_size": 2, "pp_size": 2},
    {"dp_size": 2, "pp_size": 2, "vpp_size": 2},
    {"cp_size": 2, "tp_size": 2, "sequence_parallel": True},
]


def assert_as_alone(ranks, layouts, alone):
    for rank, found in enumerate(ranks):
        for sizes, numbers in zip(layouts, found, strict=True):
            for what in ("losses", "norms"):
                assert numbers[what] == pytest.approx(alone[what], rel=1e-5), f"{what} of {sizes} on rank {rank}"
    assert sum(alone["losses"][5:]) < sum(alone["losses"][:5]) - 0.1, "it learned nothing, so that equal losses say little"


@pytest.mark.slow
def test_two_processes_train_a_llama_as_one_does(llama, alone):
    ranks = run(Layouts, "train", 2, {"folder": llama, "layouts": DENSE}, timeout=400)
    assert_as_alone(ranks, DENSE, alone(llama))


@pytest.mark.slow
def test_two_processes_train_experts_as_one_does(moe, alone):
    """Also gradient norms, where experts on other tensor ranks must not be taken for copies."""
    ranks = run(Layouts, "train", 2, {"folder": moe, "layouts": EXPERTS}, timeout=400)
    assert_as_alone(ranks, EXPERTS, alone(moe))


@pytest.mark.slow
def test_four_processes_train_a_llama_as_one_does(llama, alone):
    ranks = run(Layouts, "train", 4, {"folder": llama, "layouts": OF_FOUR}, timeout=400)
    assert_as_alone(ranks, OF_FOUR, alone(llama))
