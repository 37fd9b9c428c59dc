"""Importing what an entry names, and saying rightly why it can't be (L0)."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from twinkle_core.errors import ApiMismatch, BadImportPath, Broken, NeedsLibrary, TwinkleError
from twinkle_core.index import ABSENT, Entry, damaged, distribution
from twinkle_core.isolation import attempt
from twinkle_core.names import normalise

#: import name -> distribution, where the two differ beyond spelling
_OTHERWISE_NAMED = {"cv2": "opencv-python", "PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}


def load(entry: Entry, supported: Iterable[int], path: Sequence[str] | None = None) -> Any:
    """The object of an entry.

    Args:
        entry: what to import.
        supported: versions of the plugin API that this core has.
        path: where its distribution's metadata lies, for the install command in an error.

    Raises:
        ApiMismatch, NeedsLibrary, Broken; an error that twinkle itself raised during the import passes unchanged.
    """
    if entry.obj is not ABSENT:
        return entry.obj
    versions = tuple(supported)
    if not set(entry.api) & set(versions):
        raise ApiMismatch(entry.label, entry.dist, max(entry.api), versions)
    was_there = entry.module in sys.modules
    got = attempt(_importer(entry.module, entry.attribute))
    if got.error is None:
        return got.value
    if not was_there:
        sys.modules.pop(entry.module, None)  # imported, but without the attribute: after a repair it must be read again
    if isinstance(got.error, TwinkleError):
        raise got.error
    need = _missing_library(entry, got.error, path)
    if need is not None:
        raise NeedsLibrary(entry.label, *need, sys.prefix) from got.error
    raise Broken(entry.label, entry.value, entry.dist or entry.module, got.why, damaged()) from got.error


def import_path(kind: str, path: str) -> Any:
    """The object of ``module:Class``.

    Raises:
        BadImportPath
    """
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise BadImportPath(kind, path, "the part before or after the colon is empty")
    got = attempt(_importer(module, attribute))
    if got.error is None:
        return got.value
    if isinstance(got.error, TwinkleError):
        raise got.error
    raise BadImportPath(kind, path, got.why) from got.error


def _importer(module: str, attribute: str) -> Callable[[], Any]:
    def call() -> Any:
        obj = importlib.import_module(module)
        for part in filter(None, attribute.split(".")):
            obj = getattr(obj, part)
        return obj

    return call


# ------------------------------------------------------------------------------------------------------- missing libraries


def _missing_library(entry: Entry, error: BaseException, path: Sequence[str] | None) -> tuple[str, str] | None:
    """(import name, what pip is to install), if the error is a third-party library that the distribution declares."""
    if not isinstance(error, ModuleNotFoundError) or not error.name or not entry.dist:
        return None
    if error.name.partition(".")[0] == entry.module.partition(".")[0]:
        return None  # the plugin's own module: its fault
    library = _asked_for(error)
    dist = attempt(lambda: distribution(entry.dist, path))
    for line in (dist.value.requires if dist.value is not None else None) or ():
        requirement, _, marker = line.partition(";")
        wanted = re.match(r"\s*([A-Za-z0-9._-]+)", requirement)
        if wanted is None or not _provides(wanted[1], library):
            continue
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        return library, f"{entry.dist}[{extra[1]}]" if extra else wanted[1]
    return None


def _asked_for(error: ModuleNotFoundError) -> str:
    """The module that the failing statement wanted: ``megatron.core``, where the error names only ``megatron``."""
    missing = error.name or ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.line and "importlib" not in f.filename]
    if frames:
        statement = re.match(r"(?:from|import)\s+([\w.]+)", frames[-1].line or "")
        if statement and statement[1].startswith(missing + "."):
            return statement[1]
    return missing


def _provides(requirement: str, library: str) -> bool:
    """Whether a distribution of that name is the one that has a module of that name."""
    parts = library.split(".")
    prefixes = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return any(normalise(requirement) == normalise(_OTHERWISE_NAMED.get(p, p)) for p in prefixes)


# ------------------------------------------------------------------------------------------------------- contracts


def keeps(cls: type, contract: type) -> bool:
    """Whether a class derives from a contract and leaves nothing of it open."""
    return issubclass(cls, contract) and not lacking(cls, contract)


def lacking(cls: type, contract: type) -> list[str]:
    """Methods of a contract that a class leaves open, as ``__call__(inputs, outputs)``."""
    missing = []
    for name in sorted(getattr(contract, "__abstractmethods__", ())):
        # not getattr: every class has its metaclass's __call__
        mine = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
        if mine is None or getattr(mine, "__isabstractmethod__", False):
            parameters = list(inspect.signature(getattr(contract, name)).parameters.values())[1:]
            fixed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
            missing.append(f"{name}({', '.join(fixed)})")
    return missing
