"""Faults of patches, each caught by the test that is about it."""

from __future__ import annotations

import copy
import os
import sys
import types
import warnings

import pytest
import torch

from twinkle_core import Patch
from twinkle_core.testing import PatchSuite
from twinkle_core.testing.toys import TinyLM


class Right(Patch):
    """Wraps the forward of the layer norm."""

    def __init__(self):
        self.wrapped = []

    def norm(self, model):
        return model.module.norm

    def apply(self, model):
        norm = self.norm(model)
        if norm not in self.wrapped:
            norm.forward = types.MethodType(wrapper, norm)
            self.wrapped.append(norm)

    def undo(self, model):
        while self.wrapped:
            del self.wrapped.pop().forward


def wrapper(self, x):
    return torch.nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class LeavesMethod(Right):
    """Sets the method back on the object, where it was its class's."""

    def undo(self, model):
        while self.wrapped:
            norm = self.wrapped.pop()
            norm.forward = types.MethodType(torch.nn.LayerNorm.forward, norm)


class LeavesClassMethod(Right):
    """Patches the class, and undoes the object."""

    def apply(self, model):
        super().apply(model)
        TinyLM.generate = lambda self: None
        PLANTED.append((TinyLM, "generate"))


class LeavesFunction(Right):
    """Replaces a function of the module that the model's code is in."""

    def apply(self, model):
        super().apply(model)
        sys.modules[TinyLM.__module__].fast_path = wrapper
        PLANTED.append((sys.modules[TinyLM.__module__], "fast_path"))


class LeavesAttribute(Right):
    def apply(self, model):
        super().apply(model)
        model.module.norm.fused = True


class LeavesHook(Right):
    def apply(self, model):
        super().apply(model)
        if not model.module.norm._forward_hooks:
            model.module.norm.register_forward_hook(lambda module, args, output: output)


class LeavesWeights(Right):
    """Rounds a weight on its way."""

    def apply(self, model):
        super().apply(model)
        with torch.no_grad():
            model.module.norm.bias.add_(1e-7)


class FreezesWeights(Right):
    def apply(self, model):
        super().apply(model)
        model.module.embed.weight.requires_grad_(False)


class LeavesOnModel(Right):
    def apply(self, model):
        super().apply(model)
        model.patched_by = type(self).__name__


class Caches(Right):
    """What its forward builds stays."""

    def apply(self, model):
        super().apply(model)
        norm = model.module.norm

        def forward(x):
            norm.cache = x.detach()
            return wrapper(norm, x)

        norm.forward = forward


class Twice(Right):
    """Wraps whatever it finds, and each time a little is added."""

    def apply(self, model):
        norm = self.norm(model)
        found = norm.forward
        norm.forward = lambda x: found(x) + 1e-6
        self.wrapped.append(norm)

    def undo(self, model):
        del self.wrapped.pop().forward
        self.wrapped.clear()


class TwiceDeep(Right):
    """Remembers what it found: the second time, its own wrapper."""

    def apply(self, model):
        norm = self.norm(model)
        self.before = vars(norm).get("forward")
        norm.forward = types.MethodType(wrapper, norm)

    def undo(self, model):
        norm = self.norm(model)
        del norm.forward
        if self.before is not None:
            norm.forward = self.before


class OnlyOnce(Right):
    """Never applies again."""

    done = False

    def apply(self, model):
        if not self.done:
            self.done = True
            norm = self.norm(model)
            norm.forward = lambda x: wrapper(norm, x) * (1 + 1e-6)
            self.wrapped.append(norm)


class ChangesWhat(Right):
    def apply(self, model):
        norm = self.norm(model)
        if norm not in self.wrapped:
            norm.forward = lambda x: 2 * x
            self.wrapped.append(norm)


class Nothing(Right):
    def apply(self, model):
        """For another model."""


class Wraps(Right):
    """Its forward is another around the right one."""

    def around(self, norm, x):
        return wrapper(norm, x)

    def apply(self, model):
        norm = self.norm(model)
        if norm not in self.wrapped:
            norm.forward = lambda x: self.around(norm, x)
            self.wrapped.append(norm)


class Detaches(Wraps):
    def around(self, norm, x):
        return wrapper(norm, x.detach())


class DoublesGradients(Wraps):
    def around(self, norm, x):
        return wrapper(norm, 2 * x - x.detach())


class HasNoBackward(Wraps):
    def around(self, norm, x):
        if torch.is_grad_enabled():
            raise RuntimeError("the kernel has no backward")
        return wrapper(norm, x)


class LeavesGradientHook(Right):
    def apply(self, model):
        super().apply(model)
        if not model.module.norm.weight._backward_hooks:
            model.module.norm.weight.register_hook(lambda g: g * 0.5)


