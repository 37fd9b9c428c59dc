"""Metrics into a file, one line of JSON each time that they are read (L0)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core import settings
from twinkle_core.hookspecs import hookimpl
from twinkle_core.log import get_logger

if TYPE_CHECKING:
    from twinkle_core.train.session import Session


class JsonLinesWriter:
    """One line of JSON for each ``calculate_metric``.

    A line holds ``step`` (optimizer updates so far), the metrics' own numbers (those of evaluation as ``eval_…``) and
    ``seconds`` of the run so far: since this writer was made, after those of the last line that is kept. Numbers that are not
    finite are null. Written by rank 0, each line at once.

    Args:
        path: the file. Folders are made where absent; what a file of that name holds is dropped, but for the lines of ``done``.
            Of these, one that can't be read is kept as it is, with a warning.
        done: optimizer updates that a resumed run has behind it. Lines up to there stay; later ones, of a run that went
            further, will be written again.
        adapter_name: write this adapter's metrics alone ('' is the base model); None: of all adapters and models.
        more: what else a line holds, asked for at each.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(
        self,
        path: str | Path,
        done: int = 0,
        *,
        adapter_name: str | None = None,
        more: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.path = Path(path)
        self._adapter, self._more = adapter_name, more
        self._start = time.perf_counter()
        if settings.rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = (
                [(line, row) for line, row in _rows(self.path) if row is None or _number(row, "step") <= done] if done else []
            )
            self.path.write_bytes(b"".join(line + b"\n" for line, _ in kept))
            self._start -= max((_number(row, "seconds") for _, row in kept if row is not None), default=0)

    @hookimpl
    def twinkle_metrics_logged(self, step: int, metrics: Mapping[str, float], session: Session, is_training: bool) -> None:
        """Write a line."""
        if not metrics or settings.rank() != 0 or self._adapter not in (None, session.name):
            return
        prefix = "" if is_training else "eval_"
        row = {"step": step, **self._more()} | {f"{prefix}{name}": value for name, value in metrics.items() if name != "step"}
        row["seconds"] = round(time.perf_counter() - self._start, 3)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no word for infinity, nor for what is no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name, 0)
    return value if isinstance(value, int | float) else 0


def read(path: str | Path) -> list[dict[str, Any]]:
    """The lines of such a file; none where there is no file.

    A last line that was cut short by a crash is left out; so is one that holds no JSON object, with a warning.
    """
    return [row for _, row in _rows(Path(path)) if row is not None]


def _rows(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Each line with what it holds; None where that is no JSON object. Without the last one, if it was cut short."""
    # split at line feeds alone: a text may hold other signs that str.splitlines takes for line ends
    *whole, last = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    rows = [(line, _parsed(line)) for line in whole if line.strip()]
    odd = [number for number, line in enumerate(whole, 1) if line.strip() and _parsed(line) is None]
    if odd:
        some = ", ".join(map(str, odd[:5])) + (", ..." if len(odd) > 5 else "")
        get_logger("listeners").warning("%s: not a JSON object in line %s; left as it is", path, some)
    ending = _parsed(last)
    return rows if ending is None else [*rows, (last, ending)]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return None
    return row if isinstance(row, dict) else None
