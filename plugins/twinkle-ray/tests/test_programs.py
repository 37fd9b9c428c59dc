"""Whole programs that start Ray themselves: ``twinkle train`` with ``mode: ray``, and the cookbook."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from twinkle_core.config.schema import TrainConfig
from twinkle_core.errors import BadConfig
from twinkle_core.train import checkpoint
from twinkle_transformers.testing import write_tiny_llama

ROOT = Path(__file__).parents[3]
RAY = {"mode": "ray", "workers": {"device_type": "CPU"}}


def config(folder, name, **sections):
    if not (folder / "model").is_dir():
        write_tiny_llama(folder / "model")
    tree = {
        "model": {"id": str(folder / "model"), "mixed_precision": "no"},
        "template": {"max_length": 1024},
        "dataset": {
            "id": "bundled://self-cognition",
            "slice": 16,
            "preprocessor": {"cls": "self_cognition", "model_name": "T", "model_author": "A"},
        },
        "dataloader": {"batch_size": 5},
        "training": {"max_steps": 6, "save_steps": 2},
        "output_dir": str(folder / name),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**tree, **sections}))
    return path


def start(*command):
    given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_memory_monitor_refresh_ms": "0"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=given,
        start_new_session=True,
    )


def finish(process, timeout=240):
    try:
        text, _ = process.communicate(timeout=timeout)
        return process.returncode, text
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def weights(folder):
    tensors = load_file(next(folder.glob("*model.safetensors")))
    return torch.cat([tensors[k].flatten() for k in sorted(tensors)])


@pytest.mark.slow
def test_workers_train_as_one_process_and_another_number_goes_on(tmp_path):
    for name, sections in (("one", {}), ("ray", {**RAY, "mesh": {"dp_size": 2}})):
        status, text = finish(start("-m", "twinkle", "train", config(tmp_path, name, **sections)))
        assert status == 0, text
        assert text.count("6 steps in all") == 1 and "loss plot" in text
    one, ray, begin = (weights(tmp_path / name) for name in ("one/checkpoint-6", "ray/checkpoint-6", "one/checkpoint-2"))
    assert float((one - ray).norm() / (one - begin).norm()) < 1e-3
    metrics = [[json.loads(line) for line in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("one", "ray")]
    assert [row["step"] for row in metrics[1]] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(*metrics, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-5) and b["grad_norm"] == pytest.approx(a["grad_norm"], rel=2e-5)
    more = config(tmp_path, "ray", training={"max_steps": 8, "save_steps": 2})
    status, text = finish(start("-m", "twinkle", "train", more, "--resume"))
    assert status == 0 and "after step 6" in text, text


@pytest.mark.slow
def test_ctrl_c_stops_after_the_step_with_a_checkpoint(tmp_path):
    """A terminal sends it to all processes of the program; those of Ray go on until the driver is through."""
    path = config(tmp_path, "out", training={"max_steps": 2000, "save_steps": 3}, mesh={"fsdp_size": 2}, **RAY)
    process = start("-m", "twinkle", "train", path)
    try:
        deadline = time.monotonic() + 150
        while not (tmp_path / "out/checkpoint-3").is_dir():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        status, text = finish(process, 90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert status == 130 and "go on with --resume" in text, text
    last = max((tmp_path / "out").glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    assert f"stopped after step {last.name.rpartition('-')[2]} of" in text
    assert checkpoint.inspect(last, hashes=True).cur_step >= 3


def descendants(process):
    """Processes that one has begun, and those that these have, by their command lines."""
    parents, lines = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                lines[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
    found, new = {}, {process}
    while new := {pid for pid, parent in parents.items() if parent in new}:
        found |= {pid: lines[pid] for pid in new}
    return found


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_run_and_resume_goes_on_as_if_it_had_not(tmp_path):
    """Whenever it happens: the run says so within 30 seconds, the last checkpoint is whole, and losses are those of a run that
    nothing broke off."""
    given = {"mesh": {"dp_size": 2}, "optimizer": {"cls": "sgd", "lr": 0.05}, "scheduler": None}
    plan = {"save_steps": 3}
    process = start("-m", "twinkle", "train", config(tmp_path, "out", training={"max_steps": 5000, **plan}, **given, **RAY))
    try:
        deadline = time.monotonic() + 200
        while not (tmp_path / "out/checkpoint-3").is_dir():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(max(pid for pid, line in descendants(process.pid).items() if line.startswith("ray::Worker")), signal.SIGKILL)
        killed = time.monotonic()
        status, text = finish(process, 90)
        spent = time.monotonic() - killed
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert status == 1 and "of group 'actor'" in text and " died during " in text, text
    assert spent < 30
    last = max((tmp_path / "out").glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    step = checkpoint.inspect(last, hashes=True).cur_step
    assert step >= 3 and step % 3 == 0
    until = {"max_steps": step + 4, **plan}
    status, text = finish(start("-m", "twinkle", "train", config(tmp_path, "out", training=until, **given, **RAY), "--resume"))
    assert status == 0 and f"after step {step}" in text, text
    whole = {**given, "mesh": None}
    status, text = finish(start("-m", "twinkle", "train", config(tmp_path, "whole", training=until, **whole)))
    assert status == 0, text
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("out", "whole")]
    resumed, unbroken = ({row["step"]: row["loss"] for row in map(json.loads, each)} for each in lines)
    steps = range(1, step + 5)
    assert [resumed[n] for n in steps] == [pytest.approx(unbroken[n], rel=1e-4) for n in steps]


@pytest.mark.slow
def test_the_cookbook_resumes(tmp_path):
    write_tiny_llama(tmp_path / "model")
    script = ROOT / "cookbook/transformers/ray_sft.py"
    words = ["--model", tmp_path / "model", "--steps", 12, "--output"]
    first = finish(start(script, *words, tmp_path / "two"))
    assert first[0] == 0 and first[1].count("step 12/12") == 1, first[1]
    second = finish(start(script, *words, tmp_path / "one", "--workers", 1, "--resume", tmp_path / "two/step-10"))
    assert second[0] == 0 and "step 11/12" in second[1] and "step 10/12" not in second[1], second[1]
    two, one, begin = (weights(tmp_path / n) for n in ("two/last-checkpoint", "one/last-checkpoint", "two/step-10"))
    assert float((one - two).norm() / (two - begin).norm()) < 1e-2


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"mode": "rai"}, "unknown runtime 'rai'. Did you mean 'ray'?"),
        ({"workers": {"ranks": 2}}, "workers: there are none without a mode that starts them"),
        (
            {"mode": "ray", "workers": {"ranks": 3}, "mesh": {"tp_size": 2}},
            "tp_size 2 = 2, which does not fit a world size of 3",
        ),
    ],
)
def test_what_a_configuration_may_not_say(tmp_path, sections, text):
    from twinkle_core.cli import planning
    from twinkle_core.config.load import load

    path = config(tmp_path, "out", **sections)
    with pytest.raises(BadConfig) as caught:
        planning.make(*load(path, []))
    assert text in str(caught.value)
    assert TrainConfig.model_fields["mode"].default == "local"


def test_an_address_where_nobody_answers_is_a_fault_of_the_configuration(tmp_path, monkeypatch):
    """It is told with the others, before data is loaded that may take an hour."""
    from twinkle_core.cli import planning
    from twinkle_core.config.load import load

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(BadConfig, match=f"RAY_ADDRESS is '{address}'"):
        planning.make(*load(config(tmp_path, "out", **RAY), []))
    assert not (tmp_path / "out").exists()


def test_a_driver_is_no_rank(tmp_path):
    from twinkle_core.cli import planning
    from twinkle_core.config.load import load

    plan = planning.make(*load(config(tmp_path, "out", mesh={"fsdp_size": 2}, **RAY), []))
    assert plan.first and plan.ranks is None
    assert plan.mesh.world_size == 2 and plan.mesh.device_type == "cpu"


def test_core_and_the_facade_do_without_ray():
    """Nothing of them imports it, a model's class and a loader's included."""
    code = (
        "import sys, twinkle, twinkle_core; from twinkle.model import TransformersModel; "
        "from twinkle.dataloader import DataLoader; "
        "import twinkle_core.runtime.proxy, twinkle_core.runtime.serve, twinkle_core.cli.training; "
        "print([m for m in sys.modules if m.split('.')[0] in ('ray', 'twinkle_ray')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_ray_the_pip_line_is_told():
    code = "import sys; sys.modules['ray'] = None\nimport twinkle\ntwinkle.initialize(mode='ray')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "runtime 'ray' from twinkle-ray 0.1.0 needs 'ray', which is not installed" in done.stderr, done.stderr
    assert "pip install ray" in done.stderr