class LeavesOnParameter(Right):
    def apply(self, model):
        super().apply(model)
        model.module.norm.weight.tagged = True


class LeavesOnEngine(Right):
    def apply(self, model):
        super().apply(model)
        model.engine.fused = True


class LeavesInTorch(Right):
    """Replaces a function of torch's."""

    def apply(self, model):
        super().apply(model)
        functions = vars(torch.nn.functional)
        if "silu_found" not in PUT_BACK:
            PUT_BACK["silu_found"] = found = functions["silu"]
            torch.nn.functional.silu = lambda *args, **kwargs: found(*args, **kwargs)


class LeavesGlobalHook(Right):
    def apply(self, model):
        super().apply(model)
        if "hook" not in PUT_BACK:
            PUT_BACK["hook"] = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)


class LeavesSwitch(Right):
    def apply(self, model):
        super().apply(model)
        torch.backends.cudnn.benchmark = True


class LeavesVariable(Right):
    def apply(self, model):
        super().apply(model)
        os.environ["PLANTED"] = "1"


class DropsGradients(Right):
    def apply(self, model):
        super().apply(model)
        model.module.zero_grad()


class Trains(Right):
    def undo(self, model):
        super().undo(model)
        model.module.train()


class UndoOnce(Right):
    def undo(self, model):
        del self.wrapped.pop().forward


class OutputsInDouble(Right):
    """Of the outermost layer."""

    def norm(self, model):
        return model.module.output_layer

    def apply(self, model):
        layer = self.norm(model)
        if layer not in self.wrapped:
            layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight, layer.bias).double()
            self.wrapped.append(layer)


class HooksInEvaluation(Right):
    """Leaves a hook where the model does not train."""

    def undo(self, model):
        super().undo(model)
        if not model.module.training:
            model.module.register_forward_hook(lambda *args: None)


class HalfWay(Right):
    """Changes something, and then finds that there is no norm."""

    def apply(self, model):
        model.module.touched = not self.wrapped
        super().apply(model)

    def undo(self, model):
        super().undo(model)
        vars(model.module).pop("touched", None)


PUT_BACK: dict = {}
PLANTED: list = []


@pytest.fixture(autouse=True)
def _uproot():
    """What planted patches leave on classes and modules of this process."""
    PLANTED.clear()
    PUT_BACK.clear()
    yield
    if "silu_found" in PUT_BACK:
        torch.nn.functional.silu = PUT_BACK["silu_found"]
    if "hook" in PUT_BACK:
        PUT_BACK["hook"].remove()
    torch.backends.cudnn.benchmark = False
    os.environ.pop("PLANTED", None)
    for owner, name in PLANTED:
        if name in vars(owner):
            delattr(owner, name)


class Norm(torch.nn.Module):
    def __init__(self, found):
        super().__init__()
        self.weight, self.bias, self.eps, self.normalized_shape = found.weight, found.bias, found.eps, found.normalized_shape

    def forward(self, x):
        return wrapper(self, x)


class Replaces(Patch):
    """The module itself, by one that has its parameters."""

    def __init__(self):
        self.found = None

    def made(self, norm):
        return Norm(norm)

    def apply(self, model):
        if self.found is None and isinstance(getattr(model.module, "norm", None), torch.nn.LayerNorm):
            self.found = model.module.norm
            model.module.norm = self.made(self.found)

    def undo(self, model):
        if self.found is not None:
            model.module.norm, self.found = self.found, None


class CopiesWeights(Replaces):
    """What is trained while it is applied, its undo forgets."""

    def made(self, norm):
        return Norm(copy.deepcopy(norm))


class RenamesWeights(Replaces):
    """The patched model's checkpoints fit no model without the patch."""

    def made(self, norm):
        return torch.nn.Sequential(norm)


class FirstShapeCounts(Replaces):
    """What is made for the first batch is taken for all."""

    def made(self, norm):
        module, kept = Norm(norm), []

        def forward(x):
            kept.append(torch.ones_like(x))
            return wrapper(module, x) * kept[0]

        module.forward = forward
        return module


class OneModelOnly(Replaces):
    """Its class says that it is applied."""

    applied = False

    def apply(self, model):
        if not OneModelOnly.applied:
            super().apply(model)
            OneModelOnly.applied = True

    def undo(self, model):
        super().undo(model)
        OneModelOnly.applied = False


class TrainsAll(Replaces):
    """Unfreezes what was frozen."""

    def apply(self, model):
        super().apply(model)
        model.module.requires_grad_(True)


class SeedsTorch(Replaces):
    """For a start that is the same each time."""

    def made(self, norm):
        torch.manual_seed(0)
        return Norm(norm)


