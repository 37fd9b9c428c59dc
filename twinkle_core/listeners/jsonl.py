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

if TYPE_CHECKING:
    from twinkle_core.train.session import Session


class JsonLinesWriter:
    """One line of JSON for each ``calculate_metric``.

    A line holds ``step`` (optimizer updates so far), the metrics' own numbers (those of evaluation as ``eval_…``) and
    ``seconds`` since this writer was made. Numbers that are not finite are null. Written by rank 0, each line at once.

    Args:
        path: the file. Folders are made where absent; what a file of that name holds is dropped, but for the lines of ``done``.
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
            kept = [row for row in read(self.path) if row.get("step", 0) <= done] if done else []
            self.path.write_text("".join(_line(row) for row in kept), encoding="utf-8")

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
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(plain, ensure_ascii=False) + "\n"


def read(path: str | Path) -> list[dict[str, Any]]:
    """The lines of such a file; none where there is no file. A last line that was cut short by a crash is left out."""
    path = Path(path)
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
