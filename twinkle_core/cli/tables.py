"""Rows in columns (L0)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twinkle_core.errors import WHY, shown


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns, each cell one line, two spaces apart, a line of dashes under the header."""
    body = [list(map(shown, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = [list(header), ["-" * width for width in widths], *body]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def pairs(rows: Iterable[tuple[str, str]], indent: int = 4) -> str:
    """``name  value`` lines; lines of a value after the first stand under it."""
    body = list(rows)
    width = max((len(name) for name, _ in body), default=0)
    gap = "\n" + " " * (indent + width + 2)
    return "\n".join(
        f"{' ' * indent}{name.ljust(width)}  {gap.join(shown(line, WHY) for line in value.splitlines())}".rstrip()
        for name, value in body
    )
