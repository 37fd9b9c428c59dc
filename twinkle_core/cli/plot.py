"""A picture of the loss over a run (L0 at import)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def running_mean(values: Sequence[float]) -> tuple[list[float] | None, int]:
    """The mean of each value with those before it, a tenth of the curve at most; None for a curve too short to smooth."""
    window = len(values) // 10
    if window < 2:
        return None, window
    spans = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(span) / len(span) for span in spans], window


def draw(rows: Iterable[Mapping[str, Any]], path: Path, title: str, unit: str = "nats a token") -> str | None:
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
    axes.set(xlabel="step (updates of the weights)", ylabel=f"loss ({unit})", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return None
