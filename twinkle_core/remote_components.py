"""Components that live in a repository of a hub: ``hf://owner/repo#Class`` (L0).

Such a repository is a Python package: an ``__init__.py`` at its top that holds or imports the class. Its code runs in this
process with all its rights, so nothing is fetched before ``TWINKLE_TRUST_REMOTE_CODE=1`` says so. Each repository is loaded
under a module name of its own and can shadow nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from twinkle_core import settings
from twinkle_core.errors import BadRemoteComponent, RemoteCodeRefused, TwinkleError
from twinkle_core.isolation import attempt
from twinkle_core.names import fold

SCHEMES = ("ms", "hf")


def load(kind: str, reference: str) -> Any:
    """The class of ``scheme://owner/repo#Class``; without ``#Class`` the only public class that the package defines.

    Raises:
        RemoteCodeRefused: running such code is off. BadRemoteComponent: another scheme, no package, no such class.
        The hub's own errors when it can't be fetched.
    """
    repository, _, wanted = reference.partition("#")
    scheme = repository.partition("://")[0]
    if scheme not in SCHEMES:
        raise BadRemoteComponent(kind, reference, f"'{scheme}://' is no hub; it is ms:// or hf://")
    if not settings.trust_remote_code():
        raise RemoteCodeRefused(kind, reference, settings.fault("TWINKLE_TRUST_REMOTE_CODE"))
    from twinkle_core import hub

    module = _package(kind, reference, repository, Path(hub.resolve(repository)))
    public = {n: o for n, o in vars(module).items() if inspect.isclass(o) and o.__module__.startswith(module.__name__)}
    if wanted:
        found = [o for n, o in vars(module).items() if not n.startswith("_") and fold(kind, n) == fold(kind, wanted)]
    else:
        found = [o for n, o in public.items() if not n.startswith("_")]
    if len(found) != 1:
        names = ", ".join(n for n in public if not n.startswith("_")) or "no class"
        raise BadRemoteComponent(kind, reference, f"the package defines {names}")
    return found[0]


def _package(kind: str, reference: str, repository: str, folder: Path) -> ModuleType:
    """Run a repository's package, once for each folder it was fetched to."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    name = f"twinkle_remote_{re.sub(r'[^0-9A-Za-z]+', '_', repository)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    source = folder / "__init__.py"
    if not source.is_file():
        raise BadRemoteComponent(kind, reference, f"{folder} has no __init__.py")
    spec = importlib.util.spec_from_file_location(name, source, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None  # a file that exists has both
    loader, module = spec.loader, importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    ran = attempt(lambda: loader.exec_module(module))
    if ran.error is not None:
        for loaded in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            del sys.modules[loaded]
        if isinstance(ran.error, TwinkleError):
            raise ran.error
        raise BadRemoteComponent(kind, reference, ran.why) from ran.error
    return module
