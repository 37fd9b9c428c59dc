"""How far a policy moves (L2)."""

from __future__ import annotations

from twinkle_core.metrics.numbers import LossNumbers
from twinkle_core.types import IGNORE_INDEX, InputFeature, ModelOutput


class GRPOMetric(LossNumbers):
    """Means over labelled tokens: ``kl`` to the reference (k3; where the call had ``ref_logps``), ``ratio`` to the policy that
    sampled, ``clip_low`` and ``clip_high`` (shares of tokens whose gradient the clip stops, below and above), and ``entropy``
    in nats, which makes the engine compute entropies. For PPO also ``value_loss``.
    """

    names = ("kl", "ratio", "clip_low", "clip_high", "value_loss")
    needs = frozenset({"loss", "entropies"})

    def accumulate(self, inputs: InputFeature, outputs: ModelOutput) -> None:
        super().accumulate(inputs, outputs)
        self.add("entropy", outputs.entropies.sum(), (inputs["labels"] != IGNORE_INDEX).sum())
