"""The compliance suite of patches (L2)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch

from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.engines import ToyEngine
from twinkle_core.testing.suites.base import Suite, capability
from twinkle_core.testing.suites.outputs import tiny_lm
from twinkle_core.testing.toys import random_rows
from twinkle_core.train.single import SingleAdapter
from twinkle_core.train.verbs import SessionModel

#: what Python itself writes into classes and modules
_OWN = frozenset(("__doc__", "__annotations__", "__abstractmethods__", "_abc_impl", "__warningregistry__", "__builtins__"))
#: classes that no patch is about
_FOREIGN = (object,)


class TinyModel(SessionModel):
    """A twinkle model over two small layers, in float32. ``module`` is the torch module, as in the backends."""

    def __init__(self) -> None:
        self.module = tiny_lm(torch.float32)
        super().__init__(ToyEngine(self.module), SingleAdapter(self.module))


class PatchSuite(Suite):
    """Checks of a Patch: it goes without a trace.

    Compared are, of each module of the model: its attributes, parameters, buffers, hooks and class; the attributes of its
    classes; the names in the Python modules where these are written; and outputs, bit for bit.

    Fixtures and methods to override:

    * ``patch``: the object.
    * ``model``: what it is applied to; by default a twinkle model over two small layers. Give one that the patch is for.
    * ``modules(model)``: the torch modules of the model.
    * ``outputs(model)``: a tensor, or several, that the model computes.

    Capabilities:

    * ``same_outputs``: the patch changes how the model computes and not what, as the contract says; compared with
      ``tolerance``.
    """

    kind: ClassVar[str] = "patch"
    same_outputs: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-5

    @pytest.fixture
    def patch(self) -> Any:
        """The patch to check."""
        return self.build()

    @pytest.fixture
    def subject(self, patch: Any) -> Any:
        """The same, by the name that all suites know it by."""
        return patch

    @pytest.fixture
    def model(self) -> Any:
        """The model it is applied to."""
        return TinyModel()

    def modules(self, model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Name and module of all torch modules in the model: of itself, or of its ``module``."""
        module = model if isinstance(model, torch.nn.Module) else model.module
        return module.named_modules()  # type: ignore[no-any-return]

    def outputs(self, model: Any) -> Any:
        """What the model computes for a batch of three rows; a tensor or several."""
        inputs = InputProcessor().collate(random_rows([3, 5, 2]))
        if isinstance(model, torch.nn.Module):
            return model(inputs)
        return model.forward_only(inputs, return_logits=True)["logits"]

    def test_undo_restores_attributes_and_methods(self, patch: Any, model: Any) -> None:
        """Every attribute is the object it was; none is left behind. The first test: later ones see what earlier ones left."""
        before = self._photo(model)
        patch.apply(model)
        patch.undo(model)
        left = _differences(before, self._photo(model))
        assert not left, (
            f"after undo() {_listed(left)}. Put back what was found; and what was not there before apply(), delete "
            "(a method set on an object hides its class's: del it, don't set it)"
        )

    def test_changes_something(self, patch: Any, model: Any) -> None:
        """Else these checks would say nothing."""
        before = self._photo(model)
        patch.apply(model)
        after = self._photo(model)
        patch.undo(model)
        assert _differences(before, after), (
            "apply() changes nothing of this model; override the fixture 'model' with one that the patch is for"
        )

    def test_undo_restores_outputs(self, patch: Any, model: Any) -> None:
        """Bit for bit."""
        before = self._outputs(model)
        patch.apply(model)
        self._outputs(model)  # what it builds while it works must go too
        patch.undo(model)
        assert _equal(before, self._outputs(model)), "after undo() the model gives other outputs than before apply()"

    def test_undo_after_use_leaves_nothing(self, patch: Any, model: Any) -> None:
        """Neither what the patched model made while it ran."""
        self._outputs(model)
        before = self._photo(model)
        patch.apply(model)
        self._outputs(model)
        patch.undo(model)
        left = _differences(before, self._photo(model))
        assert not left, f"after apply(), a forward and undo(), {_listed(left)}"

    def test_twice_is_once(self, patch: Any, model: Any) -> None:
        """Applied twice the model computes what it does applied once, and one ``undo`` is enough."""
        before = self._photo(model)
        patch.apply(model)
        once = self._outputs(model)
        patch.apply(model)
        assert _equal(once, self._outputs(model)), (
            "applied twice, the outputs differ from applied once: return where it is applied"
        )
        patch.undo(model)
        left = _differences(before, self._photo(model))
        assert not left, (
            f"after apply(), apply(), undo(), {_listed(left)}: the second apply() took the patched model for the original"
        )

    def test_can_be_applied_again(self, patch: Any, model: Any) -> None:
        """After ``undo`` it works as the first time."""
        patch.apply(model)
        first = self._outputs(model)
        patch.undo(model)
        patch.apply(model)
        again = self._outputs(model)
        patch.undo(model)
        assert _equal(first, again), "applied again after undo(), the outputs differ from the first time"

    @capability("same_outputs")
    def test_computes_the_same(self, patch: Any, model: Any) -> None:
        """A patch changes how a model computes, never what."""
        before = self._outputs(model)
        patch.apply(model)
        patched = self._outputs(model)
        patch.undo(model)
        for old, new in zip(before, patched, strict=True):
            same = old.shape == new.shape and torch.allclose(old.float(), new.float(), rtol=self.tolerance, atol=self.tolerance)
            assert same, (
                "the patched model gives other outputs. Where rounding differs more, raise 'tolerance'; where it is meant so, "
                "say same_outputs = False and what changes"
            )

    # ------------------------------------------------------------------------------------------------ how

    def _outputs(self, model: Any) -> list[torch.Tensor]:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            found = self.outputs(model)
        return [t.detach().clone() for t in ([found] if isinstance(found, torch.Tensor) else found)]

    def _photo(self, model: Any) -> dict[str, Any]:
        """Place -> the object that was there; of tensors their bits too. It holds the objects: no id is used twice."""
        photo: dict[str, Any] = {}
        classes: dict[type, None] = {}
        if not isinstance(model, torch.nn.Module):
            photo |= {f"the model's {k}": v for k, v in vars(model).items()}
        for name, module in self.modules(model):
            where = f"module '{name}'" if name else "the outermost module"
            photo[f"the class of {where}"] = type(module)
            for key, value in vars(module).items():
                photo[f"{where}: {key}"] = _part(value)
            for kind in ("_parameters", "_buffers"):
                for key, tensor in vars(module)[kind].items():
                    if tensor is not None:
                        photo[f"{where}: the values of {key}"] = _Bits(tensor)
            classes |= dict.fromkeys(c for c in type(module).__mro__ if c not in _FOREIGN)
        for cls in classes:
            photo |= {f"class {cls.__qualname__}: {k}": v for k, v in vars(cls).items() if k not in _OWN}
            names = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
            photo |= {f"{cls.__module__}.{k}": v for k, v in names.items() if k not in _OWN}
        return photo


