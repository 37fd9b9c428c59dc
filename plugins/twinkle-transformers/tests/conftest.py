"""For the tests of twinkle-transformers: no network, one thread a worker, tiny models made once a worker."""

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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a tiny random Llama (tied embeddings) and its tokenizer. Read only."""
    from twinkle_transformers.testing import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """The same shape with an output layer of its own. Read only."""
    from twinkle_transformers.testing import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


@pytest.fixture
def llama():
    """A fresh tiny Llama, untied, in evaluation mode."""
    from transformers import LlamaForCausalLM

    from twinkle_transformers.testing import tiny_config

    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(tie_word_embeddings=False)).eval()


@pytest.fixture
def ids():
    """Token ids [2, 7]."""
    return torch.randint(3, 200, (2, 7), generator=torch.Generator().manual_seed(1))
