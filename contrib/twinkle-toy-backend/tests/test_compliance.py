"""ToyModel keeps the contract of models."""

from __future__ import annotations

import pytest

from twinkle_toy_backend.testing import ToySuite


class TestToyModel(ToySuite):
    @pytest.mark.slow  # two processes that import torch
    def test_two_ranks_are_one(self, rows, tmp_path):
        super().test_two_ranks_are_one(rows, tmp_path)
