"""Each loss against the plain formula in float64, and its declarations."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import BadLabels, BadLossSetting, LabelsMissing
from twinkle_core.losses.chunked_cross_entropy import ChunkedCrossEntropyLoss
from twinkle_core.losses.cross_entropy import CrossEntropyLoss
from twinkle_core.losses.mse import MSELoss
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.engines import compute, session_model
from twinkle_core.testing.toys import TinyLM, random_rows
from twinkle_core.train import losses

LOSSES = [CrossEntropyLoss(), CrossEntropyLoss(label_smoothing=0.2), ChunkedCrossEntropyLoss(chunk_size=4), MSELoss()]


@pytest.fixture
def module():
    torch.manual_seed(0)
    return TinyLM().double()


def evaluate(module, loss, rows, **loss_args):
    inputs = InputProcessor().collate(rows)
    return inputs, loss(inputs, compute(module, inputs, losses.engine_needs(loss, [])), **loss_args)


def gradient(module, value):
    grads = torch.autograd.grad(value, list(module.parameters()), allow_unused=True, retain_graph=True)
    return torch.cat([g.flatten() for g in grads if g is not None])


@pytest.mark.parametrize(
    ("loss", "smoothing"),
    [
        (CrossEntropyLoss(), 0.0),
        (CrossEntropyLoss(0.2), 0.2),
        (ChunkedCrossEntropyLoss(1), 0.0),
        (ChunkedCrossEntropyLoss(), 0.0),
    ],
)
def test_cross_entropies_are_sums_over_labelled_tokens(module, loss, smoothing):
    inputs, got = evaluate(module, loss, random_rows([3, 7, 2]))
    labels, logits = inputs["labels"], module.output_layer(module(inputs))
    mask = labels != -100
    log_p = torch.log_softmax(logits[mask], -1)
    own = log_p.gather(1, labels[mask][:, None]).sum()
    want = -((1 - smoothing) * own + smoothing / log_p.shape[1] * log_p.sum())
    torch.testing.assert_close(got.sum, want)
    assert int(got.weight) == int(mask.sum())
    torch.testing.assert_close(gradient(module, got.sum), gradient(module, want))
    torch.testing.assert_close(
        got.sum / got.weight, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
    )


@pytest.mark.parametrize("given", [False, True])
def test_mse_is_a_sum_of_squares(module, given):
    rows = random_rows([3, 7, 2])
    inputs = InputProcessor().collate(rows)
    targets = torch.randn(3, 7, dtype=torch.float64) if given else None
    if given:
        targets[0, 3:] = targets[2, 2:] = torch.nan
    _, got = evaluate(module, MSELoss(), rows, **({"targets": targets} if given else {}))
    goal = targets if given else inputs["labels"].double()
    mask = ~goal.isnan() & (goal != -100)
    values = module.value_head(module(inputs)).squeeze(-1)
    want = ((values - goal)[mask] ** 2).sum()
    torch.testing.assert_close(got.sum, want)
    assert int(got.weight) == int(mask.sum()) > 0
    torch.testing.assert_close(gradient(module, got.sum), gradient(module, want))


def test_mse_without_targets_is_told(module):
    with pytest.raises(LabelsMissing, match="MSELoss needs 'labels'"):
        evaluate(module, MSELoss(), [{"input_ids": [1, 2]}])


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_without_an_item_the_sum_is_zero_with_a_graph(module, loss):
    _, got = evaluate(module, loss, [{"input_ids": [1, 2, 3], "labels": [-100] * 3}])
    assert float(got.sum.detach()) == 0.0 and float(got.weight) == 0
    assert torch.equal(gradient(module, got.sum), torch.zeros_like(gradient(module, got.sum)))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_declared_scope_and_locality_hold(module, loss):
    """A token-local loss of a batch is the sum of the losses of its slices, cut anywhere along the tokens."""
    assert isinstance(loss, Loss) and loss.scope == "token" and loss.token_local
    inputs = InputProcessor().collate(random_rows([6, 6]))
    outputs = compute(module, inputs, losses.engine_needs(loss, []))
    whole = loss(inputs, outputs)
    parts = []
    for cut in (slice(0, 1), slice(1, 4), slice(4, 6)):
        cut_inputs = {k: v[:, cut] for k, v in inputs.items()}
        cut_outputs = type(outputs)({k: v[:, cut] if isinstance(v, torch.Tensor) else v for k, v in outputs.items()})
        parts.append(loss(cut_inputs, cut_outputs))
    torch.testing.assert_close(sum(p.sum for p in parts), whole.sum)
    assert sum(int(p.weight) for p in parts) == int(whole.weight)


@pytest.mark.parametrize(
    ("cls", "value"),
    [
        *((CrossEntropyLoss, v) for v in (1.0, -0.1, "x", None, True, math.nan)),
        *((ChunkedCrossEntropyLoss, v) for v in (0, "a", 1.5, None, True)),
    ],
)
def test_settings_out_of_range_are_refused(cls, value):
    with pytest.raises(BadLossSetting, match=rf"{cls.__name__}\(.*={value!r}"):
        cls(value)


def test_mse_takes_a_list_and_refuses_targets_of_another_shape(module):
    rows = random_rows([2, 2])
    as_list = evaluate(module, MSELoss(), rows, targets=[[1.0, 2.0], [3.0, 4.0]])[1]
    as_tensor = evaluate(module, MSELoss(), rows, targets=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))[1]
    assert torch.equal(as_list.sum, as_tensor.sum)
    for targets, told in (
        ([1.0, 2.0], r"\[2\].*\[2, 2\]"),
        (1.0, r"\[\]"),
        ([[1.0], [2.0, 3.0]], "can't be made"),
        ("x", "can't"),
    ):
        with pytest.raises(BadLabels, match=told):
            evaluate(module, MSELoss(), rows, targets=targets)


@pytest.mark.parametrize("loss", LOSSES[:3], ids=["plain", "smoothed", "chunked"])
def test_labels_of_another_shape_or_kind_are_refused(module, loss):
    inputs = InputProcessor().collate(random_rows([6, 6, 6]))
    outputs = compute(module, inputs, losses.engine_needs(loss, []))
    for labels in (inputs["labels"][:, 1:], inputs["labels"].T, inputs["labels"].float()):
        with pytest.raises(BadLabels):
            bent = {**inputs, "labels": labels}
            loss(bent, compute(module, bent, losses.engine_needs(loss, [])))
    assert outputs


@pytest.mark.parametrize("loss", LOSSES[:3], ids=["plain", "smoothed", "chunked"])
def test_temperature_reaches_every_loss_on_tokens(module, loss):
    inputs = InputProcessor().collate(random_rows([3, 7, 2]))
    got = loss(inputs, compute(module, inputs, losses.engine_needs(loss, []), temperature=0.5)).sum
    with torch.no_grad():
        module.output_layer.weight *= 2
        module.output_layer.bias *= 2
    torch.testing.assert_close(got, loss(inputs, compute(module, inputs, losses.engine_needs(loss, []))).sum)


def test_B45_labels_are_aligned_and_nobody_shifts_them():
    """Zero logits over 4 words, 5 tokens all labelled before alignment: 4 labels remain, and the loss is ln 4."""
    module = TinyLM(vocabulary=4)
    with torch.no_grad():
        module.output_layer.weight.zero_()
        module.output_layer.bias.zero_()
    model = session_model(module)
    model.forward_backward([{"input_ids": [0, 1, 2, 3, 0], "labels": [1, 2, 3, 0, -100]}])
    assert float(model.sessions[""].window.weight) == 4
    assert float(model.sessions[""].last_loss) == pytest.approx(math.log(4))
