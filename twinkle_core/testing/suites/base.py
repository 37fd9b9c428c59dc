"""What all compliance suites share: building the component, capabilities, and failures that are expected (L2)."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import pytest

from twinkle_core import loading
from twinkle_core.errors import CannotBuild, TwinkleError
from twinkle_core.isolation import attempt
from twinkle_core.names import CONTRACTS
from twinkle_core.testing.suites.options import check_options

F = TypeVar("F", bound=Callable[..., Any])


def capability(flag: str) -> Callable[[F], F]:
    """Mark a test that runs only where the suite's class attribute ``flag`` is true."""

    def mark(function: F) -> F:
        function.capability = flag  # type: ignore[attr-defined]
        return function

    return mark


class Checks:
    """Checks of one component, to subclass in a test file::

        class TestFocal(LossSuite):
            component = FocalLoss
            arguments = {"gamma": 2.0}

    or, where building it takes more than that, with the fixture that has the kind's name::

        class TestFocal(LossSuite):
            @pytest.fixture
            def loss(self):
                return FocalLoss(gamma=2.0)

    ``twinkle check`` needs no test file: it builds a component without arguments. Where that can't do, or other fixtures are
    needed, the distribution names the subclass in its metadata, and tests and command use the same one::

        [project.entry-points."twinkle.testing"]
        "losses.focal" = "acme_losses.testing:FocalSuite"

    Class attributes:

    * ``component``, ``arguments``: the class and the keyword arguments of its constructor.
    * ``expected_failures``: test -> the reason why this component does not pass it. Strict: where it passes after all, that is
      a failure, so that no reason outlives its cause.
    * capabilities: flags that a suite names in its own text. What a component says it can't do is not tested.

    Raises (when a subclass is made):
        BadSuite: an attribute is a misspelt option, or a value is not of the option's kind.
        UnknownCheck: ``expected_failures`` names a test that the suite does not have.
    """

    kind: ClassVar[str] = ""
    component: ClassVar[Any] = None
    arguments: ClassVar[Mapping[str, Any]] = {}
    expected_failures: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_options(cls)

    def given(self) -> Mapping[str, Any]:
        """The keyword arguments of the constructor where a test asks for nothing else."""
        return self.arguments

    def build(self, **options: Any) -> Any:
        """A new component: ``component(**arguments, **options)``.

        Raises:
            CannotBuild: there is no ``component``, it leaves methods of its contract open, needs arguments, or its constructor
                raises.
        """
        name, component = type(self).__name__, type(self).component  # of the class: a function is no method of this one
        if component is None:
            why = f"{name} has neither a 'component' nor a fixture '{self.kind}' of its own"
            raise self.unusable(CannotBuild.because(self.kind, name, why))
        if not inspect.isclass(component):
            return component
        name = component.__name__
        lacks = loading.lacking(component, _contract(self.kind))
        if lacks:
            why = f"it leaves {', '.join(lacks)} of its contract open"
            raise self.unusable(CannotBuild.because(self.kind, name, why))
        given = {**self.given(), **options}
        try:
            inspect.signature(component).bind(**given)
        except TypeError as cause:
            lacking = CannotBuild.without(self.kind, name, str(cause))
            raise (lacking if options else self.unusable(lacking)) from None
        if options:  # what one test asks for; others may go on
            return component(**given)
        built = attempt(lambda: component(**given))
        if built.error is not None:
            why = f"its constructor raises {built.why}{_place(built.error)}"
            raise self.unusable(CannotBuild.because(self.kind, name, why)) from built.error
        return built.value

    def unusable(self, error: TwinkleError) -> TwinkleError:
        """Give back an error after which there is nothing to check: it is told once, and other tests are left out."""
        type(self)._unusable = True  # type: ignore[attr-defined]  # of this class alone: subclasses build otherwise
        return error

    @pytest.fixture(autouse=True)
    def _as_declared(self, request: pytest.FixtureRequest) -> None:
        """Leave out what the component says it can't do, and expect what it says will fail."""
        if "_unusable" in vars(type(self)):
            pytest.skip("there is nothing to check, as another test says")
        flag = getattr(request.function, "capability", "")
        if flag and not getattr(self, flag):
            pytest.skip(f"{flag} is off")
        reason = self.expected_failures.get(request.function.__name__)
        if reason is not None:
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))


class Suite(Checks):
    """Checks of a component whose kind has a contract; what it has in common with other suites is told in :class:`Checks`."""

    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> Any:
        """What the kind's own fixture gives."""
        return request.getfixturevalue(self.kind)

    def test_keeps_its_contract(self, subject: Any) -> None:
        """It derives from the contract's class, so that what the contract gains later reaches it too."""
        contract = _contract(self.kind)
        assert isinstance(subject, contract), (
            f"{type(subject).__name__} does not derive from twinkle_core.{contract.__name__}. "
            f"Write: class {type(subject).__name__}({contract.__name__})"
        )


def _place(error: BaseException) -> str:
    """Where it was raised, in the component's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"\n    raised at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _contract(kind: str) -> type:
    module, name = CONTRACTS.get(kind, ("builtins", "object"))
    return getattr(import_module(module), name)  # type: ignore[no-any-return]
