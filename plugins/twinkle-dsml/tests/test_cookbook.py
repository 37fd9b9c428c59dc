"""The example trains a tiny V4 on tool calls, and reads the call that it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "cookbook" / "dsml_tools.py"


@pytest.mark.slow
def test_the_example_learns_to_call_a_tool():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == 'call: weather {"city": "Oslo"}', done.stdout
