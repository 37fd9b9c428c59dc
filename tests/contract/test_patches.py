"""Every first-party patch against its suite; a component that is added is checked without a line here."""

from __future__ import annotations

import types

import torch

from twinkle_core import Patch, registry
from twinkle_core.known import FIRST_PARTY
from twinkle_core.testing import PatchSuite, compliance

OWN = [entry for entry in registry.entries("patch") if entry.dist in FIRST_PARTY]
CLASSES = {name: cls for dist in sorted({e.dist for e in OWN}) for name, cls in compliance(dist, "patch").items()}
globals().update(CLASSES)


def test_none_is_forgotten():
    assert len(CLASSES) == len(OWN)


class ExactNorm(Patch):
    """A layer norm written out, as a method of each module; and its scale under another name on the class's module."""

    def __init__(self):
        self._patched = []

    def apply(self, model):
        for module in model.module.modules():
            if isinstance(module, torch.nn.LayerNorm) and "forward" not in vars(module):
                module.forward = types.MethodType(written_out, module)
                self._patched.append(module)

    def undo(self, model):
        while self._patched:
            del self._patched.pop().forward


def written_out(self, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


class TestExactNorm(PatchSuite):
    """While twinkle itself brings no patch: one that keeps the contract passes."""

    component = ExactNorm
