"""A process that ends right after a message: its status is that of its work."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest
import torch.distributed as dist

from twinkle_core.train import together

#: the thread of gloo gets the last hold of a tensor's memory and of its Python object, while the script keeps the interpreter.
#: Some 12 of 100 such processes abort where ``atexit`` does no more than close the group
PROGRAM = """
import atexit, sys
import torch, torch.distributed as dist
from twinkle_core.train.together import leave
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
kept = dist.group.WORLD  # as weights that lie apart keep it
atexit.register(leave)
x = torch.ones(30_000_000)
sys.setswitchinterval(1000)
work = dist.all_reduce(x, async_op=True)
del x
while not work.is_completed():
    pass
del work
"""
PR_SET_NAME = 15
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems don't tell what a thread does")


@pytest.mark.slow
def test_the_threads_of_a_process_group_do_not_abort_a_process_that_is_done(tmp_path):
    for number in range(10):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / str(number))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_group_is_closed_and_its_threads_are_let_through(monkeypatch, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    runs = iter([True, True, True, False])
    monkeypatch.setattr(together, "_gloo_runs", lambda: (not dist.is_initialized()) and next(runs))
    together.leave()
    assert not dist.is_initialized()
    assert next(runs, "asked until none runs") == "asked until none runs"


def test_they_are_not_waited_for_longer_than_was_said(monkeypatch):
    monkeypatch.setattr(together, "_gloo_runs", lambda: True)
    begun = time.monotonic()
    together.leave(patience=0.2)
    assert 0.2 <= time.monotonic() - begun < 2.0


def within(seconds, what):
    """Whether it becomes true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if what():
            return True
        time.sleep(0.005)
    return False


@LINUX
def test_threads_of_gloo_bear_its_name(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert within(
            10.0, lambda: any(comm.read_text().startswith("pt_gloo") for comm in Path("/proc/self/task").glob("*/comm"))
        )
    finally:
        dist.destroy_process_group()


@LINUX
def test_a_thread_of_gloo_that_works_is_told_from_one_that_waits():
    ready, go, end = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"pt_gloo_runner")  # as torch names them
        ready.set()
        go.wait()
        while not end.is_set():
            zlib.crc32(bytes(2**20))  # without the interpreter

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(10)
        assert within(10.0, lambda: not together._gloo_runs())  # it waits
        go.set()
        assert within(10.0, together._gloo_runs)
    finally:
        go.set()
        end.set()
        thread.join()
    assert within(10.0, lambda: not together._gloo_runs())
