"""How ToyModel is built for its compliance suite: by ``twinkle check``, and by this distribution's own tests."""

from __future__ import annotations

from twinkle_core.testing.suites.model import ModelSuite
from twinkle_toy_backend.model import ToyModel


class ToySuite(ModelSuite):
    """It passes everything; ``generate`` is not among its engine's capabilities."""

    component = ToyModel

    def adapter_config(self, name: str) -> int:
        return 4
