"""TransformersModel keeps the contract of models, whole and with adapters."""

from __future__ import annotations

import pytest

from twinkle_transformers.compliance import TransformersSuite


class TestTransformersModel(TransformersSuite):
    @pytest.mark.slow  # two processes that import transformers
    def test_two_ranks_are_one(self, rows, tmp_path):
        super().test_two_ranks_are_one(rows, tmp_path)
