"""A folder that is whole or absent (no torch)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from twinkle_core.errors import BadCheckpointName, CheckpointInTheWay, CheckpointNotWritten

#: the file that makes a folder a checkpoint of ours
STATE_FILE = "trainer_state.json"


def target(output_dir: str | Path, name: str) -> Path:
    """``output_dir/name``, refused where it is not strictly inside.

    Raises:
        BadCheckpointName: '', '.', an absolute path, or one that climbs out.
    """
    root = Path(output_dir)
    if not isinstance(name, str) or not name.strip() or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise BadCheckpointName(str(name), str(root))
    path = root / name
    inside = path.resolve()
    if inside == root.resolve() or root.resolve() not in inside.parents:
        raise BadCheckpointName(name, str(root))
    return path


def sha256(path: Path) -> str:
    """Hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Ask the disk to keep a file or folder before a rename makes it the truth."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems refuse it for folders
            raise
    finally:
        os.close(handle)


def _aside(path: Path) -> Path:
    """Where an old folder waits while its successor takes its place."""
    return path.with_name(f".{path.name}.old")


def recover(path: Path) -> None:
    """Finish what a process that was killed in the middle of ``_swap`` left: the old folder comes back, or is removed."""
    sweep(path.parent, path.name)
    old = _aside(path)
    if old.is_dir():
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(path)


def sweep(parent: Path, name: str | None = None) -> None:
    """Remove temporary folders, of ``name`` or of any, whose process was killed while it wrote them."""
    pattern = re.compile(rf"\.{'.+' if name is None else re.escape(name)}\.tmp-(\d+)-[0-9a-f]{{8}}")
    for path in list(parent.iterdir()) if parent.is_dir() else []:
        match = pattern.fullmatch(path.name)
        if match and not _runs(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True


def _swap(temporary: Path, path: Path) -> None:
    """Put a complete folder in the place of an old one. Between the two renames ``recover`` knows what to do."""
    if not path.exists():
        temporary.rename(path)
        return
    old = _aside(path)
    path.rename(old)
    try:
        temporary.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary sibling to write into; on leaving it is synced and takes the place of ``path``.

    On any exception the temporary folder is removed and what was at ``path`` is untouched.

    Raises:
        CheckpointInTheWay: something stands there that is not a checkpoint. CheckpointNotWritten: the disk refused.
    """
    recover(path)
    if path.exists() and not (path / STATE_FILE).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointInTheWay(str(path))
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in sorted(p for p in temporary.rglob("*")):
            _sync(file)
        _sync(temporary)
        _swap(temporary, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's error in its own
        raise CheckpointNotWritten(str(path), getattr(error, "strerror", None) or str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
