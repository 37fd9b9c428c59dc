"""Linear layers with LoRA, against autograd's own, PEFT's formula in float64, and each tenant alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from twinkle_core.errors import RowsDisagree
from twinkle_core.ops.lora_linear import Dropout, Lora, dropout_seed, lora_linear, lora_linear_many

IN, OUT = 24, 16


def layer(dtype=torch.float64, bias=True, rank=4, seed=0):
    """x [2, 9, IN], weight, bias, a, b."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(2, 9, IN), (OUT, IN), (OUT,), (rank, IN), (OUT, rank)]
    x, weight, offset, a, b = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    for t in (x, a, b):
        t.requires_grad_()
    return x, weight, offset if bias else None, a, b


def plain(x, weight, bias, a, b, scale, dropped=None):
    """As PEFT's layer computes it."""
    return F.linear(x, weight, bias) + F.linear(F.linear(x if dropped is None else dropped, a), b) * scale


def gradients(y, *inputs):
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y.dtype)
    return torch.autograd.grad(y, inputs, upstream, retain_graph=True)


def apart(got, want):
    """The largest difference, relative to the norm."""
    pairs = [(g.detach().double(), w.detach().double()) for g, w in zip(got, want, strict=True)]
    return max(float((g - w).norm() / w.norm()) for g, w in pairs)


@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(bias):
    x, weight, offset, a, b = layer(bias=bias)
    small = x.detach()[:1, :3].requires_grad_()
    assert torch.autograd.gradcheck(lambda x, a, b: lora_linear(x, weight, offset, a, b, 1.7), (small, a, b))


def test_gradcheck_of_tenants():
    x, weight, bias, a, b = layer()
    _, _, _, a2, b2 = layer(rank=2, seed=1)
    small = x.detach()[0, :7].requires_grad_()

    def many(x, a, b, a2, b2):
        adapters = [Lora(a, b, 0.5), None, Lora(a2, b2, 2.0, Dropout(0.4, 11))]
        return lora_linear_many(x, weight, bias, [3, 1, 3], adapters)

    assert torch.autograd.gradcheck(many, (small, a, b, a2, b2))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("needs_x", [True, False])
def test_equals_peft_formula(dtype, most, needs_x):
    x, weight, bias, a, b = layer(dtype)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight, bias, a, b)]
    x.requires_grad_(needs_x)
    got, want = lora_linear(x, weight, bias, a, b, 1.7), plain(*wide, 1.7)
    assert apart([got], [want]) < most
    names = (x, a, b) if needs_x else (a, b)
    assert apart(gradients(got, *names), gradients(want, *([wide[0]] if needs_x else []), wide[3], wide[4])) < most


def test_bias_that_trains():
    x, weight, bias, a, b = layer()
    bias.requires_grad_()
    got, want = (f(x, weight, bias, a, b, 0.5) for f in (lora_linear, plain))
    assert apart(gradients(got, bias), gradients(want, bias)) < 1e-14


def test_weight_that_trains_gets_its_gradient():
    x, weight, bias, a, b = layer()
    weight.requires_grad_()
    want = plain(x, weight, bias, a, b, 0.5)
    many = lora_linear_many(x, weight, bias, [18], [Lora(a, b, 0.5)])
    for got in (lora_linear(x, weight, bias, a, b, 0.5), many):
        assert apart(gradients(got, x, weight, a, b), gradients(want, x, weight, a, b)) < 1e-14


def test_dropout_drawn_by_the_caller():
    x, weight, bias, a, b = layer()
    dropped = F.dropout(x, 0.5)
    got = lora_linear(x, weight, bias, a, b, 0.5, dropped=dropped)
    want = plain(x, weight, bias, a, b, 0.5, dropped)
    assert apart(gradients(got, x, a, b), gradients(want, x, a, b)) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("held", ["wide", "narrow"])
def test_autocast_gives_the_types_of_linear_layers(dtype, held):
    x, weight, bias, a, b = layer(torch.float32)
    if held == "narrow":  # the base weight in the compute type, as frozen weights are
        weight, bias = weight.to(dtype), bias.to(dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias, a, b)]
    with torch.autocast("cpu", dtype=dtype):
        got, theirs = lora_linear(x, weight, bias, a, b, 0.5), plain(x, weight, bias, a, b, 0.5)
    assert got.dtype == theirs.dtype == dtype
    want = plain(*exact, 0.5)
    ours = [got, *gradients(got, x, a, b)]
    assert [g.dtype for g in ours[1:]] == [torch.float32] * 3
    right = [want, *gradients(want, exact[0], exact[3], exact[4])]
    # no further from the exact numbers than linear layers under autocast are
    assert apart(ours, right) <= 1.1 * apart([theirs, *gradients(theirs, x, a, b)], right)


