"""token_logps against the plain formula, on every road."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from twinkle_core.errors import BadLabels
from twinkle_core.ops.token_logps import Tempered, logps_from_logits, token_logps

V, D = 13, 6


def plain(logits, labels, temperature=1.0):
    """All rows at once, full logits, autograd's own derivatives."""
    z = logits / temperature
    log_p = torch.log_softmax(z, -1)
    mask = labels != -100
    logps = torch.where(mask, log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0], 0.0)
    entropies = torch.where(mask, -(log_p.exp() * log_p).sum(-1), 0.0)
    predictions = torch.where(mask, z.argmax(-1), -100)
    return logps, entropies, predictions


def case(trainable, bias=True, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(D, V, bias=bias).double().requires_grad_(trainable)
    hidden = torch.randn(2, 7, D, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, V, (2, 7))
    labels[0, :3] = labels[1, 5] = -100
    return layer, hidden, labels


class Doubling(nn.Linear):
    """An output layer that is no plain linear one."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_values_and_gradients_equal_the_plain_formula(trainable, entropies, chunk, temperature, bias):
    layer, hidden, labels = case(trainable, bias)
    weights = torch.randn(2, 7, dtype=torch.float64)  # a different incoming gradient for each token
    got = token_logps(hidden, layer, labels, temperature=temperature, entropies=entropies, predictions=True, chunk_size=chunk)
    want = plain(layer(hidden), labels, temperature)
    torch.testing.assert_close(got[0], want[0])
    assert torch.equal(got[2], want[2])
    inputs = [hidden, *(p for p in layer.parameters() if p.requires_grad)]

    def total(found):
        return (found[0] * weights).sum() + (0.3 * (found[1] * weights.flip(1)).sum() if entropies else 0.0)

    if entropies:
        torch.testing.assert_close(got[1], want[1])
    else:
        assert got[1] is None
    mine, theirs = torch.autograd.grad(total(got), inputs), torch.autograd.grad(total(want), inputs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_gradcheck(trainable, entropies):
    layer, hidden, labels = case(trainable)

    def function(h, w, b):
        clone = nn.Linear(D, V).double()
        del clone.weight, clone.bias
        clone.weight, clone.bias = w, b
        logps, entropy, _ = token_logps(h, clone, labels, temperature=0.8, entropies=entropies, chunk_size=3)
        return (logps, entropy) if entropies else logps

    assert torch.autograd.gradcheck(function, (hidden, layer.weight, layer.bias))


@pytest.mark.parametrize("trainable", [False, True])
def test_other_output_layers_are_called_themselves(trainable):
    layer, hidden, labels = case(trainable)
    double = Doubling(D, V).double().requires_grad_(trainable)
    double.load_state_dict(layer.state_dict())
    got = token_logps(hidden, double, labels, entropies=True, predictions=True, chunk_size=4)
    want = plain(double(hidden), labels)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    inputs = [hidden, *(p for p in double.parameters() if p.requires_grad)]
    mine = torch.autograd.grad(got[0].sum() + got[1].square().sum(), inputs)
    theirs = torch.autograd.grad(want[0].sum() + want[1].square().sum(), inputs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_hook_on_the_layer_is_not_passed_by():
    layer, hidden, labels = case(False)
    handle = layer.register_forward_hook(lambda module, args, output: output * 2)
    hooked = token_logps(hidden, layer, labels)[0]
    torch.testing.assert_close(hooked, plain(layer(hidden), labels)[0])
    handle.remove()
    assert not torch.allclose(hooked, token_logps(hidden, layer, labels)[0])


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_logits_road(temperature, chunk):
    layer, hidden, labels = case(False)
    logits = layer(hidden).detach().requires_grad_(True)
    got = logps_from_logits(logits, labels, temperature=temperature, entropies=True, predictions=True, chunk_size=chunk)
    want = plain(logits, labels, temperature)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    weights = torch.randn(2, 7, dtype=torch.float64)
    (mine,) = torch.autograd.grad((got[0] * weights).sum() + got[1].square().sum(), logits)
    (theirs,) = torch.autograd.grad((want[0] * weights).sum() + want[1].square().sum(), logits)
    torch.testing.assert_close(mine, theirs)
    (only,) = torch.autograd.grad(logps_from_logits(logits, labels)[0].sum(), logits)
    torch.testing.assert_close(only, torch.autograd.grad(plain(logits, labels)[0].sum(), logits)[0])


@pytest.mark.parametrize("layer_type", [nn.Linear, Doubling])
@pytest.mark.parametrize("trainable", [False, True])
def test_without_a_label_there_is_still_a_graph(trainable, layer_type):
    layer = layer_type(D, V).requires_grad_(trainable)
    hidden = torch.randn(2, 3, D, requires_grad=True)
    logps, entropies, predictions = token_logps(hidden, layer, torch.full((2, 3), -100), entropies=True, predictions=True)
    assert torch.equal(logps, torch.zeros(2, 3)) and torch.equal(entropies, torch.zeros(2, 3))
    assert torch.equal(predictions, torch.full((2, 3), -100))
    logps.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    for parameter in layer.parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, torch.zeros_like(parameter))
        assert (parameter.grad is not None) == trainable


@pytest.mark.parametrize("road", [token_logps, logps_from_logits])
def test_labels_must_be_whole_numbers_one_for_each_position(road):
    """Of another shape, or one label for a whole row, they would be read at wrong positions."""
    layer, hidden, labels = case(False)
    call = (lambda y: token_logps(hidden, layer, y)) if road is token_logps else (lambda y: logps_from_logits(layer(hidden), y))
    for bad, told in (
        (labels[:, 1:], r"\[2, 6\].*\[2, 7\]"),
        (labels.T, r"\[7, 2\]"),
        (labels[:, 0], r"\[2\]"),
        (labels.double(), "float64"),
        (labels > 0, "bool"),
        (labels.tolist(), "list"),
    ):
        with pytest.raises(BadLabels, match=told):
            call(bad)


@pytest.mark.parametrize("trainable", [False, True])
def test_tempered_layer_is_the_temperature(trainable):
    layer, hidden, labels = case(trainable)
    wanted = token_logps(hidden, layer, labels, temperature=0.35, entropies=True)
    got = token_logps(hidden, Tempered(layer, 0.5), labels, temperature=0.7, entropies=True)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    torch.testing.assert_close(Tempered(layer, 0.5)(hidden), layer(hidden) * 2)


def test_no_grad_mode_keeps_no_graph():
    layer, hidden, labels = case(True)
    with torch.no_grad():
        logps, _, _ = token_logps(hidden, layer, labels)
    assert not logps.requires_grad
    torch.testing.assert_close(logps, plain(layer(hidden), labels)[0].detach())


@pytest.mark.parametrize("trainable", [False, True])
def test_hidden_that_needs_no_gradient(trainable):
    layer, hidden, labels = case(trainable)
    logps, _, _ = token_logps(hidden.detach(), layer, labels)
    assert logps.requires_grad == trainable
    if trainable:
        (mine,) = torch.autograd.grad(logps.sum(), [layer.weight])
        (theirs,) = torch.autograd.grad(plain(layer(hidden), labels)[0].sum(), [layer.weight])
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("trainable", [False, True])
def test_autocast_multiplies_in_bf16_and_normalises_in_float32(trainable):
    torch.manual_seed(0)
    layer = nn.Linear(32, 50).requires_grad_(trainable)
    hidden = torch.randn(1, 9, 32, requires_grad=True)
    labels = torch.randint(0, 50, (1, 9))
    with torch.autocast("cpu", torch.bfloat16):
        logps, _, _ = token_logps(hidden, layer, labels)
        logits = layer(hidden)
    assert logps.dtype == torch.float32 and logits.dtype == torch.bfloat16
    want = plain(logits.float(), labels)[0]
    torch.testing.assert_close(logps, want)
    (mine,) = torch.autograd.grad(logps.sum(), hidden)
    (theirs,) = torch.autograd.grad(want.sum(), hidden)
    assert mine.dtype == torch.float32
    assert (mine - theirs).norm() / theirs.norm() < 0.01


def test_bf16_gradient_stays_right_where_the_label_is_nearly_certain():
    """1 - p of a label with p near 1 would be lost if p W were rounded before W[y] is taken from it."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 8, bias=False).requires_grad_(False)
    hidden = torch.randn(4, 16)
    labels = layer(hidden).argmax(-1)
    hidden = (hidden * 20).requires_grad_(True)
    exact = torch.autograd.grad(plain(layer(hidden).double(), labels)[0].sum(), hidden)[0]
    low = layer.to(torch.bfloat16)
    narrow = hidden.detach().to(torch.bfloat16).requires_grad_(True)
    reference = torch.autograd.grad(plain((narrow.double() @ low.weight.double().t()), labels)[0].sum(), narrow)[0]
    got = torch.autograd.grad(token_logps(narrow, low, labels)[0].sum(), narrow)[0]
    assert exact.norm() > 0
    assert (got.double() - reference.double()).norm() <= 0.05 * reference.double().norm()


def test_masked_vocabulary_has_finite_entropy():
    logits = torch.randn(1, 4, V, dtype=torch.float64)
    logits[..., 3] = -torch.inf
    logits.requires_grad_(True)
    labels = torch.tensor([[0, 1, 2, -100]])
    logps, entropies, _ = logps_from_logits(logits, labels, entropies=True)
    keep = [i for i in range(V) if i != 3]
    log_p = torch.log_softmax(logits.detach()[..., keep], -1)
    torch.testing.assert_close(entropies[0, :3].detach(), -(log_p.exp() * log_p).sum(-1)[0, :3])
    (gradient,) = torch.autograd.grad(logps.sum() + entropies.sum(), logits)
    assert torch.isfinite(gradient).all() and (gradient[..., 3] == 0).all()


def test_all_logits_are_never_there(monkeypatch):
    """The largest tensor that the chunks make is one chunk of logits."""
    sizes = []
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda *a: sizes.append(out := real(*a)) or out)
    layer, hidden, labels = case(False)
    token_logps(hidden, layer, labels, chunk_size=2)
    assert len(sizes) == 5 and max(z.shape[0] for z in sizes) == 2


def test_fp16_gradient_survives_a_large_vocabulary_a_certain_label_and_the_loss_scale():
    """float16 ends at 65504: neither the sum over a flat vocabulary nor the scale of the loss may pass through it."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 100_000, bias=False).requires_grad_(False)
    hidden, labels = torch.randn(3, 8) * 0.01, torch.tensor([5, 7, 99_999])
    hidden[1] = layer.weight[7] * 400  # nearly certain
    layer.weight[7] *= 10
    scale = 2.0**16

    def gradient(dtype):
        h = hidden.detach().clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logps, _, _ = token_logps(h, layer, labels)
        (-logps.sum() * scale).backward()
        return h.grad / scale

    half, full = gradient(torch.float16), gradient(torch.float32)
    assert torch.isfinite(half).all()
    assert ((half - full).norm(dim=1) <= 4e-3 * full.norm(dim=1) + 1e-9).all(), (half - full).norm(dim=1) / full.norm(dim=1)