class _Bits:
    """A tensor's values and whether it is trained; equal bit for bit."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.values, self.trained = tensor.detach().clone(), tensor.requires_grad

    def same(self, other: Any) -> bool:
        """Whether the other holds the same bits."""
        mine, theirs = self.values, other.values
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype or self.trained != other.trained:
            return False
        return (
            torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
            if mine.dim()
            else (torch.equal(mine.nan_to_num(), theirs.nan_to_num()))
        )


class _Part(dict):  # type: ignore[type-arg]
    """A dict of a module (parameters, hooks, ...) as it was."""


def _part(value: Any) -> Any:
    return _Part(value) if isinstance(value, Mapping) else value


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Sentences of what differs."""
    found = [f"{place} is new" for place in after if place not in before]
    found += [f"{place} is gone" for place in before if place not in after]
    return found + [f"{place} is another" for place in before if place in after and not _is(before[place], after[place])]


def _is(one: Any, other: Any) -> bool:
    if isinstance(one, _Bits):
        return isinstance(other, _Bits) and one.same(other)
    if isinstance(one, _Part):
        return isinstance(other, _Part) and one.keys() == other.keys() and all(one[k] is other[k] for k in one)
    if isinstance(one, bool | int | float | str | None):
        return type(one) is type(other) and one == other
    return one is other


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _listed(sentences: list[str]) -> str:
    more = f", and {len(sentences) - 3} more" if len(sentences) > 3 else ""
    return ", ".join(sentences[:3]) + more
