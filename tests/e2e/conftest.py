"""Tiny models for the tests that go through everything."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a tiny random Llama (tied embeddings) and its tokenizer. Read only."""
    from twinkle_transformers.testing import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))
