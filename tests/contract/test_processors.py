"""Every first-party processor against its suite; a component that is added is checked without a line here."""

from __future__ import annotations

from twinkle_core import registry
from twinkle_core.known import FIRST_PARTY
from twinkle_core.testing import compliance

OWN = [entry for entry in registry.entries("processor") if entry.dist in FIRST_PARTY]
CLASSES = {name: cls for dist in sorted({e.dist for e in OWN}) for name, cls in compliance(dist, "processor").items()}
globals().update(CLASSES)


def test_none_is_forgotten():
    assert len(CLASSES) == len(OWN)
