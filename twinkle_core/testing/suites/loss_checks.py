"""Building a loss, and comparing two calls of it (L2)."""

from __future__ import annotations

import inspect
import math
import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import CannotBuild, MissingArgument, TwinkleError
from twinkle_core.isolation import attempt
from twinkle_core.testing.suites.base import Suite
from twinkle_core.testing.suites.loss_case import Case, number
from twinkle_core.testing.suites.outputs import needs_a_set
from twinkle_core.testing.suites.switches import put_back
from twinkle_core.testing.toys import random_rows
from twinkle_core.train import losses
from twinkle_core.types import InputFeature, LossOutput

#: of sums in another order: in float64, and for what computes in float32 whatever it is given
_FLOAT64, _FLOAT32 = (1e-9, 1e-10), (1e-4, 1e-5)
#: class of a loss -> what it held before the first call in this process
_AT_FIRST: dict[type, dict[str, bytes]] = {}


class LossChecks(Suite):
    """What all checks of losses share; see ``LossSuite``."""

    kind: ClassVar[str] = "loss"
    deterministic: ClassVar[bool] = True
    float64: ClassVar[bool] = True
    packing: ClassVar[bool] = True

    def build(self, **options: Any) -> Any:
        """A new loss; a plain function as training takes it."""
        built = super().build(**options)
        made = losses.FunctionLoss(built) if inspect.isfunction(built) else built
        needs_a_set(self, made)
        return made

    @pytest.fixture
    def loss(self) -> Any:
        """The loss to check."""
        return self.build()

    @pytest.fixture
    def subject(self, loss: Any) -> Any:
        """The same, by the name that all suites know it by."""
        return loss

    @pytest.fixture
    def rows(self) -> Sequence[InputFeature]:
        """Encoded rows."""
        return random_rows([5, 3, 7, 2, 4, 6])

    @pytest.fixture
    def loss_args(self) -> Mapping[str, Any]:
        """Keyword arguments of the call."""
        return {}

    @pytest.fixture(autouse=True)
    def _switches_stay(self) -> Iterator[None]:
        """For the next test; one is about them. And where torch's random numbers are is kept."""
        self._numbers = torch.get_rng_state()
        with put_back():
            yield

    @pytest.fixture(autouse=True)
    def _can_be_called(self, loss: Any, loss_args: Mapping[str, Any]) -> None:
        """With the arguments that are there; and what its class holds before the first call is kept."""
        kept_on_class(type(loss))
        if not isinstance(loss, Loss):
            name = type(loss).__name__
            why = f"it does not derive from twinkle_core.Loss. Write: class {name}(Loss)"
            raise self.unusable(CannotBuild.because(self.kind, name, why))
        name = losses.name_of(loss)
        try:
            losses.check_args(loss, loss_args)
        except MissingArgument:
            wanted = set(loss.required_args) | set(_without_default(loss))
            raise self.unusable(CannotBuild.at_each_call(name, sorted(wanted - set(loss_args)))) from None
        except TwinkleError as error:
            raise self.unusable(error) from None

    # ------------------------------------------------------------------------------------------------ how

    @property
    def tolerances(self) -> tuple[float, float]:
        """Relative and absolute."""
        return _FLOAT64 if self.float64 else _FLOAT32

    def _close(self, a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=self.tolerances[0], abs_tol=self.tolerances[1])

    def _hint(self, pairs: Sequence[tuple[float, float]]) -> str:
        """What numbers that are nearly the same, or of a loss that draws, are told."""
        if not torch.equal(self._numbers, torch.get_rng_state()):
            return "\n    It draws random numbers: where that is meant, say deterministic = False in its suite"
        near = self.float64 and all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6) for a, b in pairs)
        return "\n    They agree to float32's rounding: if it computes in float32, say float64 = False" if near else ""

    def _same(self, one: LossOutput, other: LossOutput, why: str) -> None:
        if not self.deterministic:
            pytest.skip("deterministic is off")
        pairs = [(number(one.sum), number(other.sum)), (number(one.weight), number(other.weight))]
        shown = f"sum {pairs[0][0]:.8g} and weight {pairs[1][0]:.8g}, against {pairs[0][1]:.8g} and {pairs[1][1]:.8g}"
        assert all(self._close(a, b) for a, b in pairs), f"{why}\n    {shown}{self._hint(pairs)}"

    def _assert_alike(self, one: Case, other: Case, why: str) -> None:
        """Sum, weight and gradients."""
        first, second = one.call(), other.call()
        self._same(first, second, why)
        rtol, atol = self.tolerances
        torch.testing.assert_close(
            one.gradient(first.sum), other.gradient(second.sum), msg=f"{why} (its gradients)", rtol=rtol, atol=atol
        )


def kept_on_class(cls: type) -> dict[str, bytes]:
    """What the classes of a loss hold, as it was at the first call of this function."""
    if cls not in _AT_FIRST:
        _AT_FIRST[cls] = held_by_class(cls)
    return _AT_FIRST[cls]


def has_graph(value: Any) -> bool:
    """Whether a tensor that was computed with a graph is in there."""
    if isinstance(value, Mapping):
        return any(map(has_graph, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return any(map(has_graph, value))
    if isinstance(value, LossOutput):
        return has_graph((value.sum, value.weight))
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def held_by_class(cls: type) -> dict[str, bytes]:
    """Data among the attributes of a class and its bases, as bytes to compare."""
    held = {}
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("builtins", "abc", "twinkle_core"):
            continue
        for name, value in vars(base).items():
            if not name.startswith("__") and not callable(value) and not inspect.isroutine(value):
                as_bytes = attempt(lambda value=value: pickle.dumps(value))  # type: ignore[misc]
                held[f"{base.__name__}.{name}"] = as_bytes.value or repr(value).encode()
    return held


def _without_default(loss: Loss) -> list[str]:
    target = loss.function if isinstance(loss, losses.FunctionLoss) else loss
    parameters = list(inspect.signature(target).parameters.values())[2:]
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
