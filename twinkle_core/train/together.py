"""Ranks that do something together, of which each can fail alone (L2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from twinkle_core.contracts.engine import Engine

#: what a rank raises of another one: of its number and of what it said
Failure = Callable[[int, str], Exception]


@contextlib.contextmanager
def together(engine: Engine, failure: Failure, *, always: bool = False) -> Iterator[None]:
    """What is done inside, all ranks have done on leaving; or all fail, where one of them would wait for another in vain.

    Nothing inside may need another rank after it could have failed alone.

    Args:
        failure: what the others raise, made of the number of the first rank that failed and what it said. The rank itself
            raises what it raised.
        always: also where ranks hold the same (an engine that is not ``collective``).
    """
    if engine.mesh.world_size == 1 or not (always or engine.collective):
        yield
        return
    try:
        yield
    except Exception as error:
        engine.gather_objects(str(error) or type(error).__name__, "world")
        raise
    for rank, why in enumerate(engine.gather_objects(None, "world")):
        if why is not None:
            raise failure(rank, why)
