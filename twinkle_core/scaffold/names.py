"""What a new distribution is called, and why it can't be called so (L0)."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path

from twinkle_core import index, registry
from twinkle_core.errors import BadPluginName
from twinkle_core.known import FIRST_PARTY
from twinkle_core.names import normalise

OURS = "twinkle"
LONGEST = 100  # signs; file systems allow 255 for a name, and test files have longer ones


def package_of(name: str) -> str:
    """``acme``, ``acme-losses``, ``AcmeLosses`` -> ``acme``, ``acme_losses``, ``acme_losses``: a Python package.

    Raises:
        BadPluginName: nobody could import it, or it would hide a module of Python's.
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    package = re.sub(r"[-_.\s]+", "_", words).strip("_").lower()
    if not package:
        raise BadPluginName(name, "it holds no letter")
    if len(package) > LONGEST:
        raise BadPluginName(name, f"it has {len(package)} signs, and {LONGEST} are the most")
    if not (package.isascii() and package.isidentifier()):
        raise BadPluginName(name, "letters of a to z, digits, '-' and '_' make a package's name, a letter first")
    if keyword.iskeyword(package):
        raise BadPluginName(name, f"'{package}' is a word of Python's language")
    if package in sys.stdlib_module_names:
        raise BadPluginName(name, f"'{package}' is a module of Python's standard library")
    return package


def check_free(name: str, package: str, kind: str | None) -> None:
    """Raise BadPluginName where somebody has that name: a distribution or module here, or twinkle's own of that kind.

    Args:
        name: as it was given.
        package: of ``package_of``.
        kind: of the component; None for hooks, which nobody asks for by name.
    """
    distribution = normalise(package)
    if distribution == OURS or distribution in FIRST_PARTY:
        raise BadPluginName(name, f"{distribution} is a distribution of twinkle's own")
    whose = registry.owner(kind, package) if kind else ""
    if whose:
        raise BadPluginName(name, f"{whose} has a {kind} of this name, and a name of twinkle's own is never another's")
    found = index.distribution(distribution)
    if found is not None:
        raise BadPluginName(name, f"{distribution} {found.version} is installed in {sys.prefix}")
    spec = importlib.util.find_spec(package)
    if spec is not None and not _only_here(spec.origin, spec.submodule_search_locations or ()):
        raise BadPluginName(name, f"a package '{package}' can be imported here already ({spec.origin or 'a namespace'})")


def _only_here(origin: str | None, places: object) -> bool:
    """Whether it is a plain folder of the working directory, which ``python -m`` would take for a package."""
    here = Path.cwd()
    return origin is None and all(Path(place).parent == here for place in places)  # type: ignore[attr-defined]
