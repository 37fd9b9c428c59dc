"""How MegatronModel is built for its compliance suite."""

from __future__ import annotations

from twinkle_core.testing.suites.model import ModelSuite
from twinkle_megatron.model import MegatronModel


class MegatronSuite(ModelSuite):
    component = MegatronModel
