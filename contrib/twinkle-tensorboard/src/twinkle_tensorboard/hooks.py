"""What twinkle loads where this distribution is installed: each run from a configuration writes for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twinkle_core import hookimpl, plugins
from twinkle_tensorboard.writer import TensorBoardWriter

NAME = "twinkle-tensorboard"


@hookimpl
def twinkle_configure(config: Any) -> None:
    """Listen to the run that begins, and no longer to one before it in this process."""
    plugins.unregister(NAME)
    plugins.register(TensorBoardWriter(Path(config.output_dir).expanduser() / "tensorboard"), NAME)
