"""MegatronModel keeps the contract of models, whole and with adapters."""

from __future__ import annotations

import pytest

from twinkle_megatron.compliance import MegatronSuite


@pytest.mark.slow
class TestMegatronModel(MegatronSuite):
    """All of it in a minute."""
