"""What a run notes about itself in its folder: its configuration, and what fixes the order of its rows (L0 at import)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from twinkle_core import errors, hub
from twinkle_core.config.schema import DatasetConfig, TrainConfig
from twinkle_core.log import get_logger

DATA_ORDER = "data_order.json"
#: the fingerprint of the data in it
CONTENT = "content"


def write_config(config: TrainConfig, folder: Path) -> None:
    """What was asked for, overrides included, as ``config.yaml``."""
    import yaml

    text = yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def drawing(config: TrainConfig) -> dict[str, Any]:
    """What the configuration alone says of the order of rows; the batch size is not among it."""
    shuffle = config.dataloader.shuffle
    return {"shuffle": shuffle, "seed": config.training.seed if shuffle else None}


def data_order(config: TrainConfig, rows: int, content: str) -> dict[str, Any]:
    """Everything that says which row comes when.

    Args:
        rows: that are drawn.
        content: ``fingerprint`` of the data.
    """
    dataset = [_identity(part) for part in config.dataset]
    return {"rows": rows, CONTENT: content, **drawing(config), "dataset": dataset, "dataset_mix": config.dataset_mix}


def fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    """A hash of the rows in their order, as they are before a template encodes them."""
    content = hashlib.sha256()
    for row in rows:
        text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=_plain)
        content.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return content.hexdigest()[:32]


def _plain(value: Any) -> Any:
    """What JSON does not hold; nothing that another process would print otherwise."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else type(value).__name__


def _identity(part: DatasetConfig) -> dict[str, Any]:
    known = part.model_dump(mode="json", include={"id", "subset", "split", "slice"})
    return known if "://" in part.id or hub.is_hub_id(part.id) else known | {"id": str(Path(part.id))}


def write_data_order(order: dict[str, Any], folder: Path) -> None:
    """For those who resume."""
    (folder / DATA_ORDER).write_text(json.dumps(order, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_data_order(order: dict[str, Any], checkpoint: Path) -> None:
    """Compare with the run that wrote ``checkpoint``; a warning where its folder does not tell.

    Args:
        order: ``data_order``, or the part of it that is known yet. Where the content is the same, its name may be another.

    Raises:
        DataOrderChanged: the rows would come in another order, so that some are seen twice and others never.
    """
    file = checkpoint.parent / DATA_ORDER
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    if not isinstance(before, dict):
        before = {}
    untold = [key for key in order if key not in {"dataset", "dataset_mix", *before}]
    if untold and CONTENT in order:  # once, when all is known
        get_logger().warning(
            "resume: %s does not tell the run's %s, so it can't be checked that the rows go on where they were: "
            "with other data, seed or shuffle some would be seen twice and others never",
            file, ", ".join(untold),
        )  # fmt: skip
    different = [(key, before[key], now) for key, now in order.items() if key in before and before[key] != now]
    if CONTENT in order and before.get(CONTENT) == order[CONTENT]:
        different = [(key, *values) for key, *values in different if key not in ("dataset", "dataset_mix")]
    if different:
        raise errors.DataOrderChanged(checkpoint, file, different)
