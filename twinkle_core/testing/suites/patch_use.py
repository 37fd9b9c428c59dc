"""What stays true of a model while it is patched, and of other models (L2)."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from twinkle_core.isolation import attempt
from twinkle_core.testing.engines import ToyEngine
from twinkle_core.testing.suites.base import Suite, capability
from twinkle_core.train.single import SingleAdapter
from twinkle_core.train.verbs import SessionModel


class PatchUse(Suite):
    """Traces, parameters, random numbers, frozen weights, a second model."""

    kind: ClassVar[str] = "patch"
    same_outputs: ClassVar[bool] = True

    def modules(self, model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Name and module of all torch modules in the model: of itself, or of its ``module``."""
        module = model if isinstance(model, torch.nn.Module) else model.module
        return module.named_modules()  # type: ignore[no-any-return]

    def test_undo_restores_attributes_and_methods(self, patch: Any, model: Any) -> None:
        """Every attribute is the object it was; none is left behind. The first test: later ones see what earlier ones left."""
        before = self._photo(model)
        patch.apply(model)
        patch.undo(model)
        left = self._differences(before, self._photo(model))
        assert not left, (
            f"after undo() {listed(left)}. Put back what was found; and what was not there before apply(), delete "
            "(a method set on an object hides its class's: del it, don't set it)"
        )

    @capability("same_outputs")
    def test_parameters_are_the_same(self, patch: Any, model: Any) -> None:
        """Those that an optimizer or a checkpoint knows: none is replaced by a copy, which ``undo`` would lose."""
        (_, network), *_ = self.modules(model)
        before = dict(network.named_parameters())
        patch.apply(model)
        now = dict(network.named_parameters())
        patch.undo(model)
        gone = [name for name in before if name not in now]
        assert not gone, (
            f"while it is applied there is no parameter {gone[0]}: a checkpoint of the patched model would not fit the model. "
            "Change the method of a module, or give the new module the old one's parameters under their names"
        )
        copied = [name for name, parameter in before.items() if now[name] is not parameter]
        assert not copied, (
            f"while it is applied {copied[0]} is another tensor: an optimizer that is there already trains the one that was "
            "found, and undo() loses what is trained. Share the parameter: new.weight = old.weight"
        )

    def test_frozen_weights_stay_frozen(self, patch: Any, model: Any) -> None:
        """Through ``apply`` and ``undo``."""
        (_, network), *_ = self.modules(model)
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad][::2]
        for _, parameter in named:
            parameter.requires_grad_(False)
        for call in ("apply", "undo"):
            getattr(patch, call)(model)
            trained = [name for name, parameter in named if parameter.requires_grad]
            assert not trained, f"{call}() makes {trained[0]} trained, which was frozen: it is not the patch's to say"
        for _, parameter in named:
            parameter.requires_grad_(True)

    def test_random_numbers_go_on(self, patch: Any, model: Any) -> None:
        """``apply`` and ``undo`` seed nothing: dropout and the order of data are other than without a patch else."""
        states = []
        with torch.random.fork_rng(devices=[]):
            for seed in (1, 2):
                torch.manual_seed(seed)
                patch.apply(model)
                patch.undo(model)
                states.append(torch.get_rng_state())
        assert not torch.equal(*states), "apply() or undo() seeds torch's random numbers: use a torch.Generator"

    def test_a_second_model_is_patched_too(self, patch: Any, model: Any) -> None:
        """A policy and its reference, say: each is patched by an object of its own."""
        (_, network), *_ = self.modules(model)
        copied = attempt(lambda: copy.deepcopy((network, patch)))
        if copied.value is None:
            pytest.skip(f"the network or the patch can't be copied: {copied.why}")
        twin, second = copied.value
        other = twin if isinstance(model, torch.nn.Module) else SessionModel(ToyEngine(twin), SingleAdapter(twin))
        before = self._photo(other)
        patch.apply(model)
        second.apply(other)
        touched = self._differences(before, self._photo(other))
        second.undo(other)
        patch.undo(model)
        assert touched, (
            "a second model, with an object of the patch of its own, is not patched: what says that it is applied must be on "
            "the object, not on the class or in the module"
        )

    @abstractmethod
    def _photo(self, model: Any) -> dict[str, Any]:
        """What can be seen of a model."""

    @abstractmethod
    def _differences(self, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        """What two of them differ by, in words."""


def listed(sentences: list[str]) -> str:
    """The first three of them."""
    more = f", and {len(sentences) - 3} more" if len(sentences) > 3 else ""
    return ", ".join(sentences[:3]) + more
