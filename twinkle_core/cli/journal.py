"""What a run leaves to look at: a progress bar (or lines), ``metrics.jsonl``, and a plot of the loss (L0 at import)."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any


class Journal:
    """One line of JSON a logging step, and a bar on the terminal; where stderr is none, a line now and then instead.

    ``metrics.jsonl`` holds ``step``, ``epoch``, ``tokens_per_second``, ``seconds`` since this process began, and the metrics'
    own numbers (``loss``, ``lr``, ``grad_norm``, ...). Numbers that are not finite are null.

    Args:
        folder: where ``metrics.jsonl`` is; made where absent.
        total: steps of the whole run.
        done: steps that a resumed run has behind it; later lines in the file, of a run that went further, are dropped.
        bar: whether to draw the bar or to write the lines.
    """

    #: seconds between two lines
    every = 10.0

    def __init__(self, folder: Path, total: int, done: int = 0, bar: bool = True) -> None:
        from tqdm import tqdm

        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        kept = [row for row in read(self.path) if row.get("step", 0) <= done] if done else []
        self.path.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=done, unit="step", dynamic_ncols=True, disable=not (bar and on_terminal), smoothing=0.1
        )
        self._total, self._lines, self._told = total, bar and not on_terminal, -math.inf
        self._start = self._logged = time.perf_counter()
        self._tokens = 0

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def tokens(self, count: int) -> None:
        """Tokens that went through the model since the last call."""
        self._tokens += count

    def step(self) -> None:
        """A step is done."""
        self._bar.update(1)

    def log(self, step: int, epoch: float, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write a line and show the loss, the learning rate and the speed. Returns the line."""
        now = time.perf_counter()
        speed = self._tokens / max(now - self._logged, 1e-9)
        row = {"step": step, "epoch": round(epoch, 4)} | {k: v for k, v in values.items() if k != "step"}
        row |= {"tokens_per_second": round(speed, 1), "seconds": round(now - self._start, 3)}
        self._logged, self._tokens = now, 0
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        self._show(row, speed)
        return row

    def _show(self, row: Mapping[str, Any], speed: float) -> None:
        forms = {"loss": ".3f", "lr": ".1e"}
        shown = {name: f"{row[name]:{form}}" for name, form in forms.items() if isinstance(row.get(name), float)}
        shown["tok/s"] = f"{speed:.0f}"
        self._bar.set_postfix(shown)
        due = self._logged - self._told >= self.every or row["step"] == self._total
        if self._lines and due:
            self._told = self._logged
            text = ", ".join(f"{name}={value}" for name, value in shown.items())
            print(f"step {row['step']} of {self._total}: {text}", file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print a line above the bar."""
    from tqdm import tqdm

    tqdm.write(text)


def _line(row: Mapping[str, Any]) -> str:
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(plain, ensure_ascii=False) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; a last line that was cut short by a crash is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def running_mean(values: Sequence[float]) -> tuple[list[float] | None, int]:
    """The mean of each value with those before it, a tenth of the curve at most; None for a curve too short to smooth."""
    window = len(values) // 10
    if window < 2:
        return None, window
    spans = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(span) / len(span) for span in spans], window


def plot(rows: Iterable[Mapping[str, Any]], path: Path, title: str) -> str | None:
    """Draw loss (and evaluation loss) over steps into a PNG; a long curve of the loss pale, with its running mean over it.

    Returns:
        None, or why there is no plot: matplotlib is not installed, or nothing was logged.
    """
    rows = list(rows)
    curves = {name: [(r["step"], r[name]) for r in rows if r.get(name) is not None] for name in ("loss", "eval_loss")}
    if not any(curves.values()):
        return "no loss was logged"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed (pip install matplotlib)"
    figure = Figure(figsize=(7, 4), layout="constrained")  # without pyplot: no window, no state of the process's
    axes = figure.subplots()
    for name, points in curves.items():
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        mean, window = running_mean(values) if name == "loss" else (None, 0)
        alpha = 0.3 if mean is not None else None
        line = axes.plot(steps, values, marker="o" if len(points) < 40 else None, markersize=3, label=name, alpha=alpha)[0]
        if mean is not None:
            axes.plot(steps, mean, color=line.get_color(), linewidth=2, label=f"{name}, mean of {window} logged")
    axes.set(xlabel="step (updates of the weights)", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return None
