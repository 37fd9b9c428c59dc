"""Suites of the kinds whose contract is short (L2)."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pytest
import torch

from twinkle_core.testing.suites.base import Checks, Suite


class OptimizerSuite(Checks):
    """Checks of an optimizer: a class, or a function that makes one of parameters."""

    kind: ClassVar[str] = "optimizer"

    def test_updates_weights(self) -> None:
        """Made of parameters alone (and ``arguments``), it moves them against their gradient, and has a state to save."""
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = type(self).component([weight], **self.arguments)
        weight.grad = torch.ones(3)
        optimizer.step()
        moved = weight.detach()
        assert bool(moved.isfinite().all() and (moved < 1).all()), (
            f"a step against gradient 1 took weights from 1 to {moved.tolist()}"
        )
        optimizer.load_state_dict(optimizer.state_dict())


class SchedulerSuite(Checks):
    """Checks of a learning rate scheduler: a class, or a function that makes one of an optimizer."""

    kind: ClassVar[str] = "scheduler"

    def test_follows_an_optimizer(self) -> None:
        """Its first parameter is the optimizer; a step leaves a rate that is a number, and there is a state to save."""
        component = type(self).component
        parameters = list(inspect.signature(component).parameters.values())
        assert parameters, "it takes no parameter: the first one is the optimizer"
        open_ = [p.name for p in parameters[1:] if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        missing = [name for name in open_ if name not in self.arguments]
        if missing:
            pytest.skip(f"it needs {', '.join(missing)}; give 'arguments' in a suite")
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = component(optimizer, **self.arguments)
        optimizer.step()
        scheduler.step()
        rate = float(optimizer.param_groups[0]["lr"])
        assert 0 <= rate < float("inf"), f"after a step the learning rate is {rate}"
        scheduler.load_state_dict(scheduler.state_dict())


class RuntimeSuite(Suite):
    """Checks of a runtime: that it is one."""

    kind: ClassVar[str] = "runtime"

    @pytest.fixture
    def runtime(self) -> Any:
        """The runtime to check. It is not started."""
        return self.build()


class PreprocessorSuite(Checks):
    """Checks of a preprocessor: a function of a row, or a class whose objects are called with one."""

    kind: ClassVar[str] = "preprocessor"

    def test_can_be_called(self) -> None:
        """It, or an object of it, takes a row."""
        component = type(self).component
        call = component.__call__ if inspect.isclass(component) and "__call__" in dir(component) else component
        assert callable(component) and not (inspect.isclass(component) and not inspect.isfunction(component.__call__)), (
            f"{getattr(component, '__name__', component)!s} can't be called with a row: write __call__(self, row)"
        )
        assert inspect.signature(call).parameters, "it takes no row"
