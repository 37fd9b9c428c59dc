"""What is made of hidden states: the same whether logits are there as a whole or not, and nothing that is not asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

from twinkle_core.ops.from_hidden import FROM_HIDDEN, from_hidden

OF_LABELS = ("logps", "entropies", "predictions")


@pytest.fixture
def case():
    torch.manual_seed(0)
    labels = torch.tensor([[3, -100, 0, 10], [-100, 7, 1, -100]])
    return torch.randn(2, 4, 5, dtype=torch.float64), torch.nn.Linear(5, 11).double(), {"labels": labels}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_change_nothing(case, temperature):
    apart = from_hidden(*case, set(OF_LABELS), temperature)
    whole = from_hidden(*case, {*OF_LABELS, "logits"}, temperature)
    hidden, layer, inputs = case
    logps = (layer(hidden) / temperature).log_softmax(-1)
    held = inputs["labels"] != -100
    picked = logps.gather(-1, inputs["labels"].clamp(min=0)[..., None])[..., 0] * held
    assert torch.allclose(whole.logits.log_softmax(-1), logps)
    for output in (apart, whole):
        assert torch.allclose(output.logps, picked)
        assert torch.allclose(output.entropies, -(logps.exp() * logps).sum(-1) * held)
        assert torch.equal(output.predictions, torch.where(held, logps.argmax(-1), -100))


def test_nothing_is_given_that_is_not_asked_for(case):
    for count in range(len(FROM_HIDDEN) + 1):
        for needs in itertools.combinations(sorted(FROM_HIDDEN), count):
            assert from_hidden(*case, set(needs)).keys() == {*needs, *(["output_layer"] if "hidden" in needs else [])}
    assert from_hidden(case[0], case[1], {}, {"logits", "hidden"}, 2.0).logits.shape == (2, 4, 11)  # labels are not looked at
