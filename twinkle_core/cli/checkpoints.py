"""The checkpoint folders of one run: their names, the newest, and which are kept (L0)."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from twinkle_core import errors

_NAME = re.compile(r"checkpoint-(\d+)")
#: ``--resume`` without a folder, or with this word
AUTO = "auto"


def name_of(step: int) -> str:
    """The folder's name of a step."""
    return f"checkpoint-{step}"


def step_of(path: Path, otherwise: int) -> int:
    """The step in a folder's name; ``otherwise`` for a folder with a name of its own."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else otherwise


def all_of(output_dir: Path) -> list[Path]:
    """Checkpoints by step, oldest first. A folder was renamed into place, so it is whole or absent, and each can be used."""
    folders = [path for path in output_dir.iterdir() if path.is_dir()] if output_dir.is_dir() else []
    matches = [(_NAME.fullmatch(path.name), path) for path in folders]
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]


def to_resume(resume: str | None, output_dir: Path) -> Path | None:
    """The folder to go on from; None to begin.

    Args:
        resume: None (a new run), ``auto`` (the newest of ``output_dir``, or a new run when there is none), or a folder.

    Raises:
        OutputInUse: a new run in a folder that holds another's checkpoints.
        NoCheckpoint: no such folder.
    """
    existing = all_of(output_dir)
    if resume is None:
        if existing:
            raise errors.OutputInUse(output_dir, existing[-1].name)
        return None
    if resume == AUTO:
        return existing[-1] if existing else None
    path = Path(os.path.expanduser(resume))  # Path.expanduser raises where there is no such user
    if not path.is_dir():
        raise errors.NoCheckpoint(resume)
    return path


def sweep(output_dir: Path) -> None:
    """Remove what saves of processes that were killed left half-written."""
    from twinkle_core.train import folder

    folder.sweep(output_dir)


def rotate(output_dir: Path, limit: int | None) -> list[Path]:
    """Remove the oldest beyond ``limit``. Called after a new one is whole, so there is always one to go on from."""
    extra = all_of(output_dir)[:-limit] if limit is not None else []
    for path in extra:
        shutil.rmtree(path)
    return extra
