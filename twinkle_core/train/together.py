"""Ranks that do something together, of which each can fail alone, or be somewhere else (L2).

Ranks meet in a verb at its first message to one another, and tell which verb it is. So ranks whose programs have come apart all
say so, where else each would take the other's message for its own, or wait.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from twinkle_core.contracts.engine import Engine
from twinkle_core.errors import FailedElsewhere, RankLeft, RanksApart, TwinkleError
from twinkle_core.errors.adapters import whose
from twinkle_core.isolation import describe
from twinkle_core.mesh import DeviceMesh
from twinkle_core.train import leaving

T = TypeVar("T")
#: what a rank raises of another one: of its number and of what it said
Failure = Callable[[int, str], Exception]


@dataclass(slots=True)
class Calling:
    """A verb that runs on this rank. ``how``: it was called, in words. ``met``: ranks have met in it."""

    engine: Engine
    words: str
    how: str = ""
    met: bool = False


#: the innermost verb of this thread
_CALLING: ContextVar[Calling | None] = ContextVar("twinkle_calling", default=None)


@contextlib.contextmanager
def calling(engine: Engine, verb: str, adapter: str, how: str = "") -> Iterator[None]:
    """Inside, ranks that meet are in this verb of this adapter. ``how``: what ``said`` gives."""
    token = _CALLING.set(Calling(engine, f"{verb} of {whose(adapter)}", how))
    try:
        yield
    finally:
        _CALLING.reset(token)


def said(temperature: Any = 1.0, task: Any = "causal_lm") -> str:
    """Words for arguments of a verb that are the same on all ranks, where they are not what they usually are."""
    words = [] if temperature == 1.0 else [f" at temperature {temperature}"]
    return "".join(words if task == "causal_lm" else [*words, f" as {task}"])


def _now(engine: Engine) -> Calling:
    found = _CALLING.get()
    return found if found is not None and found.engine is engine else Calling(engine, "something that is no verb")


def meet(
    engine: Engine, number: Any = 0.0, *, about: str = "", why: str | None = None, failure: Failure | None = None
) -> list[float]:
    """All ranks of the mesh are here, in the same verb. One message of three numbers.

    Args:
        number: a number or 0-d tensor.
        about: what else must be the same on all ranks, in words.
        why: this rank can't go on, and all others raise ``failure`` of it.

    Returns:
        The numbers of all ranks, in order.

    Raises:
        RanksApart: they are in different verbs, or ``about`` differs. RankLeft: one is gone. ``failure`` (by default
        FailedElsewhere) of the first rank that can't go on, also on that rank itself.
    """
    now = _now(engine)
    if engine.mesh.world_size > 1 and (left := leaving.lost()) is not None:
        raise RankLeft(now.words, left)
    about = now.how + about
    code = zlib.crc32(f"{now.words}\0{about}".encode())
    try:
        told = engine.gather_numbers([float(code), number, float(why is not None)])
        now.met = True
        if all(theirs == told[0][0] and not failed for theirs, _, failed in told):
            return [each for _, each, _ in told]
        words = engine.gather_objects((now.words, about, why), "world")
    except RuntimeError as error:  # what torch raises where a peer is gone, or late
        raise RankLeft(now.words, str(error)) from error
    if len({verb for verb, _, _ in words}) > 1:
        raise RanksApart.calls([verb for verb, _, _ in words])
    for rank, (verb, _, other) in enumerate(words):
        if other is not None:
            raise failure(rank, other) if failure is not None else FailedElsewhere(verb, rank, other)
    raise RanksApart.differently([verb + more for verb, more, _ in words])


def check_shared(mesh: DeviceMesh, given: Sequence[int]) -> None:
    """Raise if ranks that compute together on one share of the rows were given different ones.

    Args:
        given: of each rank, a number that says what.

    Raises:
        RanksApart
    """
    shares: dict[int, list[int]] = {}
    for rank in range(mesh.world_size):
        shares.setdefault(mesh.at(rank).data_rank, []).append(rank)
    for share, ranks in shares.items():
        if len({given[rank] for rank in ranks}) > 1:
            raise RanksApart.rows(share, ranks)


def _tell(engine: Engine, why: str) -> None:
    """Tell other ranks why this one can't go on. What it raises is its own error, whatever they do."""
    with contextlib.suppress(TwinkleError):
        meet(engine, why=why)


def in_pass(engine: Engine) -> contextlib.AbstractContextManager[None]:
    """Around what ranks of the verb that runs compute together: see ``leaving``."""
    return leaving.in_pass(engine, _now(engine).words)


@contextlib.contextmanager
def telling(engine: Engine) -> Iterator[None]:
    """What a rank does by itself in a verb in which ranks may meet afterwards: where one fails, all fail."""
    now = _now(engine)
    try:
        yield
    except Exception as error:
        if not now.met and engine.mesh.world_size > 1:
            _tell(engine, describe(error))
        raise


@contextlib.contextmanager
def until_met(engine: Engine, needed: bool = True) -> Iterator[None]:
    """What a rank does by itself before ranks meet in a verb, inside or on leaving: where one fails, all fail.

    Args:
        needed: whether they meet at all.
    """
    if engine.mesh.world_size == 1 or not needed:
        yield
        return
    now = _now(engine)
    with telling(engine):
        yield
    if not now.met:
        meet(engine)


@contextlib.contextmanager
def together(engine: Engine, failure: Failure | None) -> Iterator[None]:
    """What is done inside, all ranks have done on leaving; or all fail, where one of them would wait for another in vain.

    Nothing inside may need another rank after it could have failed alone.

    Args:
        failure: what the others raise, made of the number of the first rank that failed and what it said; None:
            FailedElsewhere. The rank itself raises what it raised.
    """
    if engine.mesh.world_size == 1:
        yield
        return
    try:
        yield
    except KeyboardInterrupt:  # all ranks get it, or the process is about to end
        raise
    except BaseException as error:
        _tell(engine, describe(error) if failure is None else str(error) or type(error).__name__)
        raise
    meet(engine, failure=failure)


def on_all(call: Callable[[], T]) -> T:
    """What ``call`` gives, once it is done on all ranks of the verb that runs: for a store, between what it reads and checks
    and what ranks do together. Outside of a verb: ``call()``.

    Args:
        call: needs no other rank.

    Raises:
        FailedElsewhere: it failed on another rank; and what ``call`` raises.
    """
    now = _CALLING.get()
    with together(now.engine, None) if now is not None else contextlib.nullcontext():
        return call()


def leave(patience: float = 2.0) -> None:
    """Close the process group: to be called when a process ends, by ``atexit``.

    Threads of gloo let go of the tensors of the last message by themselves, and need the interpreter for it. One that comes to
    it when the interpreter has ended aborts the process, which has done all its work. So they are let through before.

    Args:
        patience: seconds that they are given at most.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    until = time.monotonic() + patience
    time.sleep(0.05)  # without the interpreter: who has waited for it may run now
    while _gloo_runs() and time.monotonic() < until:
        time.sleep(0.01)


def _gloo_runs() -> bool:
    """Whether a thread of gloo that handles messages is awake (Linux tells)."""
    for stat in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if name.startswith("pt_gloo") and rest.split()[0] != "S":
                return True
    return False
