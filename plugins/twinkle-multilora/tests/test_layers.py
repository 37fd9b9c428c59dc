"""One layer with slots against peft's own, and what it costs to switch."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as PeftLinear

from twinkle_multilora.layers import Draws, Selection, SlotLinear, Span, Taking
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_transformers.testing import tiny_config


def pair(dtype=torch.float32, sizes=(6, 10)):
    """A layer with three slots, two of them held, and peft's layers with the same numbers by slot."""
    torch.manual_seed(0)
    base = torch.nn.Linear(*sizes, bias=True).to(dtype).requires_grad_(False)
    layer, plain = SlotLinear(base, sizes, Selection(), max_loras=3, max_r=4), {}
    for slot, rank in ((0, 2), (2, 4)):
        config = LoraConfig(r=rank, lora_alpha=3, init_lora_weights=False)
        one = PeftLinear(base, "x", config, r=rank, lora_alpha=3)
        one.lora_A.float(), one.lora_B.float()
        a, b = one.lora_A["x"].weight, one.lora_B["x"].weight
        layer.fill(slot, f"lora_{slot}", a.detach(), b.detach(), scaling=one.scaling["x"], dropout=0.0, draws=Draws(slot))
        plain[slot] = one
    return layer, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_pefts_layer_does(dtype):
    """Outputs and all gradients, to rounding."""
    layer, plain = pair(dtype)
    for slot, expected in plain.items():
        layer.selection.now = Taking(slot)
        x = torch.randn(2, 5, 6, dtype=dtype, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        layer(x).float().square().sum().backward()
        expected(y).float().square().sum().backward()
        assert layer(x).dtype == dtype
        torch.testing.assert_close(layer(x), expected(x))
        part = layer.parts[slot]
        found = (x.grad, part.A.grad, part.B.grad)
        right = (y.grad, expected.lora_A["x"].weight.grad, expected.lora_B["x"].weight.grad)
        for f, r in zip(found, right, strict=True):
            torch.testing.assert_close(f, r)
    layer.selection.now = Taking(1)  # free
    assert torch.equal(layer(x), layer.base_layer(x))
    layer.selection.now = Taking()
    assert torch.equal(layer(x), layer.base_layer(x))


def test_rows_of_several_slots_in_one_pass():
    """Each span's rows and gradients are those of its slot alone."""
    layer, _ = pair()
    x = torch.randn(9, 6)
    spans = [Span(2, 3), Span(None, 1), Span(0, 4), Span(2, 1)]
    starts = [0, 3, 4, 8]
    layer.selection.now = Taking(spans=spans)
    shared = layer(x[None])[0]
    shared.square().sum().backward()
    grads = {slot: (part.A.grad.clone(), part.B.grad.clone()) for slot, part in layer.parts.items()}
    for part in layer.parts.values():
        part.A.grad = part.B.grad = None
    for span, start in zip(spans, starts, strict=True):
        layer.selection.now = Taking(span.slot)
        own = layer(x[start : start + span.rows])
        torch.testing.assert_close(shared[start : start + span.rows], own, rtol=1e-6, atol=1e-6)
        if span.slot is not None:
            own.square().sum().backward()
    for slot, part in layer.parts.items():
        torch.testing.assert_close(grads[slot], (part.A.grad, part.B.grad), rtol=1e-5, atol=1e-5)


def test_parameters_lie_in_the_storage():
    """An update of a tenant's parameter is seen in it, and slots of one rank can be stacked without a copy."""
    layer, _ = pair()
    part = layer.parts[2]
    assert part.A.shape == (4, 6) and part.B.shape == (10, 4) and part.A.is_contiguous() and part.B.is_contiguous()
    with torch.no_grad():
        part.A.fill_(7.0)
        part.B.fill_(8.0)
    assert layer.flat_A[2].eq(7).all() and layer.flat_B[2].eq(8).all()
    rank = layer.parts[0].rank
    stacked_A, stacked_B = layer.flat_A[:, : rank * 6].view(3, rank, 6), layer.flat_B[:, : 10 * rank].view(3, 10, rank)
    assert torch.equal(stacked_A[0], layer.parts[0].A) and torch.equal(stacked_B[0], layer.parts[0].B)
    before = layer.flat_A[0].clone()
    layer.clear(2, "lora_2")
    assert not layer.flat_A[2].any() and not layer.flat_B[2].any() and list(layer.parts) == [0]
    assert torch.equal(layer.flat_A[0], before) and sorted(layer.lora_A) == ["lora_0"]


def test_the_room_is_taken_once():
    """Tenants that come and go allocate no slots and change no module."""
    model = MultiLoraTransformersModel(config=tiny_config(), mixed_precision="no", max_loras=2, max_r=4)
    rooms = {k: b.data_ptr() for k, b in model.module.named_buffers() if "flat_" in k}
    modules = list(model.module.modules())
    for name in ("a", "b"):
        model.multi_lora.acquire_lora(name, LoraConfig(r=4, target_modules="all-linear"))
    model.multi_lora.release_lora("a")
    model.multi_lora.acquire_lora("c", LoraConfig(r=2, target_modules=["q_proj"]))
    assert {k: b.data_ptr() for k, b in model.module.named_buffers() if "flat_" in k} == rooms and len(rooms) == 28
    kinds = (torch.nn.ParameterDict, torch.nn.Linear, SlotLinear)
    assert [m for m in model.module.modules() if isinstance(m, kinds)] == [m for m in modules if isinstance(m, kinds)]


def test_switching_costs_no_millisecond():
    """Whatever the number of layers: one field is set. (A wide bound: some microseconds are usual.)"""
    model = MultiLoraTransformersModel(config=tiny_config(num_hidden_layers=30), mixed_precision="no", max_loras=4, max_r=4)
    for i in range(4):
        model.multi_lora.acquire_lora(f"t{i}", LoraConfig(r=4, target_modules=["q_proj"]))
    times = []
    for i in range(200):
        start = time.perf_counter()
        with model.adapters.activate(f"t{i % 4}"):
            pass
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 1e-3
