"""PPO with a value head (L2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinkle_core.errors import MissingArgument
from twinkle_core.losses import settings
from twinkle_core.losses.policy import TOKEN, PolicyLoss, Surrogate, clipped
from twinkle_core.ops.rows import floats, labelled, per_token
from twinkle_core.types import InputFeature, LossOutput, ModelOutput


class PPOLoss(PolicyLoss):
    """Proximal policy optimisation with a clipped value loss (Schulman et al. 2017, eqs. 7 and 9).

        l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) + value_coef v_t - entropy_coef H_t
        v_t = 1/2 max((V_t - R_t)^2, (clip(V_t, Vold_t - value_clip, Vold_t + value_clip) - R_t)^2)

    The clip of the values is that of the authors' code (OpenAI baselines; Huang et al. 2022, The 37 Implementation Details of
    PPO, detail 9); it is off without ``old_values``. All is divided by the labelled tokens.

    Needs logps and values (a model with a value head); scope ``token``. Besides the arguments of :class:`PolicyLoss` a call
    takes ``returns`` R and ``old_values`` Vold, each ``[B, T]`` or lists; see ``twinkle.advantage.gae``.

    Args:
        clip_low, clip_high, beta, entropy_coef: as for GRPO.
        value_coef: of the value loss.
        value_clip: how far a value may leave the old one; None: no clip.
    """

    needs = frozenset({"logps", "values"})

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float | None = None,
        value_coef: float = 0.5,
        value_clip: float | None = 0.2,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, aggregation=TOKEN)
        self.clip_low = settings.number(self, "clip_low", clip_low, least=0)
        self.clip_high = self.clip_low if clip_high is None else settings.number(self, "clip_high", clip_high, least=0)
        self.value_coef = settings.number(self, "value_coef", value_coef, least=0)
        self.value_clip = None if value_clip is None else settings.number(self, "value_clip", value_clip, least=0)
        self.required_args = self.required_args | {"returns"}  # type: ignore[misc]

    def surrogate(self, inputs: InputFeature, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Surrogate:
        """The clipped bound."""
        return clipped(log_ratio, advantages, self.clip_low, self.clip_high)

    def __call__(
        self,
        inputs: InputFeature,
        outputs: ModelOutput,
        *,
        advantages: Any,
        old_logps: Any = None,
        ref_logps: Any = None,
        returns: Any = None,
        old_values: Any = None,
    ) -> LossOutput:
        """See the class."""
        name = type(self).__name__
        if returns is None:
            raise MissingArgument(name, ["returns"])
        policy = super().__call__(inputs, outputs, advantages=advantages, old_logps=old_logps, ref_logps=ref_logps)
        mask, values = labelled(name, inputs), floats(outputs["values"])
        goal = per_token(name, "returns", returns, inputs, values, of_rows=True)
        error = (values - goal).square()
        if old_values is not None and self.value_clip is not None:
            old = per_token(name, "old_values", old_values, inputs, values)
            near = old + (values - old).clamp(-self.value_clip, self.value_clip)
            error = torch.maximum(error, (near - goal).square())
        total = torch.where(mask, error, 0.0).sum() / 2
        numbers = {**(policy.metrics or {}), "value_loss": (total.detach(), mask.sum())}
        return LossOutput(policy.sum + self.value_coef * total, policy.weight, numbers)
