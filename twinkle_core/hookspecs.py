"""The hooks: what many plugins may answer or watch (L0). Things asked for by name are entry points instead.

A distribution names its hook module in its metadata, and the module marks functions::

    [project.entry-points."twinkle.plugins"]
    acme = "acme_losses.hooks"

    from twinkle_core import hookimpl

    @hookimpl
    def twinkle_after_step(result):  # any subset of the parameters
        ...

A hook that raises is one warning; training goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import argparse

    from twinkle_core.contracts.metric import StepResult
    from twinkle_core.contracts.model import TwinkleModel
    from twinkle_core.train.session import Session

PROJECT = "twinkle"
hookspec = pluggy.HookspecMarker(PROJECT)
#: marks a function as an implementation of the hook of its name
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def twinkle_configure(config: Any) -> None:
    """A configuration was read and checked, nothing is built yet. Not called where no configuration file is used."""


@hookspec
def twinkle_report_header() -> str | list[str] | None:
    """Lines for ``twinkle doctor``."""


@hookspec
def twinkle_register_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add commands: ``subparsers.add_parser(...).set_defaults(run=function)``, where ``function(args) -> int``."""


@hookspec
def twinkle_components(kind: str) -> Mapping[str, Any] | None:
    """Components whose names are known only at run time: name -> class or ``"module:Class"``. Asked after the entry points."""


@hookspec(firstresult=True)
def twinkle_resolve(kind: str, name: str) -> Any:
    """A component for a name that nobody else knows; None to pass. Asked last."""


@hookspec
def twinkle_model_created(model: TwinkleModel) -> None:
    """A model was constructed."""


@hookspec
def twinkle_before_step(session: Session) -> None:
    """A window is about to close: gradients are complete, weights unchanged."""


@hookspec
def twinkle_after_step(session: Session, result: StepResult) -> None:
    """A window closed."""


@hookspec
def twinkle_metrics_logged(step: int, metrics: Mapping[str, float]) -> None:
    """Metrics were reduced over ranks and read, at optimizer update ``step``."""


@hookspec
def twinkle_checkpoint_saved(path: str, session: Session) -> None:
    """A checkpoint is whole on disk."""


@hookspec
def twinkle_checkpoint_loaded(path: str, session: Session) -> None:
    """A checkpoint's state is in place."""


@hookspec
def twinkle_shutdown() -> None:
    """The process ends; the interpreter is still whole."""


#: the names of all hooks
NAMES = tuple(name for name in dir() if name.startswith("twinkle_"))
