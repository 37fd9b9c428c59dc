"""Models of all installed backends."""

from twinkle_core.lazy import attach

__getattr__, __dir__, _ = attach(
    __name__,
    {
        "TwinkleModel": "twinkle_core.contracts.model:TwinkleModel",
    },
    kind="model",
)
