"""Learning-rate schedulers by name: twinkle's, torch's, and those of installed distributions."""

from twinkle_core.lazy import attach

__getattr__, __dir__, _ = attach(__name__, kind="scheduler")
