"""A picture of the loss over a run (L0 at import)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def draw(rows: Iterable[Mapping[str, Any]], path: Path, title: str) -> str | None:
    """Draw loss (and evaluation loss) over steps into a PNG.

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
        if points:
            axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 40 else None, markersize=3, label=name)
    axes.set(xlabel="step (updates of the weights)", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return None
