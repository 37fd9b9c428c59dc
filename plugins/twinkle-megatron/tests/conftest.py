"""Tiny models, and what one process makes of them."""

from __future__ import annotations

import pytest

from twinkle_core.testing.ranks import run
from twinkle_megatron.testing import Layouts, write_tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def moe(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("moe"), "qwen3_moe"))


@pytest.fixture(scope="session")
def alone():
    """Ten updates in one process; each model once."""
    found = {}

    def of(folder):
        if folder not in found:
            found[folder] = run(Layouts, "train", 1, {"folder": folder, "layouts": [{}]}, timeout=300)[0][0]
        return found[folder]

    return of
