"""What tests of losses share: a model in float64, its logps row by row, and how gradients are compared."""

from __future__ import annotations

import sys

import pytest
import torch

from twinkle_core.processors.input import InputProcessor, unpack
from twinkle_core.testing.engines import compute
from twinkle_core.testing.toys import TinyLM
from twinkle_core.train import losses


def tiny():
    torch.manual_seed(0)
    return TinyLM().double()


def evaluate(module, loss, rows, *, processor=None, **loss_args):
    inputs = (processor or InputProcessor()).collate(rows)
    return loss(inputs, compute(module, inputs, losses.engine_needs(loss, [])), **loss_args)


def labelled_logps(module, rows):
    """For each row: log-probabilities of its labels, by log_softmax over whole logits; and where the labels are."""
    inputs = InputProcessor().collate(rows)
    everything = torch.log_softmax(module.output_layer(module(inputs)), -1)
    found = []
    for row, logps in zip(rows, unpack(inputs, everything), strict=True):
        at = [t for t, label in enumerate(row["labels"]) if label != -100]
        found.append((torch.stack([logps[t, row["labels"][t]] for t in at]), at, logps))
    return found


def gradient(module, value):
    weights = list(module.parameters())
    grads = torch.autograd.grad(value, weights, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(w) if g is None else g).flatten() for w, g in zip(weights, grads, strict=True)])


def assert_is(module, got, want, weight):
    """A loss's sum, gradients and weight are those of a formula."""
    torch.testing.assert_close(got.sum, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient(module, got.sum), gradient(module, want), rtol=1e-8, atol=1e-11)
    assert float(got.weight) == weight


@pytest.fixture
def formulas():
    """This module."""
    return sys.modules[__name__]
