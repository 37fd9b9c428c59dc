"""Patches of all installed distributions, and their contract."""

from twinkle_core.lazy import attach

__getattr__, __dir__, _ = attach(
    __name__,
    {
        "Patch": "twinkle_core.contracts.patch:Patch",
    },
    kind="patch",
)