class Silences(Replaces):
    """Takes warnings away for ever."""

    def apply(self, model):
        warnings.filterwarnings("ignore", category=ImportWarning)
        super().apply(model)


ATTRIBUTES, USED, TWICE = (
    "test_undo_restores_attributes_and_methods",
    "test_undo_after_use_leaves_nothing",
    "test_twice_is_once",
)
SECOND, PARAMETERS = "test_a_second_model_is_patched_too", "test_parameters_are_the_same"
GRADIENTS, UNDONE = "test_gradients_are_the_same", "test_undo_without_apply_does_nothing"
EVALUATED = "test_undo_in_evaluation_mode_leaves_nothing"
LEFT = {ATTRIBUTES, USED, TWICE, EVALUATED}


@pytest.mark.parametrize("patch", [Right, Replaces])
def test_the_right_one_passes(caught, patch):
    assert caught(PatchSuite, patch) == set(), caught.texts
    assert not caught.left_out


@pytest.mark.parametrize(
    ("patch", "tests", "says"),
    [
        (LeavesMethod, LEFT, "module 'norm': forward is new"),
        (LeavesAttribute, LEFT, "module 'norm': fused is new"),
        (LeavesHook, LEFT, "module 'norm': _forward_hooks is another"),
        (FreezesWeights, {*LEFT, GRADIENTS}, "module 'embed': the values of weight is another"),
        (LeavesOnModel, LEFT, "the model's patched_by is new"),
        (LeavesOnEngine, LEFT, "the engine's fused is new"),
        (LeavesOnParameter, LEFT, "module 'norm': weight.tagged is new"),
        (LeavesGradientHook, {*LEFT, GRADIENTS}, "module 'norm': hooks of weight is another"),
    ],
)
def test_what_is_left_behind_is_named(caught, patch, tests, says):
    assert caught(PatchSuite, patch) == tests, caught.texts
    assert says in caught.texts[ATTRIBUTES]


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (LeavesClassMethod, "class TinyLM: generate is new"),
        (LeavesFunction, "twinkle_core.testing.toys.fast_path is new"),
        (LeavesInTorch, "torch.nn.functional.silu is another"),
        (LeavesGlobalHook, "of all modules: _global_forward_hooks is another"),
        (LeavesSwitch, "torch.backends.cudnn.benchmark is another"),
        (LeavesVariable, "the variable PLANTED is new"),
    ],
)
def test_what_is_left_on_classes_and_modules_is_named(caught, patch, says):
    """It is there for all later tests too, so the first one names it."""
    tests = caught(PatchSuite, patch)
    assert ATTRIBUTES in tests and tests <= LEFT
    assert says in caught.texts[ATTRIBUTES]


@pytest.mark.parametrize(
    ("patch", "tests"),
    [
        (Caches, {USED, TWICE}),
        (Twice, {TWICE, UNDONE}),
        (TwiceDeep, {TWICE, UNDONE}),
        (OnlyOnce, {"test_can_be_applied_again"}),
        (ChangesWhat, {"test_computes_the_same", GRADIENTS}),
        (Nothing, {"test_changes_something", SECOND}),
        (Detaches, {GRADIENTS}),
        (DoublesGradients, {GRADIENTS}),
        (HasNoBackward, {GRADIENTS}),
        (DropsGradients, {"test_flags_stay"}),
        (Trains, {"test_flags_stay", EVALUATED}),
        (UndoOnce, {UNDONE}),
        (OutputsInDouble, {"test_computes_the_same"}),
        (HooksInEvaluation, {EVALUATED}),
        (CopiesWeights, {PARAMETERS}),
        (RenamesWeights, {PARAMETERS, GRADIENTS}),
        (OneModelOnly, {SECOND}),
        (TrainsAll, {"test_frozen_weights_stay_frozen"}),
        (SeedsTorch, {"test_random_numbers_go_on"}),
        (Silences, {*LEFT, "test_what_it_is_not_for_is_left_alone"}),
        (HalfWay, {"test_what_it_is_not_for_is_left_alone"}),
    ],
)
def test_a_fault_is_caught_by_the_tests_about_it(caught, patch, tests):
    assert caught(PatchSuite, patch) == tests, caught.texts


def test_a_patch_that_keeps_the_first_shape_is_caught(caught):
    tests = caught(PatchSuite, FirstShapeCounts)
    assert tests >= {"test_computes_the_same", GRADIENTS} and ATTRIBUTES not in tests


def test_weights_that_are_changed_are_caught(caught):
    tests = caught(PatchSuite, LeavesWeights)
    assert tests >= {*LEFT, "test_undo_restores_outputs"}
    assert "module 'norm': the values of bias is another" in caught.texts[ATTRIBUTES]
