"""Import components in a child process, so that not even ``os._exit`` in a plugin reaches this one (L0).

Run as a program it is that child: it reads JSON on stdin and writes one line of JSON for each component.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from twinkle_core import api, loading
from twinkle_core.index import HOOK_MODULES, Entry
from twinkle_core.isolation import attempt, describe

TIMEOUT = 300.0  # seconds for one child; importing torch and transformers cold takes tens


def probe(entries: Sequence[Entry], timeout: float = TIMEOUT) -> list[str]:
    """Try to load each entry.

    Returns:
        For each entry an empty text, or why it does not load.
    """
    results: list[str] = []
    while len(results) < len(entries):
        rest = entries[len(results) :]
        answers, end = _child(rest, timeout)
        results += answers
        if len(answers) < len(rest):  # the child died over the next one; go on after it
            results.append(f"its import {end}")
    return results


def _child(entries: Sequence[Entry], timeout: float) -> tuple[list[str], str]:
    """The answers of one child, and how it ended if they are not all there."""
    task = json.dumps({"path": sys.path, "entries": [_plain(e) for e in entries]})
    command = [sys.executable, "-m", "twinkle_core.cli.probe"]
    try:
        done = subprocess.run(
            command, input=task.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout, check=False
        )
        output, end = done.stdout, f"ended the process (exit status {done.returncode})"
    except subprocess.TimeoutExpired as expired:
        output, end = expired.stdout or b"", f"took longer than {timeout:.0f} s"
    lines = output.decode().split("\n")[:-1]  # what has no line end was cut off
    return [json.loads(line) for line in lines], end


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


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers_to:
        os.dup2(2, 1)  # what a plugin prints while it is imported must not look like an answer
        answer(asked, answers_to)
        os._exit(0)  # nor may what it left to run at exit hold the child up
