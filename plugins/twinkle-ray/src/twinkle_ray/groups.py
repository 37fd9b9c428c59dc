"""A group of workers: how they are called together, and what becomes of them when one fails or dies."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from twinkle_core.errors import FailedElsewhere, GroupEnded, NotSent, WorkerDied
from twinkle_core.isolation import attempt, describe
from twinkle_core.runtime.calls import Answer, Call, Held
from twinkle_core.runtime.proxy import Home
from twinkle_ray.worker import Place, here

#: seconds that workers have, at least, to answer a call once another has failed in it; then they wait for that one in vain
PATIENCE = 10.0
#: and once another has died
GRACE = 2.0
#: how Ray tells that a process is gone; with memory running out it ends some itself
DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)
#: methods of a worker that raise nothing: what goes wrong with them goes wrong with their answers, on the way here
ANSWERING = ("build", "call", "next")
#: bytes of a call above which all workers of a machine read one copy
LARGE = 100_000


class Group:
    """Workers that act together: each call goes to all of them, in one order.

    Args:
        name: as the user calls it.
        token: unlike that of any other group.
        actors: in order of rank.
    """

    def __init__(self, name: str, token: str, actors: Sequence[Any]) -> None:
        self.name, self.token, self.actors = name, token, list(actors)
        self.places: list[Place | None] = [None] * len(self.actors)
        self._ended: str | None = None
        self._job = _job()
        self._lock = threading.RLock()  # an object that is collected while a call is sent is let go of by the same thread

    def __len__(self) -> int:
        return len(self.actors)

    @property
    def ended(self) -> str | None:
        """Why its workers are gone; None while they are there."""
        if self._ended is None and _job() != self._job:
            return "Ray was shut down, and they with it"
        return self._ended

    def ask(self, method: str, arguments: Sequence[tuple[Any, ...]], doing: str, first: int = 0) -> list[Any]:
        """Call a method of consecutive workers, one for each tuple of arguments, and wait for all.

        Args:
            doing: what it is about, for errors.
            first: the first of them.

        Raises:
            WorkerDied, GroupEnded; what a worker raised, as its own type, with the worker's traceback as a note. Unless all of
            them failed, the group is ended: its workers have gone different ways.
        """
        with self._lock:
            if self.ended is not None:
                raise GroupEnded(self.name, self.ended)
            actors = self.actors[first : first + len(arguments)]
            sent: list[Any] = []
            try:
                for actor, own in zip(actors, arguments, strict=True):
                    sent.append(getattr(actor, method).remote(*own))
            except BaseException:  # Ctrl-C, for one: some may have been called, and the others not
                self.end(f"{doing} was broken off while it was sent")
                raise
        found = self._await({ref: first + i for i, ref in enumerate(sent)}, doing, method in ANSWERING)
        return [found[first + i] for i in range(len(sent))]

    def tell(self, method: str, ranks: Sequence[int], *arguments: Any) -> None:
        """Call a method of some workers without waiting."""
        if self.ended is None:
            with self._lock:
                for rank in ranks:
                    getattr(self.actors[rank], method).remote(*arguments)

    def end(self, why: str) -> None:
        """End all workers at once."""
        if self.ended is None:
            self._ended = why
            for actor in self.actors:
                ray.kill(actor, no_restart=True)

    def _await(self, rank_of: dict[Any, int], doing: str, answers: bool) -> dict[int, Any]:
        found: dict[int, Any] = {}
        failed: dict[int, Answer] = {}
        unsent: dict[int, Answer] = {}
        died: dict[int, BaseException] = {}
        begun, deadline, waiting = time.monotonic(), None, list(rank_of)
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if not done:
                break
            rank = rank_of[done[0]]
            try:
                value = ray.get(done[0])
            except DEATHS as error:
                died[rank] = error
            except RayTaskError as error:
                cause = NotSent.answer(doing, describe(_cause(error))) if answers else _cause(error)
                (unsent if answers else failed)[rank] = Answer(error=cause, trace=str(error))
            except RayError as error:
                failed[rank] = Answer(error=error, trace=str(error))
            else:
                found[rank] = value
                if isinstance(value, Answer) and value.error is not None:
                    failed[rank] = value
            now = time.monotonic()
            if died:
                deadline = min(deadline or now + GRACE, now + GRACE)
            elif failed and deadline is None:
                deadline = now + max(PATIENCE, now - begun)
        if died:
            rank, cause = min(died.items())
            self.end(f"worker {rank} died during {doing}")
            raise WorkerDied(self.name, rank, str(self.places[rank] or "starting"), doing, cause)
        if failed:
            raise self._failure(failed, len(rank_of), doing)
        if unsent:  # they are all at the same point
            raise self._failure(unsent, len(unsent), doing)
        return found

    def _failure(self, failed: dict[int, Answer], count: int, doing: str) -> BaseException:
        own = {rank: answer for rank, answer in failed.items() if not isinstance(answer.error, FailedElsewhere)}
        rank, answer = min((own or failed).items())  # the one whose fault it is, and not those who were told of it
        error = answer.error
        assert error is not None
        also = f" (and by {len(failed) - 1} more)" if len(failed) > 1 else ""
        error.add_note(
            f"raised by worker {rank} of group '{self.name}' ({self.places[rank]}) in {doing}{also}:\n{answer.trace}"
        )
        if len(failed) < count:
            self.end(f"{len(failed)} of {count} workers failed in {doing} ({type(error).__name__}), and the others did not")
            error.add_note(f"twinkle: the workers of group '{self.name}' were ended: they are not at the same point any more")
        return error


def _named(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], beside: str) -> dict[str, Any]:
    """Arguments by the names of a function's parameters; by their numbers where these are not known."""
    known = [name for name in inspect.signature(function).parameters if name != beside] if callable(function) else []
    names = [*known[: len(args)], *(f"argument {i + 1}" for i in range(len(known), len(args)))]
    return {**dict(zip(names, args, strict=True)), **kwargs}


