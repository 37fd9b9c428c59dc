"""What plugins cost: the command that lists them, and hooks to which nobody listens, against the bounds that the docs state.

    python benchmarks/plugins_cost.py

``twinkle plugins`` runs over 150 generated distributions beside those of this environment. Six have components, and two of
these a hook module. Measured is the CPU time of the command and of its children, should it start some; the median of several
runs counts.

Hooks without listeners are measured on a training step of a model so tiny that whatever surrounds its arithmetic shows, in two
ways: the time of one call, multiplied by the calls of a step; and steps as they are against steps in which ``hooks()`` gives a
caller that does nothing, by turns in one process. The time of a step varies by far more than the bound, and other processes
only lengthen it, so the second counts CPU time, and compares the two at their fastest tenth.

Exits with 1 when a bound is broken.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from import_time import WITH_TWINKLE, site

from twinkle_core.testing.distributions import write_distribution

DISTRIBUTIONS, HOOK_MODULES, RUNS = 150, 2, 9
COMMAND_SECONDS = 0.3
PAIRS, WARM_UP = 3000, 50
SHARE = 0.01

HOOKS = "from twinkle_core import hookimpl\n\n\n@hookimpl\ndef twinkle_report_header():\n    return 'well'\n"


def command_seconds() -> float:
    """CPU seconds of ``twinkle plugins`` and its children."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        site(place, DISTRIBUTIONS)
        for number in range(HOOK_MODULES):
            points = {"losses": {f"own_{number}": f"own_{number}:OwnLoss"}, "plugins": {f"own_{number}": f"own_hooks_{number}"}}
            write_distribution(place, f"package-{number}", "1.0", points, modules={f"own_hooks_{number}.py": HOOKS})
        code = f"import sys; sys.path.append({folder!r}); from twinkle_core.cli.main import main; sys.exit(main(['plugins']))"
        found = []
        for _ in range(RUNS):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            assert all(f"own_{n} " in done.stdout for n in range(WITH_TWINKLE)), "it must list them"
            assert all(f"own_hooks_{n} " in done.stdout for n in range(HOOK_MODULES)), "it must list hook modules"
    return statistics.median(found)


class Mute:
    """A caller of hooks that does nothing, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        self.calls += 1
        return ignore


def ignore(**arguments: object) -> list[Any]:
    """What a hook answers without listeners."""
    return []


@contextmanager
def muted(mute: Mute) -> Iterator[None]:
    """Inside, ``plugins.hooks()`` gives ``mute``."""
    from twinkle_core import plugins

    before = plugins.hooks
    plugins.hooks = lambda: mute
    try:
        yield
    finally:
        plugins.hooks = before


def step_of_tiny_model() -> Callable[[], None]:
    """One update of a model of 348 weights on four short rows."""
    import torch

    from twinkle_core.testing.engines import session_model
    from twinkle_core.testing.toys import TinyLM, random_rows

    torch.set_num_threads(1)
    model = session_model(TinyLM())
    model.set_optimizer("adamw", lr=1e-3)
    rows = random_rows([5, 7, 3, 9])

    def step() -> None:
        model.forward_backward(rows)
        model.clip_grad_and_step()

    return step


def seconds(call: Callable[[], None]) -> float:
    """CPU time of this thread."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def at_best(times: list[float]) -> float:
    """Their first decile."""
    return statistics.quantiles(times, n=10)[0]


def shares() -> tuple[float, float, float, float, int]:
    """Microseconds of a step and of a call, share by calls, share by turns, calls of a step."""
    from twinkle_core import plugins

    step, mute = step_of_tiny_model(), Mute()
    for _ in range(WARM_UP):
        step()
    with muted(mute):
        step()
    calls = mute.calls
    heard, unheard = [], []
    for turn in range(PAIRS):
        if turn % 2:
            heard.append(seconds(step))
        with muted(mute):
            unheard.append(seconds(step))
        if not turn % 2:
            heard.append(seconds(step))
    ask = lambda: plugins.hooks().twinkle_after_step(session=None, result=None)  # noqa: E731
    assert ask() == [], "somebody listens: switch it off with TWINKLE_DISABLE_PLUGINS"
    call = min(timeit.repeat(ask, number=2000, repeat=9)) / 2000
    best = at_best(heard)
    return best * 1e6, call * 1e6, calls * call / best, best / at_best(unheard) - 1, calls


def main() -> int:
    """Measure, print, compare."""
    command = command_seconds()
    step, call, by_calls, by_turns, calls = shares()
    print(f"a step of the tiny model: {step:.0f} µs; it calls {calls} hooks, {call:.2f} µs each without listeners")
    rows = [
        (f"`twinkle plugins` over {DISTRIBUTIONS} distributions more, s of CPU", command, COMMAND_SECONDS),
        ("hooks without listeners, % of a step: calls × time of a call", by_calls * 100, SHARE * 100),
        ("hooks without listeners, % of a step: with against without", by_turns * 100, SHARE * 100),
    ]
    width = max(len(what) for what, _, _ in rows)
    for what, value, bound in rows:
        print(f"{what:<{width}}  {value:7.3f}  < {bound:<4g}  {'ok' if value < bound else 'BROKEN'}")
    return int(not all(value < bound for _, value, bound in rows))


if __name__ == "__main__":
    sys.exit(main())
