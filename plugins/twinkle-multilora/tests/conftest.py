"""For the tests of twinkle-multilora: no network, one thread a worker, models that can be worked out by hand."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet_torch():
    """Workers share two cores: more threads than that only slow each other down."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