def _pack(what: Any, function: str, named: Mapping[str, Any]) -> bytes:
    """What a call is, as bytes.

    Raises:
        NotSent: one of its arguments can't be pickled.
    """
    done = attempt(lambda: cloudpickle.dumps(what))
    if done.value is not None:
        return bytes(done.value)
    for name, value in named.items():
        own = attempt(functools.partial(cloudpickle.dumps, value))
        if own.error is not None:
            raise NotSent(function, name, type(value).__name__, own.why) from own.error
    raise NotSent(function, "something", type(what).__name__, done.why) from done.error


def _cause(error: RayTaskError) -> BaseException:
    return error.cause if isinstance(error.cause, BaseException) else error


def _job() -> str | None:
    """Which of Ray's jobs this process is; None: none. It is another one after ``ray.shutdown()`` and a new start."""
    return ray.get_runtime_context().get_job_id() if ray.is_initialized() else None


class RayHome(Home):
    """The workers of a group on which one object lives.

    Args:
        owner: the object's class.
        group: whose workers.
        key: unlike that of any other object of the group.
        shares: the data rank of each worker that has the object.
    """

    def __init__(self, owner: type, group: Group, key: str, shares: Sequence[int]) -> None:
        super().__init__(owner, f"group '{group.name}' ({len(shares)} of {len(group)} worker(s))", key, shares)
        self.group = group

    def build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, type]:
        """Construct the object. Returns its attributes whose classes may live on workers."""
        named = _named(self.owner, args, kwargs, "")
        packed = _pack((self.key, self.owner, args, kwargs), f"{self.owner.__name__}(...)", named)
        answers = self.group.ask("build", [(packed,)] * len(self.shares), f"{self.owner.__name__}(...)")
        weakref.finalize(self, self.group.tell, "drop", range(len(self.shares)), self.key)
        return answers[0].value  # type: ignore[no-any-return]

    def send(self, calls: Sequence[Call]) -> list[Answer]:
        packed: dict[int, Any] = {}
        for call in calls:
            if id(call) not in packed:
                data = self._packed(call)
                many = sum(other is call for other in calls) > 1
                packed[id(call)] = ray.put(data) if many and len(data) > LARGE else data
        return self.group.ask("call", [(packed[id(call)],) for call in calls], f"{calls[0].method.shown}()")

    def _packed(self, call: Call) -> bytes:
        verb = getattr(self.owner, call.method.name, None) if not call.method.path else None
        return _pack(call, f"{call.method.shown}()", _named(verb, call.args, call.kwargs, "self"))

    def fetch(self, worker: int, held: Held) -> Any:
        (answer,) = self.group.ask("next", [(held.number,)], f"iteration over {self.owner.__name__}", worker)
        return answer.value

    def let_go(self, worker: int, held: Held) -> None:
        self.group.tell("let_go", [worker], held.number)

    def reference(self, path: str) -> tuple[Any, ...]:
        return here, (self.group.token, self.group.name, f"this {self.owner.__name__}", self.key, path)
