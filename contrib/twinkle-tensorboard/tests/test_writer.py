"""What is written, read back with TensorBoard's own reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import twinkle_tensorboard.hooks
from twinkle.listener import JsonLinesWriter, listening
from twinkle_core import plugins
from twinkle_core.testing.distributions import write_distribution
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM, random_rows
from twinkle_tensorboard import TensorBoardWriter

HOME = Path(__file__).resolve().parents[1]
ROWS = random_rows([4, 6, 3])


def model():
    torch.manual_seed(0)
    built = session_model(TinyLM())
    built.set_optimizer("adamw", lr=1e-2)
    for metric in ("loss", "train"):
        built.add_metric(metric)
    return built


def train(built, steps):
    for _ in range(steps):
        built.forward_backward(ROWS)
        built.clip_grad_and_step()
        built.calculate_metric()


def scalars(folder):
    """tag -> [(step, value), ...]"""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def expected(path):
    """The same from a metrics file; TensorBoard keeps single precision."""
    found = {}
    for row in map(json.loads, path.read_text().splitlines()):
        for name, value in row.items():
            group, tag = ("eval", name.removeprefix("eval_")) if name.startswith("eval_") else ("train", name)
            if name not in ("step", "epoch", "seconds"):
                found.setdefault(f"{group}/{tag}", []).append((row["step"], pytest.approx(value, rel=1e-6)))
    return found


def test_the_numbers_are_those_of_the_metrics_file(tmp_path):
    built = model()
    with listening(TensorBoardWriter(tmp_path / "runs/x"), JsonLinesWriter(tmp_path / "metrics.jsonl")):
        train(built, 3)
        built.calculate_metric()  # nothing new: no point
        built.forward_only(ROWS)
        built.calculate_metric(is_training=False)
    train(built, 1)  # not heard any more
    found = scalars(tmp_path / "runs/x")
    assert found == expected(tmp_path / "metrics.jsonl")
    assert {"train/loss", "train/lr", "train/grad_norm", "train/tokens_per_second", "eval/loss"} <= set(found)
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3]


def test_points_can_be_seen_while_the_run_goes_on(tmp_path):
    with listening(TensorBoardWriter(tmp_path)):
        train(model(), 1)
        assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [1]


def test_a_resumed_run_replaces_the_points_that_it_makes_again(tmp_path):
    built = model()
    with listening(TensorBoardWriter(tmp_path / "x")):
        train(built, 2)
        path = built.save("checkpoint", tmp_path, save_optimizer=True)
        train(built, 3)
    resumed = model()
    resumed.resume_from_checkpoint(path)
    with listening(TensorBoardWriter(tmp_path / "x")):
        train(resumed, 2)
    assert [step for step, _ in scalars(tmp_path / "x")["train/loss"]] == [1, 2, 3, 4]


def test_one_adapter_of_several_and_rank_0_alone(tmp_path, monkeypatch):
    def tell(name):
        session = SimpleNamespace(name=name)
        plugins.hooks().twinkle_metrics_logged(step=1, metrics={"loss": 1.0}, session=session, is_training=True)

    with listening(TensorBoardWriter(tmp_path / "a", adapter_name="a"), TensorBoardWriter(tmp_path / "all")):
        for name in ("b", "a", ""):
            tell(name)
    assert (len(scalars(tmp_path / "a")["train/loss"]), len(scalars(tmp_path / "all")["train/loss"])) == (1, 3)
    monkeypatch.setenv("RANK", "1")
    with listening(TensorBoardWriter(tmp_path / "second")):
        tell("a")
    assert not (tmp_path / "second").exists()


def test_a_configuration_turns_it_on_for_its_own_folder(tmp_path):
    plugins.register(twinkle_tensorboard.hooks, "installed")
    try:
        for name in ("one", "two"):
            plugins.hooks().twinkle_configure(config=SimpleNamespace(output_dir=str(tmp_path / name)))
            train(model(), 1)
    finally:
        plugins.unregister("installed")
        plugins.unregister(twinkle_tensorboard.hooks.NAME)
    for name in ("one", "two"):
        assert [step for step, _ in scalars(tmp_path / name / "tensorboard")["train/loss"]] == [1]


def test_being_installed_does_not_import_tensorboard():
    code = "import sys, twinkle_tensorboard.hooks; print([m for m in ('torch', 'tensorboard') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout == "[]\n"


def environment(*folders, **variables):
    """Of a child that finds this source, installed or not."""
    path = os.pathsep.join(map(str, [*folders, HOME / "src", os.environ.get("PYTHONPATH", "")])).rstrip(os.pathsep)
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **variables}


@pytest.mark.slow
def test_twinkle_train_writes_where_it_is_installed(tmp_path):
    """The command as users call it, with this distribution's metadata; and not where it is switched off."""
    from twinkle_core.cli import toy_model

    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    points = {group.removeprefix("twinkle."): names for group, names in project["entry-points"].items()}
    write_distribution(tmp_path / "site", project["name"], project["version"], {"plugins": points["plugins"]})
    (tmp_path / "model").mkdir()
    toy_model.build(tmp_path / "model", ["Who are you?", "I am Ada."], hidden_size=32, layers=1, vocab_size=300)
    (tmp_path / "rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am Ada."}]}\n' * 8
    )
    config = {
        "model": {"id": str(tmp_path / "model"), "mixed_precision": "no"},
        "dataset": {"id": str(tmp_path / "rows.jsonl")},
        "dataloader": {"batch_size": 2},
        "training": {"max_steps": 3, "logging_steps": 1},
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "sft.yaml").write_text(json.dumps(config))  # JSON is YAML
    command = [sys.executable, "-m", "twinkle", "train", str(tmp_path / "sft.yaml")]
    run = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, env=environment(tmp_path / "site"), **run)
    assert done.returncode == 0, done.stderr
    found = scalars(tmp_path / "out/tensorboard")
    assert found == expected(tmp_path / "out/metrics.jsonl") and len(found["train/loss"]) == 3
    off = environment(tmp_path / "site", TWINKLE_DISABLE_PLUGINS=project["name"])
    done = subprocess.run([*command, "--output_dir", str(tmp_path / "off")], env=off, **run)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "off/metrics.jsonl").exists() and not (tmp_path / "off/tensorboard").exists()
