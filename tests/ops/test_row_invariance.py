"""Whether rows of a matmul depend on one another, tried."""

from __future__ import annotations

import pytest
import torch

from twinkle_core.cli import doctor
from twinkle_core.ops import row_invariance
from twinkle_core.ops.row_invariance import rows_invariant


def by_count(x, weight):
    """A kernel that sums in another order from 64 rows on."""
    if len(x) < 64:
        return x @ weight.t()
    half = x.shape[1] // 2
    return x[:, :half] @ weight[:, :half].t() + x[:, half:] @ weight[:, half:].t()


def by_place(x, weight):
    """A kernel that treats the last rows in another way."""
    y = x @ weight.t()
    y[-5:] += 1e-6
    return y


@pytest.mark.parametrize("kernel", [by_count, by_place])
def test_kernels_whose_rows_depend_on_others_are_found_out(kernel, monkeypatch):
    shape = (48, 40, torch.float32, "cpu", (16, 23, 64))
    row_invariance._tried.cache_clear()
    monkeypatch.setattr(row_invariance, "linear", kernel)
    assert not rows_invariant(*shape)
    row_invariance._tried.cache_clear()


def test_row_by_row_is_free_of_company(monkeypatch):
    row_invariance._tried.cache_clear()
    monkeypatch.setattr(row_invariance, "linear", lambda x, weight: (x[:, None] * weight).sum(-1))
    monkeypatch.setattr(row_invariance, "times", lambda a, b: (a[:, :, None] * b).sum(1))
    assert rows_invariant(8, 8, torch.float32, "cpu", (16, 23, 64))
    row_invariance._tried.cache_clear()


@pytest.mark.parametrize(("free", "word"), [(True, "fast path"), (False, "one matmul each")])
def test_doctor_tells(free, word, monkeypatch):
    monkeypatch.setattr(row_invariance, "rows_invariant", lambda *_: free)
    assert any(word in text for key, text in doctor.device() if key == "rows")
