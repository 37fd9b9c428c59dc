"""Pooling against the plain way: each row cut out, then its last, first or mean hidden state."""

from __future__ import annotations

import pytest
import torch

from twinkle_core.errors import BadInputs
from twinkle_core.ops.pooling import POOLINGS, pool
from twinkle_core.processors.input import InputProcessor

PLAIN = {"last_token": lambda x: x[-1], "cls": lambda x: x[0], "mean": lambda x: x.mean(0)}
LENGTHS = (3, 1, 5, 1)
ROWS = [{"input_ids": list(range(1, n + 1))} for n in LENGTHS]


@pytest.mark.parametrize("how", POOLINGS)
@pytest.mark.parametrize("layout", [{}, {"padding_side": "left"}, {"pad_to_multiple_of": 4}, {"padding_free": True}], ids=str)
def test_it_is_the_plain_way_in_every_layout_value_and_gradient(how, layout):
    batch = InputProcessor(**layout).collate(ROWS)
    hidden = torch.randn(*batch["input_ids"].shape, 4, dtype=torch.float64, requires_grad=True)
    parts, start = [], 0
    for row, n in enumerate(LENGTHS):
        if "attention_mask" in batch:
            parts.append(hidden[row, batch["attention_mask"][row] == 1])
        else:
            parts.append(hidden[0, start : start + n])
            start += n
    wanted = torch.stack([PLAIN[how](part) for part in parts])
    got = pool(hidden, batch, how)
    torch.testing.assert_close(got, wanted)
    weights = torch.randn_like(wanted)
    grads = [torch.autograd.grad((x * weights).sum(), hidden)[0] for x in (got, wanted)]
    torch.testing.assert_close(*grads)
    bare = {key: value for key, value in batch.items() if key != "seq_lens"}  # positions that begin anew say it too
    torch.testing.assert_close(pool(hidden, bare, how), wanted)


@pytest.mark.parametrize("how", POOLINGS)
def test_what_stands_in_padding_is_never_seen(how):
    batch = InputProcessor().collate(ROWS)
    hidden = torch.randn(4, 5, 2)
    hidden[batch["attention_mask"] == 0] = float("nan")
    assert bool(pool(hidden, batch, how).isfinite().all())


def test_it_is_at_least_float32():
    hidden = torch.full((1, 3, 2), 256.0, dtype=torch.bfloat16)
    hidden[0, 0] = 1.0  # 513 / 3 = 171 is no bfloat16 of these sums
    got = pool(hidden, {"input_ids": torch.zeros(1, 3)}, "mean")
    assert got.dtype == torch.float32 and got.tolist() == [[171.0, 171.0]]


def test_a_mask_that_says_nothing_of_tokens_is_refused():
    with pytest.raises(BadInputs, match=r"'attention_mask' is \[1, 1, 2, 2\]"):
        pool(torch.zeros(1, 2, 3), {"attention_mask": torch.ones(1, 1, 2, 2)}, "cls")
