"""A method of a suite in several processes that meet (gloo): what a test of data ranks needs (L2).

``python -m twinkle_core.testing.ranks FOLDER RANK`` is one of these processes; ``run`` starts them.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from twinkle_core import settings
from twinkle_core.errors import RankFailed

JOB = "job.pt"
#: what a script is called in the processes it starts, so that they don't run it as one
SCRIPT = "__twinkle_script__"


def run(suite: type, method: str, world_size: int, given: Mapping[str, Any], timeout: float = 120.0) -> list[Any]:
    """Call ``suite().method(rank, world_size, **given)`` in processes of their own, on this machine's CPU.

    Each finds RANK and WORLD_SIZE in its environment, as under torchrun, and a gloo process group that is there already. The
    group meets in a file, so no port is needed. Whatever happens, no process is left.

    Args:
        suite: a class that a new process can import, from an installed module or from a file; one that was made on the fly
            (with a ``component`` that can be imported) will do.
        given: numbers, texts, lists, dicts and tensors.
        timeout: seconds for all of them together.

    Returns:
        What each rank returned (of the same types), in rank order.

    Raises:
        RankFailed: with the last lines that the rank wrote.
    """
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        job = {"path": sys.path, "suite": _reference(suite), "method": method, "world_size": world_size, "given": dict(given)}
        torch.save(job | {"timeout": timeout}, folder / JOB)
        outputs = [(folder / f"rank{rank}.txt").open("w+") for rank in range(world_size)]
        processes: list[subprocess.Popen[Any]] = []
        try:
            for rank, output in enumerate(outputs):
                command = [sys.executable, "-m", __name__, home, str(rank)]
                processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output))
            _wait(processes, folder, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for output in outputs:
                output.close()
        return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world_size)]


def _wait(processes: list[subprocess.Popen[Any]], folder: Path, timeout: float) -> None:
    """Until all have ended well, or one has not: the others would wait for it in vain."""
    deadline = time.monotonic() + timeout
    while True:
        states = [process.poll() for process in processes]
        bad = next((rank for rank, state in enumerate(states) if state), None)
        late = next((rank for rank, state in enumerate(states) if state is None), None)
        if bad is None and late is None:
            return
        if bad is not None or time.monotonic() > deadline:
            rank = bad if bad is not None else late
            assert rank is not None
            what = f"failed (exit status {states[rank]})" if bad is not None else f"was not done after {timeout:g} s"
            raise RankFailed(rank, len(processes), what, (folder / f"rank{rank}.txt").read_text(errors="replace"))
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------- which suite


def _reference(suite: type) -> dict[str, Any]:
    """How another process finds a suite's class: by module and name, or, if made on the fly, its parent's and what it adds."""
    home = next(cls for cls in suite.__mro__ if _found(sys.modules.get(cls.__module__), cls.__qualname__) is cls)
    found: dict[str, Any] = _place(home)
    if home is not suite:
        found["component"] = _place(suite.component)  # type: ignore[attr-defined]
        found["arguments"] = dict(suite.arguments)  # type: ignore[attr-defined]
    return found


def _place(cls: type) -> dict[str, Any]:
    module = sys.modules[cls.__module__]
    return {"module": cls.__module__, "file": getattr(module, "__file__", None), "name": cls.__qualname__}


def _found(module: ModuleType | None, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _class(place: Mapping[str, Any]) -> Any:
    return _found(_module(place["module"], place["file"]), place["name"])


def _module(name: str, file: str | None) -> ModuleType:
    """The module of this name, if that is this file; else the file: test files are often in no package."""
    name = SCRIPT if name == "__main__" else name
    if name in sys.modules:
        return sys.modules[name]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if file is None or (spec is not None and spec.origin == file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------- one process


def main(home: str, rank: int) -> None:
    """Be one rank."""
    folder = Path(home)
    job = torch.load(folder / JOB, weights_only=True)
    sys.path[:] = job["path"]
    world_size, place = job["world_size"], job["suite"]
    settings.become_rank(rank, world_size)
    torch.set_num_threads(1)
    suite = _class(place)
    if "component" in place:
        suite = type(suite.__name__, (suite,), {"component": _class(place["component"]), "arguments": place["arguments"]})
    patience = datetime.timedelta(seconds=job["timeout"])
    meeting = (folder / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=patience)
    try:
        result = getattr(suite(), job["method"])(rank, world_size, **job["given"])
    finally:
        dist.destroy_process_group()
    torch.save(result, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is written; threads of torch's now and then abort a process while its interpreter ends
