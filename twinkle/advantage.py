"""Advantages of completions from their rewards."""

from twinkle_core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "gae": "twinkle_core.ops.advantages:gae",
        "grpo_advantages": "twinkle_core.ops.advantages:grpo_advantages",
        "rloo_advantages": "twinkle_core.ops.advantages:rloo_advantages",
    },
)
