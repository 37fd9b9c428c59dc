"""What is generated is what the distributions say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from twinkle_core.known import KNOWN

ROOT = Path(__file__).resolve().parents[2]


def generator():
    spec = importlib.util.spec_from_file_location("generate_known", ROOT / "tools" / "generate_known.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_known_is_not_stale(capsys):
    assert generator().main(["--check"]) == 0, "run: python tools/generate_known.py"


def test_a_new_entry_makes_it_stale(tmp_path):
    made = generator()
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "twinkle-core"\nversion = "0.7"\n[project.entry-points."twinkle.losses"]\n'
        'mse = "m:MSELoss"\nnew = "m:NewLoss"\n[project.entry-points."twinkle.api"]\nv1 = "m"\n'
    )
    known = made.collect(tmp_path)
    assert known["loss", "new"] == ("NewLoss", "twinkle-core", "0.7")
    assert known["loss", "mse"] == ("MSELoss", "twinkle-core", KNOWN["loss", "mse"][2])  # known before: since stays
    assert set(known) == {("loss", "new"), ("loss", "mse")}
    assert "NewLoss" in made.text(known)
