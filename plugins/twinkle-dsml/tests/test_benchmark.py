"""The claim on speed, on a tenth of its conversations and with room for a busy machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "dsml.py"


@pytest.mark.slow
def test_the_benchmark_runs_and_stays_near_its_bound():
    done = subprocess.run([sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True)
    (ratio,) = re.findall(r"ratio\s+median ([\d.]+)", done.stdout)
    assert float(ratio) < 1.6, done.stdout + done.stderr
