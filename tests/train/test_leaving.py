"""A process that ends right after a message: its status is that of its work."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: the thread of gloo gets the last hold of a tensor's memory and of its Python object, while the script keeps the interpreter
PROGRAM = """
import atexit, sys
import torch, torch.distributed as dist
from twinkle_core.train.together import leave
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
kept = dist.group.WORLD  # as weights that lie apart keep it
atexit.register(leave if sys.argv[2] == "leave" else dist.destroy_process_group)
x = torch.ones(30_000_000)
sys.setswitchinterval(1000)
work = dist.all_reduce(x, async_op=True)
del x
while not work.is_completed():
    pass
del work
"""


@pytest.mark.slow
def test_the_threads_of_a_process_group_do_not_abort_a_process_that_is_done(tmp_path):
    for number in range(10):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / str(number)), "leave"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
