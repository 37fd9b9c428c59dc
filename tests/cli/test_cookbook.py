"""The cookbook's files run, and say the same thing three times: in a few lines, verb by verb, and in YAML."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle_core.testing.vision import write_tiny_vision

COOKBOOK = Path(__file__).parents[2] / "cookbook"


def _run(script: str, *words: object) -> str:
    command = [sys.executable, str(COOKBOOK / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("file", sorted(COOKBOOK.glob("*.py")), ids=lambda path: path.name)
def test_only_public_names_are_imported(file):
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]
    assert names and not [name for name in names if name.startswith("twinkle_core")]


def test_three_heights_give_the_same_weights_and_resuming_too(tiny, tmp_path, twinkle, lines):
    basic = _run("sft_lora_basic.py", "--model", tiny, "--output", tmp_path / "basic")
    loop = _run("sft_lora_loop.py", "--model", tiny, "--output", tmp_path / "loop")
    status, text = twinkle("train", COOKBOOK / "sft.yaml", "--model.id", tiny, "--output_dir", tmp_path / "yaml")
    assert status == 0, text
    resumed = _run("sft_lora_loop.py", "--model", tiny, "--output", tmp_path / "r", "--resume", tmp_path / "loop/step-20")
    assert len([line for line in basic.splitlines() if line[0].isdigit()]) == 24
    assert "step 24/24" in loop and "eval" in loop and "step 21/24" in resumed and "step 20/24" not in resumed
    same = {_weights(tmp_path / name) for name in ("basic/last", "loop/last", "yaml/checkpoint-24", "r/last")}
    assert len(same) == 1
    written = sorted(path.name for path in (tmp_path / "yaml").iterdir())
    assert written[:2] == ["checkpoint-20", "checkpoint-24"]
    readme = (COOKBOOK / "README.md").read_text(encoding="utf-8")
    assert all(f"output_dir/{name}`" in readme for name in written[2:]), written
    rates = [row["lr"] for row in lines(tmp_path / "yaml/metrics.jsonl")]
    assert rates[0] == 1e-3 and all(rate > 0 for rate in rates)


def test_a_model_that_sees_learns_its_colours(tmp_path):
    folder = write_tiny_vision(tmp_path / "model")
    shown = _run("vision_basic.py", "--model", folder, "--output", tmp_path / "out").splitlines()
    losses = [float(line.split()[1]) for line in shown if line[:1].isdigit()]
    assert len(losses) == 6 and losses[-1] < losses[0] / 2
    assert any(line.startswith("answer:") for line in shown) and _weights(tmp_path / "out/last")
