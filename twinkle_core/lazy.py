"""Modules whose names are imported when they are asked for (L0). Imports nothing itself."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def attach(
    module: str, names: Mapping[str, str] | None = None, *, kind: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a module.

    Args:
        module: its ``__name__``.
        names: name -> ``"module:attribute"`` where it lives; ``"module:"`` means that module itself.
        kind: a kind of components whose class names it has too: all that are installed, third parties' included.
    """
    table = dict(names or {})

    def get(name: str) -> Any:
        if name in table:
            from importlib import import_module

            home, _, attribute = table[name].partition(":")
            found = import_module(home)
            return getattr(found, attribute) if attribute else found
        if kind and name[:1].isupper():
            from twinkle_core import errors, registry

            try:
                return registry.resolve(kind, name)
            except errors.UnknownName as error:
                raise errors.UnknownClass(str(error)) from None
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    def names_of() -> list[str]:
        if not kind:
            return sorted(table)
        from twinkle_core import registry

        return sorted({*table, *(entry.cls for entry in registry.entries(kind) if entry.cls[:1].isupper())})

    return get, names_of, sorted(table)
