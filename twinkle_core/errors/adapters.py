"""Errors of adapters (L0)."""

from __future__ import annotations

from collections.abc import Iterable

from twinkle_core.errors.base import TwinkleError, listed, meant


def whose(adapter: str) -> str:
    """Words for an adapter, or for the base model."""
    return f"adapter '{adapter}'" if adapter else "the base model"


def by_name(adapter: str) -> str:
    """The argument of a call that names it; the base needs none."""
    return f"..., adapter_name='{adapter}'" if adapter else "..."


class UnknownAdapter(TwinkleError, KeyError):
    """An adapter that is not there."""

    def __init__(self, name: str, near: str | None, live: Iterable[str]) -> None:
        known = listed(live, "none yet; add_adapter_to_model makes one")
        self.text = f"unknown adapter '{name}'.{meant(near)}\n    adapters: {known}"
        super().__init__(self.text)

    def __str__(self) -> str:  # KeyError shows the repr of its text
        return self.text


class WhichAdapter(TwinkleError, ValueError):
    """Several adapters, and none named."""

    def __init__(self, live: Iterable[str]) -> None:
        super().__init__(
            f"which adapter? This model has {listed(live)}.\n"
            f"    give adapter_name=..., or put the calls in `with model.adapter(name):` (adapter_name='' is the base model)"
        )


class LoraDisabled(TwinkleError, RuntimeError):
    """A backward where the adapter takes no part. Nothing was changed."""

    def __init__(self, verb: str, adapter: str) -> None:
        super().__init__(
            f"{verb}() of {whose(adapter)} has nothing to go back through: its forward is inside adapter(..., "
            f"disable_lora=True), so the base model alone takes part.\n    call it outside, or use forward_only() there"
        )


class SlotsFull(TwinkleError, RuntimeError):
    """A pool of adapters without a free slot. Nothing was changed."""

    def __init__(self, adapter: str, size: int, live: Iterable[str]) -> None:
        super().__init__(
            f"adapter '{adapter}' can't be made: the pool of {size} is full. It holds {listed(live)}.\n"
            f"    release one (multi_lora.release_lora, remove_adapter), or build the model with a larger max_loras"
        )


class DuplicateAdapter(TwinkleError, ValueError):
    """A second adapter of one name. The live one is untouched."""

    def __init__(self, name: str) -> None:
        super().__init__(f"adapter '{name}' is there already. Remove it first (remove_adapter), or choose another name.")


class BadAdapter(TwinkleError, ValueError):
    """An adapter's name, configuration or folder that can't be used. Nothing was changed."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"adapter '{name}' can't be made: {why}")


class RankTooLarge(BadAdapter, RuntimeError):
    """A rank that no slot of a pool can hold. Nothing was changed.

    ``where``: ``r``, or which entry of ``rank_pattern``.
    """

    def __init__(self, adapter: str, where: str, rank: int, max_r: int) -> None:
        super().__init__(
            adapter,
            f"{where}={rank} is more than max_r={max_r}, the rank that each slot of this model was built with.\n"
            f"    take a smaller rank, or build the model with max_r={rank}",
        )
