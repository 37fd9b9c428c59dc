"""A model that loads in no time, and configurations that train it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinkle_core.cli import quickstart_model, toy_model
from twinkle_core.cli.main import main


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer, with a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    rows = quickstart_model.bundled_set().read_text(encoding="utf-8").splitlines()
    toy_model.build(folder, [t for r in rows for t in json.loads(r).values()], hidden_size=32, layers=1, vocab_size=500)
    return folder


@pytest.fixture
def config(tmp_path: Path, tiny: Path):
    """Writes a configuration; keyword arguments replace sections."""

    def write(**sections: Any) -> Path:
        tree = {
            "model": {"id": str(tiny), "mixed_precision": "no"},
            "adapter": {"r": 4, "lora_dropout": 0.1},
            "dataset": {
                "id": "bundled://self-cognition",
                "slice": 18,
                "preprocessor": {"cls": "self_cognition", "model_name": "Ada", "model_author": "me"},
            },
            "dataloader": {"batch_size": 2},
            "optimizer": {"cls": "adamw", "lr": 1e-3},
            "training": {"max_steps": 4},
            "output_dir": str(tmp_path / "out"),
        } | sections
        path = tmp_path / "sft.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in tree.items() if v is not ...}, sort_keys=False), encoding="utf-8")
        return path

    return write


@pytest.fixture
def twinkle(capsys: pytest.CaptureFixture[str]):
    """Runs a command line in this process: (status, what it printed)."""

    def run(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a ``metrics.jsonl``, without what depends on the clock."""
    clock = ("seconds", "tokens_per_second", "seconds_per_step")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if k not in clock} for row in rows]


@pytest.fixture(name="lines")
def _lines():
    return lines
