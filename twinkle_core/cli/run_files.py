"""What a run notes about itself in its folder: its configuration, and what fixes the order of its rows (L0 at import)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twinkle_core import errors, hub
from twinkle_core.config.schema import DatasetConfig, TrainConfig

DATA_ORDER = "data_order.json"


def write_config(config: TrainConfig, folder: Path) -> None:
    """What was asked for, overrides included, as ``config.yaml``."""
    import yaml

    text = yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def data_order(config: TrainConfig, rows: int) -> dict[str, Any]:
    """Everything that says which row comes when; the batch size is not among it."""
    shuffle = config.dataloader.shuffle
    return {
        "rows": rows,
        "shuffle": shuffle,
        "seed": config.training.seed if shuffle else None,
        "dataset": [_identity(part) for part in config.dataset],
        "dataset_mix": config.dataset_mix if len(config.dataset) > 1 else None,
    }


def _identity(part: DatasetConfig) -> dict[str, Any]:
    known = part.model_dump(mode="json", include={"id", "subset", "split", "slice"})
    return known if "://" in part.id or hub.is_hub_id(part.id) else known | {"id": str(Path(part.id))}


def write_data_order(order: dict[str, Any], folder: Path) -> None:
    """For those who resume."""
    (folder / DATA_ORDER).write_text(json.dumps(order, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_data_order(order: dict[str, Any], checkpoint: Path) -> None:
    """Compare with the run that wrote ``checkpoint``, if its folder tells.

    Raises:
        DataOrderChanged: the rows would come in another order, so that some are seen twice and others never.
    """
    file = checkpoint.parent / DATA_ORDER
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # a checkpoint that was copied away from its run
    if not isinstance(before, dict):
        return
    different = [(key, before[key], now) for key, now in order.items() if key in before and before[key] != now]
    if different:
        raise errors.DataOrderChanged(checkpoint, file, different)
