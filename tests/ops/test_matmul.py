"""Matmuls by oneDNN: the same numbers to rounding, the same bits in any company, and only where it can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from twinkle_core.ops import matmul
from twinkle_core.ops.linear_cross_entropy import linear_cross_entropy
from twinkle_core.ops.lora_linear import Lora, lora_linear_many
from twinkle_core.ops.row_invariance import rows_invariant
from twinkle_core.ops.token_logps import token_logps

OUT, INNER = 384, 200


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """oneDNN wherever PyTorch has it, whatever the processor; and the shapes it was called with."""
    found: list[tuple[int, ...]] = []
    operator = torch.ops.mkldnn._linear_pointwise

    def counted(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
        found.append((*x.shape, *weight.shape))
        return operator(x, weight, *rest)

    monkeypatch.setattr(matmul, "_onednn", lambda: counted)
    yield found


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def apart(a: torch.Tensor, exact: torch.Tensor) -> float:
    return float((a.double() - exact).norm() / exact.norm())


def test_pytorch_has_the_operator() -> None:
    """It has no promise of staying: without it all of this would be slow, and still right."""
    assert torch.backends.mkldnn.is_available()
    there = torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert (matmul._onednn() is not None) == there
    assert callable(torch.ops.mkldnn._linear_pointwise)


@pytest.mark.parametrize("rows", [1, 2, 16, 33, 250])
@pytest.mark.parametrize("with_bias", [True, False])
def test_results_are_those_of_float64_to_rounding(calls: list[tuple[int, ...]], rows: int, with_bias: bool) -> None:
    x, g, weight = drawn(rows, INNER), drawn(rows, OUT), drawn(OUT, INNER)
    bias = drawn(OUT) if with_bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert apart(matmul.linear(x, weight, bias), exact) < 1e-6
    assert apart(matmul.times(g, weight), g.double() @ weight.double()) < 1e-6
    into = torch.full((rows, INNER), torch.nan)
    assert matmul.times(g, weight, out=into) is into
    assert torch.equal(into, matmul.times(g, weight))
    assert len(calls) == 4


def test_rows_do_not_feel_their_company(calls: list[tuple[int, ...]]) -> None:
    counts = (16, 17, 23, 31, 64, 65, 200, 513)
    assert rows_invariant(OUT + 16, INNER, torch.float32, "cpu", counts)  # a shape nobody else has tried: trials are remembered
    assert len(calls) >= 4 * len(counts)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        pytest.param(drawn(20, 64), drawn(64, 64), id="a small weight"),
        pytest.param(drawn(0, INNER), drawn(OUT, INNER), id="no rows"),
        pytest.param(drawn(20, INNER).double(), drawn(OUT, INNER).double(), id="float64"),
        pytest.param(drawn(20, INNER).bfloat16(), drawn(OUT, INNER).bfloat16(), id="bfloat16"),
        pytest.param(drawn(20, INNER), drawn(INNER, OUT).t(), id="a weight that lies apart"),
    ],
)
def test_all_else_is_left_to_pytorch(calls: list[tuple[int, ...]], x: torch.Tensor, weight: torch.Tensor) -> None:
    assert torch.equal(matmul.linear(x, weight), torch.nn.functional.linear(x, weight))
    g = drawn(x.shape[0], weight.shape[0]).to(x.dtype)
    assert torch.equal(matmul.times(g, weight), g @ weight)
    assert calls == []


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, every third of a larger tensor."""
    return torch.stack([x, x + 1, x - 1], -1)[..., 0]


@pytest.mark.parametrize("lie", [strided, lambda x: x.t().contiguous().t()], ids=["strided", "transposed"])
def test_how_rows_lie_in_memory_changes_no_bit(calls: list[tuple[int, ...]], lie: Any) -> None:
    """A tenant's rows may lie apart alone, and side by side where they were put together with those of others."""
    x, g, weight = drawn(20, INNER), drawn(20, OUT), drawn(OUT, INNER)
    assert torch.equal(matmul.linear(lie(x), weight), matmul.linear(x, weight))
    assert torch.equal(matmul.times(lie(g), weight), matmul.times(g, weight))
    assert torch.equal(matmul.times(g[:1].expand(20, OUT), weight), matmul.times(g[:1].repeat(20, 1), weight))
    assert len(calls) == 6


@pytest.mark.parametrize("bias", [strided(drawn(OUT)), drawn(OUT)[:1].expand(OUT)], ids=["strided", "expanded"])
def test_a_bias_that_lies_apart_is_read_as_it_is(calls: list[tuple[int, ...]], bias: torch.Tensor) -> None:
    """The operator reads the numbers that follow in memory, and says nothing."""
    x, weight = drawn(20, INNER), drawn(OUT, INNER)
    exact = x.double() @ weight.double().t() + bias.double()
    assert apart(matmul.linear(x, weight, bias), exact) < 1e-6
    assert len(calls) == 1


def test_a_bias_of_another_type_is_pytorchs_to_refuse(calls: list[tuple[int, ...]]) -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        matmul.linear(drawn(20, INNER), drawn(OUT, INNER), drawn(OUT).double())
    assert calls == []


def test_the_switch_of_pytorch_turns_it_off(calls: list[tuple[int, ...]]) -> None:
    x, weight = drawn(20, INNER), drawn(OUT, INNER)
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(matmul.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert calls == []
    matmul.linear(x, weight)
    assert calls == [(20, INNER, OUT, INNER)]


def test_layers_and_losses_go_through_it(calls: list[tuple[int, ...]]) -> None:
    """An adapter's layer, log-probabilities and cross entropy: forward and backward, equal to autograd's own in float64."""
    x, weight = drawn(40, INNER).requires_grad_(), drawn(OUT, INNER)
    a, b = drawn(4, INNER).requires_grad_(), drawn(OUT, 4).requires_grad_()
    labels = torch.arange(40) % OUT
    head = torch.nn.Linear(INNER, OUT, bias=False).requires_grad_(False)

    lora_linear_many(x, weight, None, [17, 23], [Lora(a, b, 0.5), None]).square().sum().backward()
    assert len(calls) == 2
    by_logps = torch.autograd.grad(-token_logps(x, head, labels)[0].sum(), x)[0]
    by_sum = torch.autograd.grad(linear_cross_entropy(x, head, labels), x)[0]
    assert len(calls) == 6

    y, c, d = (t.detach().double().requires_grad_() for t in (x, a, b))
    out = y @ weight.double().t()
    out = torch.cat([out[:17] + 0.5 * (y[:17] @ c.t()) @ d.t(), out[17:]])
    for mine, exact in zip((x.grad, a.grad, b.grad), torch.autograd.grad(out.square().sum(), (y, c, d)), strict=True):
        assert mine is not None and apart(mine, exact) < 2e-6
    loss = torch.nn.functional.cross_entropy(y @ head.weight.double().t(), labels, reduction="sum")
    (exact,) = torch.autograd.grad(loss, y)
    assert apart(by_logps, exact) < 2e-6 and apart(by_sum, exact) < 2e-6
