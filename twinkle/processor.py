"""Processors of all installed distributions, and their contract."""

from twinkle_core.lazy import attach

__getattr__, __dir__, _ = attach(
    __name__,
    {
        "Processor": "twinkle_core.contracts.processor:Processor",
    },
    kind="processor",
)
