"""Metrics of training as scalars. TensorBoard is imported at the first of them, so that being installed costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core import hookimpl, settings

if TYPE_CHECKING:
    from twinkle_core.train.session import Session


class TensorBoardWriter:
    """Writes what ``calculate_metric`` reads: ``train/<name>`` and ``eval/<name>`` over optimizer updates. Rank 0 alone.

    Args:
        folder: of this run; made at the first number. Points of a run before, from the first step of this one on, are replaced.
        adapter_name: write this adapter's metrics alone ('' is the base model); None: of all adapters and models.
    """

    def __init__(self, folder: str | Path, *, adapter_name: str | None = None) -> None:
        self.folder = Path(folder)
        self._adapter = adapter_name
        self._writer: Any = None

    @hookimpl
    def twinkle_metrics_logged(self, step: int, metrics: Mapping[str, float], session: Session, is_training: bool) -> None:
        """Write each number; seen at once by a TensorBoard that runs beside."""
        if not metrics or settings.rank() != 0 or self._adapter not in (None, session.name):
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=step)
        group = "train" if is_training else "eval"
        for name, value in metrics.items():
            if name != "step":
                self._writer.add_scalar(f"{group}/{name}", value, step)
        self._writer.flush()

    @hookimpl
    def twinkle_shutdown(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
