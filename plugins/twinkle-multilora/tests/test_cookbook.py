"""The examples train two tenants whose adapters PEFT loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig

from twinkle_transformers.testing import write_tiny_llama

SCRIPT = Path(__file__).resolve().parents[3] / "cookbook" / "multilora_basic.py"


@pytest.mark.slow
def test_the_example_trains_both(tmp_path):
    model = write_tiny_llama(tmp_path / "tiny")
    words = [sys.executable, str(SCRIPT), "--model", str(model), "--output", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = (line.split() for line in (done.stdout.splitlines()[0], done.stdout.splitlines()[-3]))
    assert first[0] == last[0] == "alice" and first[2] == last[2] == "bob"
    assert float(last[1]) < float(first[1]) and float(last[3]) < float(first[3])
    assert [LoraConfig.from_pretrained(tmp_path / "out" / name).r for name in ("alice", "bob")] == [8, 4]


@pytest.mark.slow
def test_the_example_on_two_ranks_trains_both(tmp_path):
    script = SCRIPT.with_name("multilora_megatron.py")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = re.findall(r"alice loss ([\d.]+), bob loss ([\d.]+)", done.stdout)
    assert len(losses) == 4 and all(float(last) < 0.9 * float(first) for first, last in zip(losses[0], losses[-1], strict=True))
    saved = tmp_path / "twinkle-output"
    assert [LoraConfig.from_pretrained(saved / name).r for name in ("alice", "bob")] == [8, 4]
