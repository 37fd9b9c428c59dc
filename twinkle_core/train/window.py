"""The accumulation window (L0 in spirit: pure Python, no torch)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class AccumulationWindow:
    """How many backwards were counted, with what weight, and which verbs have acted on the window that is due."""
