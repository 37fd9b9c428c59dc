"""Every first-party loss against its suite; a component that is added is checked without a line here."""

from __future__ import annotations

from twinkle_core import registry
from twinkle_core.known import FIRST_PARTY
from twinkle_core.losses.chunked_cross_entropy import ChunkedCrossEntropyLoss
from twinkle_core.losses.cross_entropy import CrossEntropyLoss
from twinkle_core.testing import LossSuite, compliance

OWN = [entry for entry in registry.entries("loss") if entry.dist in FIRST_PARTY]
CLASSES = {name: cls for dist in sorted({e.dist for e in OWN}) for name, cls in compliance(dist, "loss").items()}
globals().update(CLASSES)


def test_none_is_forgotten():
    assert len(CLASSES) == len(OWN)


class TestSmoothed(LossSuite):
    """Reads logits in place of logps."""

    component = CrossEntropyLoss
    arguments = {"label_smoothing": 0.2}


class TestSmallChunks(LossSuite):
    """Several chunks a batch."""

    component = ChunkedCrossEntropyLoss
    arguments = {"chunk_size": 4}
