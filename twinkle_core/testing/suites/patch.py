"""The compliance suite of patches (L2)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from twinkle_core import settings
from twinkle_core.isolation import attempt
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.engines import ToyEngine
from twinkle_core.testing.suites.base import capability
from twinkle_core.testing.suites.outputs import tiny_lm
from twinkle_core.testing.suites.patch_use import PatchUse, listed
from twinkle_core.testing.suites.switches import switches
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
        module = tiny_lm(torch.float32)
        super().__init__(ToyEngine(module), SingleAdapter(module))


class PatchSuite(PatchUse):
    """Checks of a Patch: it goes without a trace.

    Compared are, of each module of the model: its attributes, parameters, buffers, hooks and class; the attributes of its
    classes; the names in the Python modules where these are written; torch's functions and switches, hooks of all modules
    and the environment; and outputs, bit for bit. Gradients are compared as outputs are.

    Fixtures and methods to override:

    * ``patch``: the object.
    * ``model``: what it is applied to; by default a twinkle model over two small layers. Give one that the patch is for.
    * ``modules(model)``: the torch modules of the model.
    * ``outputs(model)``: a tensor, or several, that the model computes. ``training_outputs(model)``: the same with a graph.

    Capabilities:

    * ``same_outputs``: the patch changes how the model computes and not what, as the contract says; compared with
      ``tolerance``.
    """

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

    def outputs(self, model: Any) -> Any:
        """What the model computes for a batch of three rows and a longer one of two; a tensor or several."""
        batches = _batches()
        if isinstance(model, torch.nn.Module):
            return [model(inputs) for inputs in batches]
        return [model.forward_only(inputs, return_logits=True)["logits"] for inputs in batches]

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
        assert not left, f"after apply(), a forward and undo(), {listed(left)}"

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
            f"after apply(), apply(), undo(), {listed(left)}: the second apply() took the patched model for the original"
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
            assert old.dtype == new.dtype, f"the patched model's outputs are {new.dtype}, and were {old.dtype}"
            same = old.shape == new.shape and torch.allclose(old, new, rtol=self.tolerance, atol=self.tolerance)
            assert same, (
                "the patched model gives other outputs. Where rounding differs more, raise 'tolerance'; where it is meant so, "
                "say same_outputs = False and what changes"
            )

    @capability("same_outputs")
    def test_gradients_are_the_same(self, patch: Any, model: Any) -> None:
        """What the model learns is not changed either, and after ``undo`` it is so bit for bit."""
        before = self._gradients(model)
        patch.apply(model)
        got = attempt(lambda: self._gradients(model))
        patch.undo(model)
        assert got.value is not None, f"a backward through the patched model fails: {got.why}"
        for name, old in before.items():
            new = got.value.get(name)
            scale = float(old.abs().max()) or 1.0
            assert new is not None and torch.allclose(new, old, rtol=self.tolerance, atol=self.tolerance * scale), (
                f"the patched model gives {name} {'another gradient' if new is not None else 'no gradient'}: a patch keeps "
                "gradients as it keeps outputs"
            )
        more = sorted(got.value.keys() - before.keys())
        assert not more, f"the patched model gives {more[0]} a gradient, and without the patch it has none"
        again = self._gradients(model)
        other = [name for name, old in before.items() if name not in again or not torch.equal(old, again[name])]
        assert not other, f"after undo() the gradient of {other[0]} is another than before apply(): a hook was left"

    def test_undo_without_apply_does_nothing(self, patch: Any, model: Any) -> None:
        """Before ``apply``, and a second time after it."""
        for way in ("before apply()", "a second time"):
            if way == "a second time":
                patch.apply(model)
                patch.undo(model)
            before = self._photo(model)
            got = attempt(lambda: patch.undo(model))
            assert got.error is None, f"undo() {way} fails: {got.why}. Where there is nothing to put back, it does nothing"
            left = _differences(before, self._photo(model))
            assert not left, f"undo() {way} changes the model: {listed(left)}"

    def test_flags_stay(self, patch: Any, model: Any) -> None:
        """Modules in evaluation mode and gradients that are there stay so, through ``apply`` and ``undo``."""
        modules = [module for _, module in self.modules(model)]
        modules[-1].eval()
        parameters = list(modules[0].parameters())
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        patch.apply(model)
        patch.undo(model)
        assert not modules[-1].training, "undo() leaves a module in training mode that was found in evaluation mode"
        assert all(p.grad is not None and bool((p.grad == 1).all()) for p in parameters), (
            "apply() or undo() drops gradients that were there: it may be called within a window"
        )
        for parameter in parameters:
            parameter.grad = None

    def test_undo_in_evaluation_mode_leaves_nothing(self, patch: Any, model: Any) -> None:
        """A model that is only asked, too."""
        for _, module in self.modules(model):
            module.eval()
        before = self._photo(model)
        patch.apply(model)
        patch.undo(model)
        left = _differences(before, self._photo(model))
        assert not left, f"of a model in evaluation mode, after undo() {listed(left)}"

    def test_what_it_is_not_for_is_left_alone(self, patch: Any, model: Any) -> None:
        """A network of one linear layer: an error before anything is changed, or nothing that undo() does not put back."""
        network = torch.nn.Sequential(torch.nn.Linear(2, 2))
        other = network if isinstance(model, torch.nn.Module) else SessionModel(ToyEngine(network), SingleAdapter(network))
        before = self._photo(other, network.named_modules())
        got = attempt(lambda: patch.apply(other))
        if got.error is None:
            patch.undo(other)
        left = _differences(before, self._photo(other, network.named_modules()))
        assert not left, (
            f"on a model that it is not for, apply() {'fails' if got.error else 'and undo() go through'}, and then "
            f"{listed(left)}. Look for all that is to be changed before changing anything"
        )

    # ------------------------------------------------------------------------------------------------ how

    def training_outputs(self, model: Any) -> Any:
        """As ``outputs``, with a graph: a tensor or several."""
        if isinstance(model, torch.nn.Module):
            return self.outputs(model)
        return [model.forward(inputs, return_logits=True)["logits"] for inputs in _batches()]

    def _gradients(self, model: Any) -> dict[str, torch.Tensor]:
        """Of a weighted sum of the outputs, by the parameter's name. What is in ``grad`` stays."""
        (_, network), *_ = self.modules(model)
        named = {name: p for name, p in network.named_parameters() if p.requires_grad}
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            found = self.training_outputs(model)
            tensors = [t for t in ([found] if isinstance(found, torch.Tensor) else found) if t.requires_grad]
            loss = sum(
                ((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in tensors), torch.zeros(())
            )
            if not tensors:
                return {}
            given = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {name: g for name, g in zip(named, given, strict=True) if g is not None}

    def _outputs(self, model: Any) -> list[torch.Tensor]:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            found = self.outputs(model)
        return [t.detach().clone() for t in ([found] if isinstance(found, torch.Tensor) else found)]

    def _differences(self, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        return _differences(before, after)

    def _photo(self, model: Any, modules: Any = None) -> dict[str, Any]:
        """Place -> the object that was there; of tensors their bits too. It holds the objects: no id is used twice."""
        photo: dict[str, Any] = {}
        classes: dict[type, None] = {}
        photo |= _world()
        if not isinstance(model, torch.nn.Module):
            if (engine := getattr(model, "engine", None)) is not None and hasattr(engine, "__dict__"):
                photo |= {f"the engine's {k}": v for k, v in vars(engine).items()}
            photo |= {f"the model's {k}": v for k, v in vars(model).items()}
        for name, module in self.modules(model) if modules is None else modules:
            where = f"module '{name}'" if name else "the outermost module"
            photo[f"the class of {where}"] = type(module)
            for key, value in vars(module).items():
                photo[f"{where}: {key}"] = _part(value)
                if type(value).__module__ != "builtins" and not isinstance(value, torch.nn.Module | torch.Tensor):
                    inside = getattr(value, "__dict__", None) or {}
                    photo |= {f"{where}: {key}.{k}": _frozen(v) for k, v in inside.items()}
            for kind in ("_parameters", "_buffers"):
                for key, tensor in vars(module)[kind].items():
                    if tensor is not None:
                        photo[f"{where}: the values of {key}"] = _Bits(tensor)
                        photo |= {f"{where}: {key}.{k}": v for k, v in vars(tensor).items()}
                        photo[f"{where}: hooks of {key}"] = len(tensor._backward_hooks or ())
            classes |= dict.fromkeys(c for c in type(module).__mro__ if c not in _FOREIGN)
        for cls in classes:
            photo |= {f"class {cls.__qualname__}: {k}": v for k, v in vars(cls).items() if k not in _OWN}
            names = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
            photo |= {f"{cls.__module__}.{k}": v for k, v in names.items() if k not in _OWN}
        return photo


def _batches() -> list[Any]:
    """Of different shapes, as they are in training: what a kernel keeps of the first must not meet the second."""
    return [InputProcessor().collate(random_rows(lengths)) for lengths in ([3, 5, 2], [8, 6])]


def _world() -> dict[str, Any]:
    """What is there for the whole process: functions of torch, hooks of all modules, switches, the environment."""
    photo: dict[str, Any] = {}
    for place in (torch, torch.nn.functional, torch.nn, torch.Tensor):
        photo |= {f"{place.__name__}.{k}": v for k, v in list(vars(place).items()) if callable(v)}
    for key, value in vars(torch.nn.modules.module).items():
        if key.startswith("_global_") and isinstance(value, Mapping):
            photo[f"of all modules: {key}"] = _part(dict(value))
    photo |= switches()
    ours = {key: value for key, value in settings.environment().items() if not key.startswith("PYTEST_")}
    return photo | {f"the variable {key}": value for key, value in ours.items()}


def _frozen(value: Any) -> Any:
    """Plain data by what it holds, anything else itself."""
    return repr(value) if isinstance(value, dict | list | tuple | set) else value


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
