"""ToyModel keeps the contract of models."""

from __future__ import annotations

from twinkle_toy_backend.testing import ToySuite


class TestToyModel(ToySuite):
    """The suite, as a test file runs it."""
