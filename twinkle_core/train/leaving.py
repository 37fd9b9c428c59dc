"""A rank that leaves a pass in whose middle others wait for it (L2).

No message of the process group can tell them: they wait within one. What each rank that leaves has to say it puts down in the
group's store, which needs nobody else.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from twinkle_core.contracts.engine import Engine
from twinkle_core.errors import FailedElsewhere, RankLeft
from twinkle_core.isolation import describe

#: seconds in which ranks that leave a pass alike have all left it
PATIENCE = 5.0
#: of all models of this process: ranks make the same ones in one order
_PASSES = itertools.count()
#: the process groups that this rank can't use any more, and why
_LOST: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def lost() -> str | None:
    """Why this rank can't send messages any more: others would take them for those of a pass that it has left."""
    return _LOST.get(dist.group.WORLD) if _LOST and dist.is_initialized() else None


@contextlib.contextmanager
def in_pass(engine: Engine, words: str) -> Iterator[None]:
    """Around what ranks that are ``in_step`` run together. Where all leave it by an error, each raises its own, and all can go
    on. Where only some do, these raise their own, and whoever notices FailedElsewhere; no rank sends a message afterwards.

    Args:
        words: for what they run it.
    """
    if not engine.in_step or engine.mesh.world_size == 1 or not dist.is_initialized():
        yield
        return
    number = next(_PASSES)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _leave(engine, words, PrefixStore(f"twinkle/pass {number}", _get_default_store()), error)
        raise


def _leave(engine: Engine, words: str, store: Any, error: BaseException) -> None:
    """Put down what is raised, and see whether all others have left the pass too.

    Raises:
        FailedElsewhere, RankLeft: another rank left it before, which is why this one does.
    """
    ranks, mine, why = range(engine.mesh.world_size), engine.mesh.rank, describe(error)
    try:
        first = next((rank for rank in ranks if store.check([f"alone {rank}"])), None)
        if first is None:
            store.set(str(mine), why)
            if _come(store, [str(rank) for rank in ranks]):
                return
            first = mine
            store.set(f"alone {mine}", why)
        else:
            why = store.get(f"alone {first}").decode()
    except RuntimeError:  # the store is gone with the rank that kept it
        _LOST[dist.group.WORLD] = why
        raise RankLeft(words, str(error)) from error
    _LOST[dist.group.WORLD] = f"rank {first} has left a pass in its middle ({why})"
    if first != mine:
        raise FailedElsewhere(words, first, why) from error
    error.add_note("twinkle: not all ranks have left this pass, so this one sends no message any more; start all anew")


def _come(store: Any, keys: list[str]) -> bool:
    """Whether all of these are put down in time."""
    until = time.monotonic() + PATIENCE
    while not (there := store.check(keys)) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(there)
