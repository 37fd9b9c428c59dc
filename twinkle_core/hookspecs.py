"""The hooks: what many plugins may answer or watch (L0). Things asked for by name are entry points instead.

A distribution names its hook module in its metadata, and the module marks functions::

    [project.entry-points."twinkle.plugins"]
    acme = "acme_losses.hooks"

    from twinkle_core import hookimpl

    @hookimpl
    def twinkle_after_step(result):  # any subset of the parameters
        ...

Or an object of this process listens for a while: ``with plugins.listening(listener): ...``.

A hook that raises is one warning; training goes on, and the other listeners are told. Hooks of training are called on each
rank, by the thread that called the verb and before the verb returns: a listener that is slow makes training slow, and one that
waits for another thread's verb on the same model waits for ever. Who writes files does so where ``settings.rank()`` is 0.
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
    """Add commands: ``subparsers.add_parser(...).set_defaults(run=function)``, where ``function(args) -> int``.

    Called where a command is asked for that is not twinkle's own, and for the help.
    """


@hookspec
def twinkle_components(kind: str) -> Mapping[str, Any] | None:
    """Components whose names are known only at run time: name -> class or ``"module:Class"``. Asked after the entry points."""


@hookspec(firstresult=True)
def twinkle_resolve(kind: str, name: str) -> Any:
    """A component for a name that nobody else knows; None to pass. Asked last."""


@hookspec
def twinkle_model_created(model: TwinkleModel) -> None:
    """A model's verbs are ready. Called at the end of ``SessionModel``'s constructor, which a backend calls last in its own."""


@hookspec
def twinkle_before_step(session: Session) -> None:
    """A window is about to close: gradients are complete, weights unchanged.

    Complete: divided, summed over ranks, and clipped if that was asked for before ``step``. Called also where they are not
    finite and the update will be skipped; not where nothing was labelled, because there is no step.

    A listener may change ``grad`` of parameters in place, alike on all ranks and to finite values; the optimizer sees what it
    leaves. ``grad_norm`` was measured before. What a listener changed before it raised stays changed.
    """


@hookspec
def twinkle_after_step(session: Session, result: StepResult) -> None:
    """A window closed; ``result.acted`` says whether weights changed. Once for each window, whichever verb closed it.

    After ``clip_grad_and_step`` and ``flush`` gradients are cleared and the scheduler has moved; after ``step`` alone not yet.
    A window that is dropped (``zero_grad`` instead of a step, ``load``, gradients that raise) is not closed: nobody is told.
    """


@hookspec
def twinkle_metrics_logged(step: int, metrics: Mapping[str, float], session: Session, is_training: bool) -> None:
    """Metrics were reduced over ranks and read by ``calculate_metric``, at optimizer update ``step`` of the session.

    ``metrics`` can't be changed, and is empty where nothing was gathered. ``is_training``: of training, or of evaluation
    (``forward_only``).
    """


@hookspec
def twinkle_checkpoint_saved(path: str, session: Session) -> None:
    """``save`` left a checkpoint whole on disk."""


@hookspec
def twinkle_checkpoint_loaded(path: str, session: Session) -> None:
    """``load`` or ``resume_from_checkpoint`` put a checkpoint's state in place."""


@hookspec
def twinkle_shutdown() -> None:
    """The process ends, and the interpreter is still whole; or this listener alone is unregistered. Close what is open."""


#: the names of all hooks
NAMES = tuple(name for name in dir() if name.startswith("twinkle_"))
