"""DPO and its kin with a reference (L2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from twinkle_core.errors import BadLossSetting, MissingArgument
from twinkle_core.losses import settings
from twinkle_core.losses.preference import Pairs, PreferenceLoss, added
from twinkle_core.types import InputFeature, LossOutput, ModelOutput

TYPES = ("sigmoid", "hinge", "ipo", "kto_pair")


class DPOLoss(PreferenceLoss):
    """Direct preference optimisation.

    With ``h(y) = log p(y) - log p_ref(y)`` over the labelled tokens, chosen w and rejected l, ``d = h(w) - h(l)``:

    ============  =====================================================================================================
    sigmoid       - (1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)   (Rafailov et al. 2023, eq. 7; e: label
                  smoothing, Mitchell 2023, A note on DPO with noisy preferences, eq. 3)
    hinge         max(0, 1 - beta d)   (Zhao et al. 2023, SLiC-HF; Liu et al. 2024, RSO)
    ipo           (d - 1 / (2 beta))^2, with means over tokens in h by default   (Azar et al. 2023, eq. 17)
    kto_pair      [1 - sigmoid(beta (h(w) - z_l))] + [1 - sigmoid(beta (z_w - h(l)))], z_w = max(0, mean of h(w) over the
                  batch), z_l of h(l), without gradient   (Ethayarajh et al. 2024, eq. 7, on pairs)
    ============  =====================================================================================================

    Rows come in pairs, chosen first. Needs logps; the weight is the number of pairs (twice that for ``kto_pair``, a mean over
    answers). Scope ``group``; ``batch`` for ``kto_pair``, whose z is the batch's.

    Args:
        beta: how strongly the policy is held to the reference.
        loss_type: one of the table.
        label_smoothing: e, the share of pairs that are the wrong way round; ``sigmoid`` only.
        reference_free: log p_ref = 0.
        average: h is divided by the number of its tokens; None: as the type's formula has it (``ipo`` only).

    Args (of a call):
        ref_logps: of the reference, ``[B, T]`` (the ``logps`` of ``forward_only(disable_lora=True)``), lists, or ``[B]`` sums;
            needed unless ``reference_free``.
    """

    def __init__(
        self,
        beta: float = 0.1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        reference_free: bool = False,
        average: bool | None = None,
    ) -> None:
        self.beta = settings.number(self, "beta", beta, above=0)
        self.loss_type = settings.choice(self, "loss_type", loss_type, TYPES)
        self.label_smoothing = settings.number(self, "label_smoothing", label_smoothing, least=0, below=0.5)
        if label_smoothing and loss_type != "sigmoid":
            raise BadLossSetting("DPOLoss", "label_smoothing", label_smoothing, f"0 for loss_type={loss_type!r}")
        self.reference_free = settings.flag(self, "reference_free", reference_free)
        self.average = loss_type == "ipo" if average is None else settings.flag(self, "average", average)
        self.required_args = frozenset(() if reference_free else {"ref_logps"})  # type: ignore[misc]
        if loss_type == "kto_pair":
            self.scope = "batch"  # type: ignore[misc, assignment]

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, *, ref_logps: Any = None) -> LossOutput:
        """See the class."""
        if ref_logps is None and not self.reference_free:
            raise MissingArgument(type(self).__name__, ["ref_logps"])
        pairs = self.pairs(inputs, outputs, None if self.reference_free else ref_logps)
        chosen, rejected = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
        if self.average:
            chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
        items = 2 if self.loss_type == "kto_pair" else 1
        return added(self._terms(chosen, rejected, pairs), pairs, self.beta * chosen, self.beta * rejected, items)

    def _terms(self, chosen: Tensor, rejected: Tensor, pairs: Pairs) -> Tensor:
        scaled = self.beta * (chosen - rejected)
        if self.loss_type == "sigmoid":
            e = self.label_smoothing
            return -(1 - e) * logsigmoid(scaled) - (e * logsigmoid(-scaled) if e else 0.0)
        if self.loss_type == "hinge":
            return torch.relu(1 - scaled)
        if self.loss_type == "ipo":
            return (chosen - rejected - 1 / (2 * self.beta)).square()
        count = pairs.whole.sum().clamp(min=1)
        z_chosen, z_rejected = (
            (torch.where(pairs.whole, h.detach(), 0.0).sum() / count).clamp(min=0) for h in (chosen, rejected)
        )
        return torch.sigmoid(self.beta * (z_rejected - chosen)) + torch.sigmoid(self.beta * (rejected - z_chosen))