def test_saves_the_input_and_its_low_rank_product_alone():
    x, weight, bias, a, b = layer()
    given = {t.untyped_storage().data_ptr() for t in (x, weight, a, b)}
    own = []

    def pack(t):
        if t.untyped_storage().data_ptr() not in given:
            own.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        lora_linear(x, weight, bias, a, b, 0.5)
        assert own == [(4, 18)]
        lora_linear_many(x, weight, bias, [18], [Lora(a, b, 0.5, Dropout(0.1, 3))])
    assert own == [(4, 18)] * 2


@pytest.mark.parametrize("many", [True, False])
def test_checkpointed_twice_used_and_without_a_graph(many):
    x, _, _, a, _ = layer()
    square = torch.randn(IN, IN, dtype=torch.float64)
    b = torch.randn(IN, 4, dtype=torch.float64, requires_grad=True)

    def one(x):
        if many:
            return lora_linear_many(x, square, None, [10, 8], [Lora(a, b, 0.5, Dropout(0.3, 5)), Lora(a, b, 0.5)])
        return lora_linear(x, square, None, a, b, 0.5)

    def twice(x):
        return one(torch.tanh(one(x)))

    want = twice(x)
    got = checkpoint(twice, x, use_reentrant=False)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for g, w in zip(gradients(got, x, a, b), gradients(want, x, a, b), strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)
    for g, w in zip(gradients(want, x, a, b), gradients(want, x, a, b), strict=True):  # a graph that was retained
        torch.testing.assert_close(g, w, rtol=0, atol=0)
    with torch.no_grad():
        assert torch.equal(twice(x), want) and not twice(x).requires_grad


def tenants():
    """Inputs of tenants of different ranks, dropouts and numbers of rows; one without an adapter, one without rows."""
    ranks, rows = [2, 4, 4, 0, 8], [5, 18, 3, 4, 0]
    found = []
    for i, (rank, count) in enumerate(zip(ranks, rows, strict=True)):
        x, _, _, a, b = layer(torch.float32, rank=max(rank, 1), seed=i + 1)
        x = x.detach().view(-1, IN)[:count].requires_grad_()
        lora = Lora(a, b, 1 / (i + 1), Dropout(0.25, dropout_seed(i, 0, "q")) if i % 2 == 0 else None) if rank else None
        found.append((x, lora))
    return found


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1], [2, 0], [0, 3]])
@pytest.mark.parametrize("apart_", [True, False])
def test_company_and_order_change_no_bit(order, apart_):
    _, weight, bias, _, _ = layer(torch.float32)
    everyone = tenants()
    filler = torch.randn(16, IN)  # a matmul of fewer rows may take another kernel

    def pass_over(numbers):
        """Output and gradients of each tenant."""
        chosen = [everyone[n] for n in numbers]
        x = torch.cat([*(x for x, _ in chosen), filler])
        rows = [*(len(x) for x, _ in chosen), 16]
        y = lora_linear_many(x, weight, bias, rows, [*(lora for _, lora in chosen), None], apart=apart_)
        wanted = [t for x, lora in chosen for t in (x, *([lora.a, lora.b] if lora else []))]
        grads = iter(torch.autograd.grad(y.square().sum(), wanted))
        parts = y.split(rows)
        return {n: [parts[i], *(next(grads) for _ in range(3 if everyone[n][1] else 1))] for i, n in enumerate(numbers)}

    together = pass_over(range(5))
    for number, found in pass_over(order).items():
        assert all(torch.equal(a, b) for a, b in zip(found, together[number], strict=True)), number


def test_tenants_equal_single_layers():
    _, weight, bias, _, _ = layer(torch.float32)
    chosen = tenants()
    y = lora_linear_many(torch.cat([x for x, _ in chosen]), weight, bias, [len(x) for x, _ in chosen], [lo for _, lo in chosen])
    wide = weight.double(), bias.double()
    parts = [
        F.linear(x.double(), *wide) if lora is None else
        plain(x.double(), *wide, lora.a.double(), lora.b.double(), lora.scale,
              (lora.dropout or (lambda t: t))(x).double())
        for x, lora in chosen
    ]  # fmt: skip
    assert apart([y], [torch.cat(parts)]) < 1e-6


def test_dropout_is_its_seed_alone():
    x = torch.ones(64, 64)
    one = Dropout(0.25, dropout_seed(1, 2, "q"))
    torch.manual_seed(1)
    first, state = one(x), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(first, one(x)) and torch.equal(first[:10], one(x[:10]))
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())  # the global generator is not asked
    for other in ((0, 2, "q"), (1, 3, "q"), (1, 2, "k")):
        assert not torch.equal(first, Dropout(0.25, dropout_seed(*other))(x))
    assert abs(float((first == 0).float().mean()) - 0.25) < 0.02
    assert first.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert not Dropout(1.0, 3)(x).any()


@pytest.mark.parametrize("rows", [[10, 9], [18], [10, 8, 0]])
def test_rows_that_are_not_the_batch(rows):
    x, weight, bias, a, b = layer()
    with pytest.raises(RowsDisagree, match="18 rows"):
        lora_linear_many(x, weight, bias, rows, [Lora(a, b, 1.0)] * 2)
