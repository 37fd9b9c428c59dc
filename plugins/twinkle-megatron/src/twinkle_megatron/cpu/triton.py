"""Stands for ``triton`` while modules with GPU kernels are imported: they name it in decorators, and are not used."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any


class _Anything(types.ModuleType):
    """Has every attribute; as a decorator it gives back what it decorates."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything("value")


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Inside, ``import triton`` works; afterwards nothing of it is left, so that no library takes it for the real one."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    import torch._inductor.runtime.triton_compat  # noqa: F401  (torch sees first that it is absent)

    names = ("triton", "triton.language")
    for name in names:
        module: Any = _Anything(name)
        module.__spec__, module.__version__ = importlib.machinery.ModuleSpec(name, None), "0.0.0"
        sys.modules[name] = module
    vars(sys.modules["triton"])["language"] = sys.modules["triton.language"]
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
