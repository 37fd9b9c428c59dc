"""Losses of all installed distributions, and their contract."""

from twinkle_core.lazy import attach

__getattr__, __dir__, _ = attach(
    __name__,
    {
        "Loss": "twinkle_core.contracts.loss:Loss",
        "LossOutput": "twinkle_core.types:LossOutput",
    },
    kind="loss",
)
