"""For all tests: no network, one thread a worker, a fixed seed."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest

# how long an example takes says how busy the machine is
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _quiet_torch():
    """Workers share two cores: more threads than that only slow each other down."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
