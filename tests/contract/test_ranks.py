"""A suite's method in several processes: what comes back, what is said when one fails, and that nothing is left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from twinkle_core.errors import RankFailed
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing import ranks

pytestmark = pytest.mark.slow  # each starts processes that import torch


class Together:
    component, arguments = None, {}

    def add(self, rank, world_size, numbers):
        mesh = DeviceMesh.from_sizes()
        total = torch.tensor([float(numbers[rank])])
        dist.all_reduce(total)
        return {"sum": total, "place": [mesh.rank, mesh.world_size, mesh.sizes["dp"]], "pid": os.getpid()}

    def fail_or_wait(self, rank, world_size):
        if rank == 1:
            raise ValueError("rank 1 has had enough")
        time.sleep(600)

    def wait(self, rank, world_size):
        time.sleep(600)


def test_ranks_meet_and_their_results_come_in_order():
    found = ranks.run(Together, "add", 2, {"numbers": [3, 4]})
    assert [each["place"] for each in found] == [[0, 2, 2], [1, 2, 2]]
    assert [each["sum"].item() for each in found] == [7, 7]
    assert len({os.getpid(), *(each["pid"] for each in found)}) == 3


class Made:
    component, arguments = None, {}

    def told(self, rank, world_size):
        return {"component": self.component.__name__, "arguments": dict(self.arguments)}


def test_a_class_made_on_the_fly_is_made_again():
    """As ``twinkle check`` makes one around a component."""
    suite = type("OnTheFly", (Made,), {"component": Together, "arguments": {"layers": 2}})
    assert ranks.run(suite, "told", 1, {}) == [{"component": "Together", "arguments": {"layers": 2}}]


def test_one_that_fails_is_quoted_and_the_others_are_ended():
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed \(exit status 1\)[\s\S]*rank 1 has had enough"):
        ranks.run(Together, "fail_or_wait", 2, {}, timeout=300)
    assert time.monotonic() - start < 200


def test_one_that_hangs_is_ended():
    with pytest.raises(RankFailed, match="rank 0 of 2 was not done after 1 s"):
        ranks.run(Together, "wait", 2, {}, timeout=1)


SCRIPT = """
from twinkle_core.testing.ranks import run

class Job:
    def number(self, rank, world_size):
        print("a rank")
        return rank + world_size

if __name__ == "__main__":
    print("the script", run(Job, "number", 2, {}, timeout=100))
"""


def test_a_script_can_start_ranks_of_its_own_classes(tmp_path):
    """They take the class from the script's file, and don't run it as a script again: that would start ranks without end."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(file)], timeout=100, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "the script [2, 3]", done.stderr[-2000:]
