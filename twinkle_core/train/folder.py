"""A folder that is whole or absent (no torch)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from twinkle_core.errors import BadArgument, BadCheckpointName, CheckpointInTheWay, CheckpointNotWritten

#: the file that makes a folder a checkpoint of ours
STATE_FILE = "trainer_state.json"
#: bytes of a folder's name; file systems take 255, and a temporary name is longer
LONGEST = 200


def target(output_dir: str | Path, name: str) -> Path:
    """``output_dir/name``, refused where it is not strictly inside.

    Raises:
        BadCheckpointName: '', '.', an absolute path, one that climbs out, or too long a name. BadArgument: no path.
    """
    if not isinstance(output_dir, (str, Path)):
        raise BadArgument("output_dir", output_dir, "the path of a folder")
    root = Path(output_dir)
    if not isinstance(name, str) or not name.strip() or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise BadCheckpointName(str(name), str(root))
    if any(len(os.fsencode(part)) > LONGEST for part in Path(name).parts):
        raise BadCheckpointName(name, str(root))
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


def _share(folder: Path) -> None:
    """Give all files the rights of new ones. Some libraries write through temporary files, which are their owner's alone.

    What the umask leaves of a right is read off ``folder``, which was made under it: asking for it means setting it, for
    all threads.
    """
    rights = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o777 != rights:
            with contextlib.suppress(OSError):  # a disk that keeps no rights
                path.chmod(rights)


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


def _check_free(path: Path) -> None:
    """Raise CheckpointInTheWay if writing to ``path`` would remove anything but a checkpoint, or put one into another."""
    around = next((parent for parent in path.parents if (parent / STATE_FILE).is_file()), None)
    if around is not None:
        raise CheckpointInTheWay(str(path), f"would lie inside the checkpoint '{around}', which is replaced as a whole")
    if not path.exists():
        return
    if not path.is_dir() or (not (path / STATE_FILE).is_file() and any(path.iterdir())):
        raise CheckpointInTheWay(str(path))
    own = {STATE_FILE, *_listed(path / STATE_FILE)}
    foreign = sorted(name for p in path.rglob("*") if not p.is_dir() and (name := p.relative_to(path).as_posix()) not in own)
    if foreign:
        raise CheckpointInTheWay(str(path), f"holds what is not of its checkpoint ({foreign[0]}), so it is not replaced")


def _listed(state_file: Path) -> list[str]:
    """The files that a checkpoint names as its own; none where that can't be read."""
    try:
        return list(json.loads(state_file.read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary sibling to write into; on leaving it is synced and takes the place of ``path``.

    On any exception the temporary folder is removed and what was at ``path`` is untouched.

    Raises:
        CheckpointInTheWay: something stands there that is not a checkpoint alone. CheckpointNotWritten: the disk refused.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        recover(path)
        _check_free(path)
        temporary.mkdir(parents=True)
        yield temporary
        _share(temporary)
        for file in sorted(p for p in temporary.rglob("*")):
            _sync(file)
        _sync(temporary)
        _swap(temporary, path)
        _sync(path.parent)
    except CheckpointInTheWay:
        raise
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's error in its own
        raise CheckpointNotWritten(str(path), getattr(error, "strerror", None) or str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
