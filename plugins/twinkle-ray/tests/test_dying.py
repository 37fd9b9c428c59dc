"""A worker that fails alone, or dies, ends its group at once; the last checkpoint is whole, and a new run goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import ray
from remote_objects import Counter
from training import batches, built, train

from twinkle_core.errors import CheckpointNotFound, GroupEnded, WorkerDied
from twinkle_core.mesh import DeviceGroup
from twinkle_core.runtime import local
from twinkle_ray.runtime import RayRuntime
from twinkle_transformers.testing import write_tiny_llama


@pytest.fixture
def victim(cluster):
    """A group of two workers that may be ended."""
    beside = RayRuntime()
    group = DeviceGroup("victim", 2, device_type="CPU")
    beside.start(nproc_per_node=None, groups=[group], mesh=None, seed=7, full_determinism=False)
    cluster.groups["victim"] = beside.groups["victim"]
    cluster._devices["victim"] = group
    yield "victim"
    del cluster.groups["victim"]
    beside.shutdown()


def gone(pid):
    """Whether a process ends within 10 seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_a_worker_killed_in_the_middle_of_a_step(victim, tmp_path):
    """The others wait for it in a collective; the driver is told within seconds, and all are ended."""
    tiny = write_tiny_llama(tmp_path / "llama")
    model = built(tiny, victim, optimizer="adamw")
    train(model, batches()[:2])
    path = model.save("last", tmp_path, save_optimizer=True)
    counter = Counter(remote_group=victim)
    pids = counter.pid()
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"worker 1 of group 'victim' \(.*, process \d+\) died during die\(\)"):
        counter.die(1)
    assert time.monotonic() - start < 30
    assert all(map(gone, pids))
    with pytest.raises(GroupEnded, match=r"group 'victim' were ended: worker 1 died during die\(\)"):
        model.forward_backward(batches()[2])
    with pytest.raises(GroupEnded):
        Counter(remote_group=victim)
    again = built(tiny, "actor", optimizer="adamw")
    again.resume_from_checkpoint(path)
    here = built(tiny, optimizer="adamw")
    expected = train(here, batches()[:4])[2:]
    assert train(again, batches()[2:4]) == [pytest.approx(step, rel=2e-5) for step in expected]


@pytest.mark.slow
def test_a_worker_killed_while_it_saves(victim, tmp_path):
    """From outside, at any moment: a checkpoint of that name is whole or absent, and the older one is as it was."""
    tiny = write_tiny_llama(tmp_path / "llama")
    model = built(tiny, victim, optimizer="adamw")
    train(model, batches()[:1])
    path = model.save("first", tmp_path, save_optimizer=True)
    first = Counter(remote_group=victim).pid()[0]
    ray.get(kill_soon.remote(first, 0.03))
    with pytest.raises((WorkerDied, GroupEnded)):
        for number in range(1000):
            model.save(f"again{number % 2}", tmp_path, save_optimizer=True)
    again = built(tiny, "actor", optimizer="adamw")
    again.resume_from_checkpoint(path)
    for name in ("again0", "again1"):
        try:
            again.resume_from_checkpoint(tmp_path / name)
        except CheckpointNotFound:
            assert not (tmp_path / name).exists()


@pytest.mark.slow
def test_a_worker_killed_while_it_loads(victim, tmp_path):
    """From outside, at any moment: it is told, and the checkpoint is as it was."""
    tiny = write_tiny_llama(tmp_path / "llama")
    model = built(tiny, victim, optimizer="adamw")
    train(model, batches()[:1])
    path = model.save("first", tmp_path, save_optimizer=True)
    second = Counter(remote_group=victim).pid()[1]
    ray.get(kill_soon.remote(second, 0.03))
    with pytest.raises((WorkerDied, GroupEnded), match=r"died during (load|resume_from_checkpoint)"):
        for _ in range(1000):
            model.load("first", tmp_path)
            model.resume_from_checkpoint(path)
    again = built(tiny, "actor", optimizer="adamw")
    assert again.resume_from_checkpoint(path)["cur_step"] == 1


@pytest.mark.slow
def test_a_constructor_that_fails_on_one_worker_alone(victim):
    """Its own error, and the end of the group: the others have made something."""
    with pytest.raises(ValueError, match="not today") as caught:
        Counter(fail_on=1, remote_group=victim)
    note, _ = caught.value.__notes__
    assert "raised by worker 1 of group 'victim'" in note and "remote_objects.py" in note
    with pytest.raises(GroupEnded, match=r"1 of 2 workers failed in Counter\(...\) \(ValueError\)"):
        Counter(remote_group=victim)


@ray.remote(num_cpus=0)
def kill_soon(pid, seconds):
    import threading

    threading.Timer(seconds, os.kill, (pid, 9)).start()


def test_one_that_fails_alone_ends_the_group(victim, monkeypatch):
    """Its peers wait for it: they are given some time, and then ended. The error is the worker's own."""
    monkeypatch.setattr("twinkle_ray.groups.PATIENCE", 0.5)
    counter = Counter(remote_group=victim)
    pids = counter.pid()
    with pytest.raises(ValueError, match="rank 1") as caught:
        counter.raises("value", on=1, wait_for_others=True)
    assert "the workers of group 'victim' were ended: they are not at the same point any more" in caught.value.__notes__[-1]
    assert all(map(gone, pids))
    with pytest.raises(GroupEnded, match=r"1 of 2 workers failed in raises\(\) \(ValueError\)"):
        counter.first()


@pytest.mark.slow
def test_one_that_fails_is_not_cut_short_by_slow_peers(victim, monkeypatch):
    """Who answers in time has its say: here none is left waiting, but they went different ways."""
    counter = Counter(remote_group=victim)
    with pytest.raises(ValueError, match="rank 0"):
        counter.raises("value", on=0)
    with pytest.raises(GroupEnded):
        counter.first()
    assert local.get_device_placement().count("(ended)") == 1
