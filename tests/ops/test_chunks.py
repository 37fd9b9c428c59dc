"""What the ways to logps share: rows taken once, and room for a large gradient."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch
from torch import nn

from twinkle_core.ops import chunks
from twinkle_core.ops.linear_cross_entropy import linear_cross_entropy
from twinkle_core.ops.token_logps import token_logps


def test_rows_are_taken_and_their_gradients_put_back_as_index_select_does():
    flat = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([1, 4, 5, 8])
    got, want = chunks.taken(flat, index), flat.index_select(0, index)
    assert torch.equal(got, want)
    above = torch.randn_like(got)
    assert torch.equal(*(torch.autograd.grad(x, flat, above)[0] for x in (got, want)))
    assert torch.autograd.gradcheck(lambda x: chunks.taken(x, index).square(), (flat,))
    assert torch.autograd.gradgradcheck(lambda x: chunks.taken(x, index).square(), (flat,))
    none = chunks.taken(flat, index[:0])
    assert none.shape == (0, 4) and not torch.autograd.grad(none.sum(), flat)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("way", ["fused", "logps"])
def test_a_gradient_in_memory_from_the_system_is_the_same(monkeypatch, dtype, chunk, way):
    """Large gradients lie in memory that is asked of the system directly. They are like any other, and outlive the call."""
    made = []
    monkeypatch.setattr(chunks.mmap, "mmap", lambda *a, real=mmap.mmap, **k: made.append(1) or real(*a, **k))

    def run():
        torch.manual_seed(0)
        layer, hidden = nn.Linear(6, 23).to(dtype), torch.randn(2, 5, 6, dtype=dtype)
        labels = torch.randint(0, 23, (2, 5))
        for _ in range(2):  # the second one is added in place
            if way == "fused":
                linear_cross_entropy(hidden, layer, labels, chunk_size=chunk).backward()
            else:
                token_logps(hidden, layer, labels, chunk_size=chunk)[0].sum().backward()
        return layer.weight.grad

    want = run()
    assert not made
    monkeypatch.setattr(chunks, "FRESH", 1)
    got = run()
    gc.collect()
    assert made and torch.equal(got, want) and got.is_contiguous()
    assert torch.equal(got.clone().mul_(2), want * 2)
