"""Cross entropy with gradients formed in the forward, against logits and F.cross_entropy."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from twinkle_core.errors import BadLossSetting, NeedsLibrary
from twinkle_core.losses.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss
from twinkle_core.ops import linear_cross_entropy as home
from twinkle_core.ops.linear_cross_entropy import linear_cross_entropy
from twinkle_core.ops.token_logps import Tempered


def case(dtype=torch.float64, bias=True, masked=0.5, trains=True):
    torch.manual_seed(0)
    layer = nn.Linear(6, 23, bias=bias).to(dtype).requires_grad_(trains)
    hidden = torch.randn(3, 7, 6, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 23, (3, 7))
    labels[torch.rand(3, 7) < masked] = -100
    return layer, hidden, labels


def gradients(total, layer, hidden, scale=1.0):
    wanted = [hidden, *(p for p in layer.parameters() if p.requires_grad)]
    return torch.autograd.grad(total * scale, wanted, retain_graph=True)


@pytest.mark.parametrize("chunk", [1, 4, 256])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_sum_and_gradients(chunk, bias, trains, temperature, scale):
    layer, hidden, labels = case(bias=bias, trains=trains)
    given = layer if temperature == 1.0 else Tempered(layer, temperature)
    got = linear_cross_entropy(hidden, given, labels, chunk_size=chunk)
    want = F.cross_entropy(layer(hidden).flatten(0, 1) / temperature, labels.flatten(), reduction="sum")
    torch.testing.assert_close(got, want)
    expected = gradients(want, layer, hidden, scale)
    for _ in range(2):  # a second backward through a graph that was retained
        for a, b in zip(gradients(got, layer, hidden, scale), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_backward_adds_to_what_is_there():
    """Gradients that were handed over are the caller's: a second call must not write into them."""
    layer, hidden, labels = case()
    for factor in (1.0, 2.0):
        (linear_cross_entropy(hidden, layer, labels) * factor).backward()
    want = gradients(F.cross_entropy(layer(hidden).flatten(0, 1), labels.flatten(), reduction="sum"), layer, hidden, 3.0)
    for a, b in zip((hidden.grad, layer.weight.grad, layer.bias.grad), want, strict=True):
        torch.testing.assert_close(a, b)


def test_without_a_label_or_a_graph():
    layer, hidden, labels = case(masked=1.1)
    got = linear_cross_entropy(hidden, layer, labels)
    assert float(got.detach()) == 0 and all(not g.any() for g in gradients(got, layer, hidden))
    layer, hidden, labels = case()
    with torch.no_grad():
        got = linear_cross_entropy(hidden, layer, labels)
    want = F.cross_entropy(layer(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(got, want.detach())


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", ["module", "float16"])
def test_other_layers_go_by_token_logps(kind, monkeypatch):
    layer, hidden, labels = case(torch.float32)
    if kind == "module":
        doubled = Doubling(6, 23)
        doubled.load_state_dict(layer.state_dict())
        layer = doubled
    else:
        layer, hidden = layer.half(), hidden.detach().half().requires_grad_()
    monkeypatch.setattr(home._Fused, "apply", None)
    got = linear_cross_entropy(hidden, layer, labels)
    want = F.cross_entropy(layer(hidden).flatten(0, 1).float(), labels.flatten(), reduction="sum")
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_bfloat16_sums_chunks_in_float32():
    layer, hidden, labels = case(torch.float32, masked=0.0)
    narrow = nn.Linear(6, 23).bfloat16()
    narrow.load_state_dict(layer.state_dict())
    got = linear_cross_entropy(hidden.detach().bfloat16().requires_grad_(), narrow, labels, chunk_size=1)
    (slope,) = torch.autograd.grad(got, narrow.weight)
    want = gradients(linear_cross_entropy(hidden, layer, labels), layer, hidden)[1]
    assert slope.dtype == torch.bfloat16 and got.dtype == torch.float32
    assert float((slope.float() - want).norm() / want.norm()) < 0.01


def test_ligers_kernel_is_used_where_it_is_asked_for(monkeypatch):
    layer, hidden, labels = case()
    with pytest.raises(NeedsLibrary, match="liger_kernel"):
        linear_cross_entropy(hidden, layer, labels, backend="liger")
    seen = []

    class Kernel:
        def __init__(self, reduction):
            assert reduction == "sum"

        def __call__(self, weight, rows, target, bias):
            seen.append((weight.shape, rows.shape, bias.shape))
            return F.cross_entropy(F.linear(rows, weight, bias), target, reduction="sum")

    package, module = types.ModuleType("liger_kernel"), types.ModuleType("liger_kernel.transformers")
    module.LigerFusedLinearCrossEntropyLoss = Kernel
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    monkeypatch.setattr(home, "find_spec", lambda name: object())
    plain = linear_cross_entropy(hidden, layer, labels)  # auto, on the CPU
    assert seen == []
    torch.testing.assert_close(linear_cross_entropy(hidden, layer, labels, backend="liger"), plain)
    assert seen == [((23, 6), (int((labels != -100).sum()), 6), (23,))]


@pytest.mark.parametrize("given", [{"chunk_size": 0}, {"chunk_size": 1.5}, {"backend": "triton"}], ids=str)
def test_settings_out_of_range_are_refused(given):
    with pytest.raises(BadLossSetting):
        FusedLinearCrossEntropyLoss(**given)
