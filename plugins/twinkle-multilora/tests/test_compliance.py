"""MultiLoraTransformersModel keeps the contract of models, with tenants as its adapters."""

from __future__ import annotations

import pytest

from twinkle_multilora.compliance import MultiLoraSuite


class TestMultiLoraTransformersModel(MultiLoraSuite):
    @pytest.mark.slow  # two processes that import transformers
    def test_two_ranks_are_one(self, rows, tmp_path):
        super().test_two_ranks_are_one(rows, tmp_path)
