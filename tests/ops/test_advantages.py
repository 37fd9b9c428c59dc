"""Advantages, group by group."""

from __future__ import annotations

import math

import pytest
import torch

from twinkle_core.errors import BadArgument
from twinkle_core.ops.advantages import gae, grpo_advantages, rloo_advantages


def test_B40_a_group_without_spread_has_no_advantage():
    assert grpo_advantages([0.0, 0, 0, 1], 4).tolist() == [-0.5, -0.5, -0.5, 1.5]
    assert grpo_advantages([1.0] * 4, 4).tolist() == [0.0] * 4
    assert grpo_advantages(torch.full((8,), 0.1), 8).abs().max() < 1e-3
    nearly = torch.full((8,), 0.1) + torch.tensor([0, 1, 0, -1, 0, 1, 0, 0]) * 7.45e-9
    assert nearly.unique().numel() > 1 and grpo_advantages(nearly, 8).abs().max() < 1e-3
    assert grpo_advantages([0.7], 1).tolist() == [0.0]
    both = grpo_advantages([0.0, 0, 0, 1, 10, 10, 10, 11], 4)
    assert both[:4].tolist() == both[4:].tolist() == [-0.5, -0.5, -0.5, 1.5]


def test_groups_of_different_sizes_and_without_scale():
    rewards = torch.tensor([1.0, 2.0, 5.0, 4.0, 0.0, 7.0], dtype=torch.float64)
    want = [
        (r - m) / s for rs in ([1, 2], [5, 4, 0]) for m, s in [(sum(rs) / len(rs), torch.tensor(rs).double().std())] for r in rs
    ]
    got = grpo_advantages(rewards, [2, 3, 1])
    torch.testing.assert_close(got, torch.tensor([*map(float, want), 0.0], dtype=torch.float64))
    assert grpo_advantages(rewards, [2, 3, 1], scale=False).tolist() == pytest.approx([-0.5, 0.5, 2, 1, -3, 0])


def test_rloo_leaves_one_out():
    assert rloo_advantages([1.0, 2.0, 6.0, 3.0], [3, 1]).tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5, 0])


def test_gae_is_the_sum_of_discounted_errors():
    """Against the sum written out, with a gap between labels; and lam = 1 gives the return itself."""
    torch.manual_seed(0)
    r, v = torch.randn(2, 6).double(), torch.randn(2, 6).double()
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1]])
    advantages, returns = gae(r, v, mask, gamma=0.9, lam=0.8)
    for b in range(2):
        at = [t for t in range(6) if mask[b, t]]
        errors = [r[b, t] + 0.9 * (v[b, at[i + 1]] if i + 1 < len(at) else 0) - v[b, t] for i, t in enumerate(at)]
        for i, t in enumerate(at):
            want = sum((0.9 * 0.8) ** k * e for k, e in enumerate(errors[i:]))
            assert float(advantages[b, t]) == pytest.approx(float(want))
            assert float(returns[b, t]) == pytest.approx(float(want + v[b, t]))
    assert float(advantages[mask == 0].abs().sum() + returns[mask == 0].abs().sum()) == 0
    _, whole = gae(r, v, torch.ones(2, 6), gamma=1.0, lam=1.0)
    torch.testing.assert_close(whole, r.flip(1).cumsum(1).flip(1))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: grpo_advantages([1.0, 2.0], 3), "groups"), (lambda: grpo_advantages([1.0, 2.0], 0), "groups"),
        (lambda: grpo_advantages([1.0, 2.0], [1, 1.0]), "groups"), (lambda: grpo_advantages([1.0, 2.0], "x"), "groups"),
        (lambda: rloo_advantages([[1.0], [2.0]], 1), "rewards"), (lambda: rloo_advantages([1.0, math.nan], 2), "rewards"),
        (lambda: gae([[1.0]], [[1.0]], [[1]], gamma=2), "gamma"), (lambda: gae([[1.0]], [[1.0, 2.0]], [[1]]), "rewards"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(call, name):
    with pytest.raises(BadArgument, match=f"^{name}="):
        call()


def test_they_are_found_where_users_look():
    from twinkle.advantage import gae as found

    assert found is gae
