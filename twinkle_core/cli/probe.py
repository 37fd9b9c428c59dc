"""Import components in a child process, so that not even ``os._exit`` in a plugin reaches this one (L0).

Run as a program it is that child: it reads JSON on stdin and writes one line of JSON for each component.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from twinkle_core import api, loading
from twinkle_core.errors import NotA
from twinkle_core.index import HOOK_MODULES, Entry
from twinkle_core.isolation import attempt, describe
from twinkle_core.names import CONTRACTS

TIMEOUT = 60.0  # seconds for one component; the first one may import torch and transformers cold, which takes tens


def probe(entries: Sequence[Entry], timeout: float = TIMEOUT, tell: Callable[[int], None] = lambda number: None) -> list[str]:
    """Try to load each entry, and compare it with its kind's contract.

    Args:
        timeout: seconds for each.
        tell: called with an entry's number before its turn.

    Returns:
        For each entry an empty text, or why it can't be used.
    """
    results: list[str] = []
    while len(results) < len(entries):
        done = len(results)
        answers, end = _child(entries[done:], timeout, lambda number, done=done: tell(done + number))  # type: ignore[misc]
        results += answers
        if len(results) < len(entries):  # the child died over the next one; go on after it
            results.append(f"its import {end}")
    return results


def _child(entries: Sequence[Entry], timeout: float, tell: Callable[[int], None]) -> tuple[list[str], str]:
    """The answers of one child, and how it ended if they are not all there."""
    task = json.dumps({"path": sys.path, "entries": [_plain(e) for e in entries]}).encode()
    command = [sys.executable, "-m", "twinkle_core.cli.probe"]
    answers: list[str] = []
    with tempfile.TemporaryFile() as given:  # not a pipe: a child that dies early would break it
        given.write(task)
        given.seek(0)
        process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        lines = _read_aside(process)
        while len(answers) < len(entries):
            tell(len(answers))
            line = lines.get(timeout=timeout)
            if not line.endswith(b"\n"):  # what has no line end was cut off
                return answers, f"ended the process (exit status {process.wait(timeout)})"
            answers.append(json.loads(line))
        return answers, ""
    except (queue.Empty, subprocess.TimeoutExpired):
        return answers, f"took longer than {timeout:.0f} s"
    finally:
        process.kill()
        process.wait()


def _read_aside(process: subprocess.Popen[bytes]) -> queue.Queue[bytes]:
    """The lines that a child writes, as they come, in another thread; the last one is empty."""
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as written:
            for line in written:
                lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, daemon=True).start()
    return lines


def _plain(entry: Entry) -> dict[str, Any]:
    return {k: v for k, v in asdict(entry).items() if k != "obj"}


def answer(task: dict[str, Any], out: TextIO) -> None:
    """The child's work."""
    sys.path[:] = task["path"]
    for fields in task["entries"]:
        entry = Entry(**{**fields, "api": tuple(fields["api"])})
        got = attempt(lambda entry=entry: _load(entry))  # type: ignore[misc]
        out.write(json.dumps(str(got.error) or describe(got.error) if got.error is not None else "") + "\n")
        out.flush()


def _load(entry: Entry) -> None:
    obj = loading.load(entry, api.SUPPORTED)
    if entry.kind == HOOK_MODULES:
        from twinkle_core.plugins import check

        check(entry, obj)
    elif entry.kind in CONTRACTS and not (entry.kind == "loss" and inspect.isroutine(obj)):  # a loss may be a plain function
        module, name = CONTRACTS[entry.kind]
        contract = getattr(importlib.import_module(module), name)
        cls = obj if inspect.isclass(obj) else type(obj)
        if not loading.keeps(cls, contract):
            raise NotA(entry.label, name, loading.lacking(cls, contract), entry.dist)


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers_to:
        os.dup2(2, 1)  # what a plugin prints while it is imported must not look like an answer
        answer(asked, answers_to)
        os._exit(0)  # nor may what it left to run at exit hold the child up
