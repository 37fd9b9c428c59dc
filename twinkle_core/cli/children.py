"""Work on plugins in child processes, so that one that ends its process or hangs costs its own answer alone (L0)."""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from twinkle_core.cli import streams
from twinkle_core.errors import shown

GRACE = 10.0  # seconds that a child has to end itself after its time
WHY = 300  # characters of a child's last line that are shown


@dataclass(frozen=True, slots=True)
class Ended:
    """In place of an answer: how the child ended over a task."""

    why: str


def each(worker: str, tasks: Sequence[Any], timeout: float, path: Sequence[str] | None = None) -> Iterator[Any]:
    """The answer of each task, or Ended, in order.

    Args:
        worker: the module to run; it calls ``serve``.
        tasks: what JSON can hold.
        timeout: seconds for one task.
        path: the children's ``sys.path``; default that of this process.
    """
    done = 0
    while done < len(tasks):
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
            rest = {"path": list(sys.path if path is None else path), "timeout": timeout, "tasks": list(tasks[done:])}
            given.write(json.dumps(rest).encode())  # no pipe: a child that dies early would break it
            given.seek(0)
            command = [sys.executable, "-m", worker]
            with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=said) as process:
                lines = _read_aside(process.stdout)
                try:
                    while done < len(tasks):
                        line = lines.get(timeout=timeout + GRACE)
                        done += 1
                        if not line.endswith(b"\n"):  # what has no line end was cut off; a new child goes on after it
                            yield Ended(_end(process.wait(GRACE), said, timeout))
                            break
                        yield json.loads(line)
                except (queue.Empty, subprocess.TimeoutExpired):
                    done += 1
                    yield Ended(f"took longer than {timeout:.0f} s")
                finally:
                    process.kill()


def _read_aside(written: IO[bytes] | None) -> queue.Queue[bytes]:
    """Lines as they come, read in another thread; the last one is empty."""
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        for line in written or ():
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, daemon=True).start()
    return lines


def _end(status: int, said: IO[bytes], timeout: float) -> str:
    said.seek(0)
    text = said.read().decode(errors="replace")
    _, late, frames = text.rpartition("Timeout (")
    place = re.search(r'File "(.+)", line (\d+) in', frames)
    if late:
        return f"took longer than {timeout:.0f} s" + (f", at {place[1]}:{place[2]}" if place else "")
    fault = re.search(r"Fatal Python error: (.+)", text)
    last = "" if fault else next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    said_last = f"; the last that it wrote: {shown(last, WHY)}" if last else ""
    return f"ended the process (exit status {status}{f', {fault[1]}' if fault else ''}){said_last}"


def serve(work: Callable[[Any], Any]) -> None:
    """The child's side: read tasks from stdin, write one line of JSON for each, and end. Does not return."""
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    faulthandler.enable()
    with streams.ready(), os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what a plugin prints must not look like an answer
        for task in asked["tasks"]:
            faulthandler.dump_traceback_later(asked["timeout"], exit=True)  # from outside Python, whatever holds its lock
            answer = work(task)
            faulthandler.cancel_dump_traceback_later()
            out.write(json.dumps(answer) + "\n")
            out.flush()
        os._exit(0)  # nor may what a plugin left to run at exit hold the child up
