"""Where models and data sets come from: ``hf://``, ``ms://`` or a local path, to a path on this machine (L0).

What can be told without asking a hub is told at once: a path that is not there, an id without its hub, a missing library.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle_core import settings
from twinkle_core.errors import BadHubId, BareId, HubError, NeedsLibrary, NoSuchPath, NotOnHub, Unreachable

HF = "hf://"
MS = "ms://"
_ADAPTER_CONFIG = "adapter_config.json"
_NAME = r"[A-Za-z0-9_][\w.-]*"
_ID = re.compile(rf"^{_NAME}/{_NAME}\Z")
_HF_ID = re.compile(rf"^{_NAME}(/{_NAME})?\Z")  # Hugging Face has ids without an owner


def is_hub_id(model_id: str | Path) -> bool:
    """Whether it names a hub (``hf://`` or ``ms://``)."""
    return str(model_id).startswith((HF, MS))


def resolve(
    model_id: str | Path,
    *,
    kind: str = "model",
    revision: str | None = None,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = None,
) -> Path:
    """Make a local path of an id, downloading (or taking from the hub's cache) where a hub is named.

    Args:
        model_id: ``hf://org/name``, ``ms://org/name``, or a local file or folder.
        kind: ``model`` or ``dataset``.
        revision: branch, tag or commit on the hub; without effect on a local path.
        allow_patterns: download only files that match one of these; None: all.
        ignore_patterns: leave out files that match one of these.

    Returns:
        The absolute path of an existing file or folder.

    Raises:
        NoSuchPath: the local path does not exist.
        BareId: ``org/name`` without a hub, and no such local path.
        BadHubId: no id that a hub could have.
        Unreachable: no network (or HF_HUB_OFFLINE) and no copy in the hub's cache.
        NotOnHub: the hub does not have it, or refuses it.
        NeedsLibrary: the hub's client library is not installed.
    """
    given = str(model_id)
    if given.startswith(HF):
        return _download(_from_huggingface, given, _HF_ID, kind, revision, allow_patterns, ignore_patterns)
    if given.startswith(MS):
        return _download(_from_modelscope, given, _ID, kind, revision, allow_patterns, ignore_patterns)
    if "://" in given or not given.strip():
        raise BadHubId(given, kind)
    return _local(given, kind)


def holds_adapter(folder: Path) -> bool:
    """Whether a folder is an adapter as PEFT writes it, and no model."""
    return (folder / _ADAPTER_CONFIG).is_file()


def base_of_adapter(folder: Path) -> str | None:
    """The model that the adapter in a folder was made for, if its config says so."""
    try:
        found = json.loads((folder / _ADAPTER_CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("base_model_name_or_path") if isinstance(found, dict) else None


def _local(given: str, kind: str) -> Path:
    try:
        path = Path(given).expanduser().absolute()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as cause:  # too long, no such user, a NUL in it
        raise NoSuchPath.impossible(given, kind, cause) from cause
    if _ID.match(given) and not Path(given).parent.exists():
        raise BareId(given, kind, path)
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, siblings, n=2)
    raise NoSuchPath.missing(given, path, kind, [str(Path(given).parent / name) for name in similar])


def _download(
    fetch: Any,
    given: str,
    pattern: re.Pattern[str],
    kind: str,
    revision: str | None,
    allow: Sequence[str] | None,
    ignore: Sequence[str] | None,
) -> Path:
    if not pattern.match(given[len(HF) :]):
        raise BadHubId(given, kind)
    options: dict[str, Any] = {"repo_type": kind, "allow_patterns": _list(allow), "ignore_patterns": _list(ignore)}
    if revision is not None:
        options["revision"] = revision
    path = Path(fetch(given, kind, options, revision)).absolute()
    if not path.exists():
        raise NoSuchPath.missing(given, path, kind)
    return path


def _list(patterns: Sequence[str] | None) -> list[str] | None:
    return None if patterns is None else list(patterns)


def _from_huggingface(given: str, kind: str, options: dict[str, Any], revision: str | None) -> str:
    try:
        import huggingface_hub as client
        from huggingface_hub import errors
    except ImportError as cause:
        raise NeedsLibrary(f"the {kind} '{given}'", "huggingface_hub", "huggingface-hub", sys.prefix) from cause
    name, hub, offline = given.removeprefix(HF), "Hugging Face", settings.offline()
    try:
        return str(client.snapshot_download(name, local_files_only=offline, **options))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as cause:  # a gated one is the first kind
        raise NotOnHub(given, kind, hub, revision, _first_line(cause)) from cause
    except errors.HFValidationError as cause:
        raise BadHubId(given, kind) from cause
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError, TimeoutError) as cause:
        raise Unreachable(given, kind, hub, offline, _first_line(cause)) from cause
    except errors.HfHubHTTPError as cause:
        raise _by_status(given, kind, hub, revision, cause) from cause


def _from_modelscope(given: str, kind: str, options: dict[str, Any], revision: str | None) -> str:
    try:
        import modelscope as client
    except ImportError as cause:
        raise NeedsLibrary(f"the {kind} '{given}'", "modelscope", "modelscope", sys.prefix) from cause
    name, hub, offline = given.removeprefix(MS), "ModelScope", settings.offline()
    known = _modelscope_errors()
    failed: Exception | None = None
    if not offline:
        try:
            return str(client.snapshot_download(name, **options))
        except known as cause:
            if not _is_connection(cause):
                raise _by_status(given, kind, hub, revision, cause) from cause
            failed = cause  # modelscope does not fall back to its cache; a copy there will do
    try:
        return str(client.snapshot_download(name, local_files_only=True, **options))
    except known as cause:
        raise Unreachable(given, kind, hub, offline, _first_line(failed or cause)) from (failed or cause)


def _modelscope_errors() -> tuple[type[Exception], ...]:
    """The client's own classes of errors, which moved between its versions, and what its HTTP library raises."""
    found: list[type[Exception]] = [OSError, ValueError]
    for module in ("modelscope_hub.errors", "modelscope.hub.errors"):
        with contextlib.suppress(ImportError):
            names = vars(importlib.import_module(module)).values()
            found += [e for e in names if isinstance(e, type) and issubclass(e, Exception) and e is not Exception]
    return tuple(found)


def _is_connection(cause: Exception) -> bool:
    """requests' ConnectionError and Timeout are not the builtin ones."""
    names = {c.__name__ for c in type(cause).__mro__}
    return bool(names & {"ConnectionError", "TimeoutError", "Timeout", "NetworkError"})


def _by_status(given: str, kind: str, hub: str, revision: str | None, cause: Exception) -> HubError:
    """A server's own trouble is not the name's fault."""
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(status, int) and status >= 500:
        return Unreachable(given, kind, hub, False, _first_line(cause))
    return NotOnHub(given, kind, hub, revision, _first_line(cause))


def _first_line(cause: BaseException) -> str:
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0][:300]}" if lines else type(cause).__name__
