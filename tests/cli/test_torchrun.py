"""``twinkle train`` under torchrun: as one process, and what is left when a process is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from twinkle_core.train import checkpoint
from twinkle_transformers.testing import write_tiny_llama

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def config(folder: Path, name: str, **sections) -> Path:
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
    for key, value in sections.items():
        tree[key] = {**tree[key], **value} if isinstance(tree.get(key), dict) else value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def start(path: Path, processes: int, *words: str) -> subprocess.Popen:
    head = [*LAUNCH, str(processes)] if processes > 1 else [sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*head, "-m", "twinkle", "train", str(path), *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


def finish(process: subprocess.Popen, timeout: float = 240) -> tuple[int, str]:
    try:
        text, _ = process.communicate(timeout=timeout)
        return process.returncode, text
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def weights(folder: Path) -> torch.Tensor:
    tensors = load_file(next(folder.glob("*model.safetensors")))
    return torch.cat([tensors[k].flatten() for k in sorted(tensors)])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, {"fsdp_size": 2}], ids=["data_parallel", "fsdp"])
def test_two_processes_train_as_one(mesh, tmp_path):
    for name, processes, section in (("one", 1, None), ("two", 2, mesh)):
        status, text = finish(start(config(tmp_path, name, mesh=section, adapter=None), processes))
        assert status == 0, text
        assert text.count("6 steps in all") == 1, "one process speaks for all"
    one, two, begin = (weights(tmp_path / name) for name in ("one/checkpoint-6", "two/checkpoint-6", "one/checkpoint-2"))
    assert float((one - two).norm() / (one - begin).norm()) < 1e-3
    metrics = [[json.loads(line) for line in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("one", "two")]
    assert [row["step"] for row in metrics[1]] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(*metrics, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-5) and b["grad_norm"] == pytest.approx(a["grad_norm"], rel=2e-5)


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_its_last_checkpoint_goes_on(tmp_path):
    """Each process writes its part of it."""
    plan = {"save_steps": 3, "save_sharded": True}
    path = config(tmp_path, "out", training={"max_steps": 400, **plan}, mesh={"fsdp_size": 2}, adapter=None)
    process = start(path, 2)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "out/checkpoint-3").is_dir():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        worker = next(w for w in children(process.pid) if environment(w).get("RANK") == "1")
        os.kill(worker, signal.SIGKILL)
        killed = time.monotonic()
        status, text = finish(process, 60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert status != 0 and time.monotonic() - killed < 30
    assert re.search(r"Signal 9 \(SIGKILL\)|exitcode\s*: -9", text), text
    last = max((tmp_path / "out").glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    step = checkpoint.inspect(last, hashes=True).cur_step
    assert step >= 3 and step % 3 == 0
    assert list(last.glob("model-shards/shard-00002-*")) and not (last / "model.safetensors").exists()
    again = config(tmp_path, "out", training={"max_steps": step + 2, **plan}, mesh={"fsdp_size": 2}, adapter=None)
    status, text = finish(start(again, 2, "--resume"))
    assert status == 0 and f"after step {step}" in text, text
    assert (tmp_path / f"out/checkpoint-{step + 2}").is_dir()
    again = config(tmp_path, "out", training={"max_steps": step + 3, **plan, "save_sharded": False}, adapter=None)
    status, text = finish(start(again, 1, "--resume"))
    assert status == 0 and f"after step {step + 2}" in text, text
    assert (tmp_path / f"out/checkpoint-{step + 3}/model.safetensors").is_file(), "one process makes plain files of it"


def children(process: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == process:
                found.append(int(folder.name))
    return found


def environment(process: int) -> dict[str, str]:
    pairs = (Path("/proc") / str(process) / "environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_a_mesh_of_another_size_is_told_with_its_line(tmp_path, twinkle):
    status, text = twinkle("train", config(tmp_path, "out", mesh={"fsdp_size": 2}))
    assert status == 1 and "2 rank(s), and 1 process is running" in text and "torchrun --nproc-per-node 2" in text


@pytest.mark.slow
def test_the_cookbook_resumes_on_another_number_of_processes(tmp_path):
    write_tiny_llama(tmp_path / "model")
    script = str(Path(__file__).parents[2] / "cookbook/transformers/fsdp2.py")
    words = ["--model", str(tmp_path / "model"), "--steps", "12", "--output"]
    for processes, out, more in ((2, "two", []), (1, "one", ["--resume", str(tmp_path / "two/step-10")])):
        command = [*LAUNCH, str(processes), script, *words, str(tmp_path / out), *more]
        given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=given, start_new_session=True
        )
        status, text = finish(process)
        assert status == 0, text
        assert text.count("step 12/12") == 1 and ("step 10/12" in text) == (processes == 2)
    assert (tmp_path / "one/last-checkpoint/tokenizer.json").is_file()
    two, one, begin = (weights(tmp_path / n) for n in ("two/last-checkpoint", "one/last-checkpoint", "two/step-10"))
    assert float((one - two).norm() / (two - begin).norm()) < 1e-2


def test_shards_of_an_adapter_are_refused_with_the_line(tmp_path, twinkle):
    status, text = twinkle("train", config(tmp_path, "out", training={"save_sharded": True}))
    assert status == 1 and "training.save_sharded is for all weights (adapter: null)" in text
