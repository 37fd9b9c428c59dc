"""Models of other distributions on workers, and processes that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from test_dying import gone
from test_programs import descendants
from training import LR, assert_same, batches, state, train

from twinkle_core import registry
from twinkle_core.errors import NotInitialized, SlotsFull
from twinkle_core.runtime import local
from twinkle_core.testing.toys import random_rows
from twinkle_transformers.testing import write_tiny_llama


def test_a_third_partys_model(cluster, tmp_path):
    """Its constructor has no ``remote_group``, and it says nothing about workers but ``remote_class``."""
    toy = registry.resolve("model", "toy")
    rows = [[{**row, "input_ids": [t % 64 for t in row["input_ids"]]} for row in batch] for batch in batches()[:4]]
    rows = [[{**row, "labels": [t % 64 if t >= 0 else t for t in row["labels"]]} for row in batch] for batch in rows]
    found = []
    for where in ({}, {"remote_group": "actor"}):
        model = toy(seed=3, **where)
        model.set_optimizer("sgd", lr=LR["sgd"])
        model.add_metric("loss")
        start = state(model)
        found.append((train(model, rows, 2), state(model)))
    assert_same(found[1], found[0], start)


def test_many_tenants_on_one_worker(cluster, tmp_path):
    """The manager is a proxy of declared functions, as the model is."""
    multi = registry.resolve("model", "multi_lora_transformers")
    tiny = write_tiny_llama(tmp_path / "llama")
    torch.manual_seed(0)
    here, there = (
        multi(model_id=str(tiny), mixed_precision="no", max_loras=2, max_r=4, **where)
        for where in ({}, {"remote_group": "one"})
    )
    assert (there.multi_lora.max_loras, there.multi_lora.max_r, there.multi_lora.free) == (2, 4, 2)
    config = LoraConfig(r=2, target_modules="all-linear")
    here.multi_lora.acquire_lora("tenant", config)
    path = here.save("tenant", tmp_path, adapter_name="tenant")
    assert there.multi_lora.acquire_lora("tenant", path) == "lora_0"
    assert there.multi_lora.acquire_lora("other", config) == "lora_1"
    with pytest.raises(SlotsFull):
        there.multi_lora.acquire_lora("third", config)
    rows, norms = random_rows([5, 3, 8], vocabulary=250), []
    for model in (here, there):
        model.set_optimizer("adamw", lr=1e-2, adapter_name="tenant")
        with model.multi_lora.adapter("tenant") as slot:
            assert slot == "lora_0"
            norms.append([x for _ in range(3) for x in (float(model.forward_backward(rows)), model.clip_grad_and_step())])
    assert norms[1] == pytest.approx(norms[0], rel=2e-5)
    assert [tenant.tenant_adapter_name for tenant in there.multi_lora.tenants()] == ["tenant", "other"]
    there.multi_lora.release_lora("tenant")
    assert there.multi_lora.free == 1


def test_a_group_without_initialize_is_told(monkeypatch):
    monkeypatch.setattr(local, "_state", local._State(local.LocalRuntime()))
    toy = registry.resolve("model", "toy")
    with pytest.raises(NotInitialized, match=r"ToyModel\(remote_group='actor'\): there are no groups yet"):
        toy(remote_group="actor")
    local.initialize()
    assert type(toy(remote_group="actor")) is toy  # local mode: no effect


PROGRAM = """
import os, sys, time
import twinkle
from twinkle import DeviceGroup
from twinkle_core import registry

if __name__ == "__main__":
    twinkle.initialize(mode="ray", groups=[DeviceGroup("actor", 2, device_type="CPU")])
    model = registry.resolve("model", "toy")(remote_group="actor")
    model.set_optimizer("sgd", lr=0.1)
    rows = [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}] * 2
    print("loss", model.forward_backward(rows), flush=True)
    print(twinkle.get_device_placement(), flush=True)
    if "--raise" in sys.argv:
        raise RuntimeError("the driver's own")
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--raise"]])
def test_no_process_is_left_when_the_driver_ends(tmp_path, arguments):
    """A program that starts Ray itself, as a user's does; its workers, and Ray's own processes, end with it."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == (1 if arguments else 0), done.stderr
    assert "loss 4." in done.stdout, done.stdout + done.stderr
    pids = [int(line.split("process ")[1].split(",")[0]) for line in done.stdout.splitlines() if ", process " in line]
    assert len(pids) == 2
    assert all(map(gone, pids))
    deadline = time.monotonic() + 30
    while (left := of_session(done.stderr + done.stdout, tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def of_session(said, folder):
    """Command lines of processes that work in the program's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(folder):
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


SLOW = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs without
import twinkle
from twinkle import DeviceGroup
from remote_objects import Counter

if __name__ == "__main__":
    twinkle.initialize(mode="ray", groups=[DeviceGroup("actor", 2, device_type="CPU")])
    counter = Counter(remote_group="actor")
    print("pids", *counter.pid(), flush=True)
    counter.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_is_ended_in_the_middle_of_a_step(tmp_path, how):
    """Ctrl-C ends it and all processes of Ray within seconds, with the status of a signal. Killed, it can do nothing:
    its workers end when Ray misses it."""
    program = tmp_path / "program.py"
    program.write_text(SLOW)
    given = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given)
    try:
        pids = [int(word) for word in process.stdout.readline().split()[1:]]
        time.sleep(0.5)
        begun = descendants(process.pid)
        assert len(pids) == 2 and set(pids) < set(begun)
        process.send_signal(how)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode in (-how, 128 + how), said
    assert all(map(gone, pids))
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in said
        assert all(map(gone, begun))
