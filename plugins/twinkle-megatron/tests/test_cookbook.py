"""The examples run on two CPU processes, and learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

COOKBOOK = Path(__file__).resolve().parents[3] / "cookbook"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megatron_tp", "megatron_moe"])
def test_an_example_learns(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(COOKBOOK / f"{name}.py"),
    ]
    done = subprocess.run(command, cwd=tmp_path, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < 0.9 * losses[0]
