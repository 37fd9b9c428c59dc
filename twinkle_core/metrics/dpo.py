"""Rewards of preference training (L2)."""

from __future__ import annotations

from twinkle_core.metrics.numbers import LossNumbers


class DPOMetric(LossNumbers):
    """``reward_chosen``, ``reward_rejected`` (implicit rewards, mean over pairs), ``reward_margin`` (their difference) and
    ``reward_accuracy`` (share of pairs whose chosen answer has the larger one), as the preference loss in use defines them:
    ``beta (log p - log p_ref)`` for DPO.
    """

    names = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
