"""The models with slots keep the contract of models."""

from __future__ import annotations

import pytest

from twinkle_multilora.compliance import MultiLoraSuite
from twinkle_multilora.megatron_compliance import MultiLoraMegatronSuite


class TestMultiLoraTransformersModel(MultiLoraSuite):
    pass


@pytest.mark.slow
class TestMultiLoraMegatronModel(MultiLoraMegatronSuite):
    pass
