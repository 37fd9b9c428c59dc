"""What models that see images and videos need of a batch: as many tokens as pictures have, and positions in three axes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from twinkle_core.errors import BadInputs, BadRow
from twinkle_core.processors.input import row_lengths
from twinkle_core.types import MEDIA_FIELDS

#: kind -> its pixels, its grid, its number in mm_token_type_ids
_KINDS = {"image": ("pixel_values", "image_grid_thw", 1), "video": ("pixel_values_videos", "video_grid_thw", 2)}


def fit_media(module: Any, batch: dict[str, Any], first: int = 0) -> None:
    """Check a collated batch's images and videos, and put in the positions that the model would compute of them.

    Args:
        batch: changed in place: ``position_ids`` become ``[3, B, T]`` where a model with rotary positions of three axes sees
            images, and ``[4, 1, T]`` in a packed sequence, the first of which are the text's: they begin anew with each sample.
        first: number of the first row, for error texts.

    Raises:
        BadRow: a row with more or fewer tokens of images than its pixels make, or pixels for a model that sees none. BadInputs
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        return
    given = [name for name in MEDIA_FIELDS if batch.get(name) is not None]
    takes = inspect.signature(module.forward).parameters
    # times of a video's frames are in the text of some models, which need no field for them
    unknown = next((name for name in given if name not in takes and name != "second_per_grid_ts"), None)
    if unknown is not None:
        raise BadRow.field(first + _first_with(batch, unknown), unknown, f"is not for {type(module).__name__}: {_BLIND}")
    if ids.device.type == "cpu":
        for kind in _KINDS:
            _check_tokens(module, batch, kind, first)
    rope = rope_index_of(module)
    if rope is None:
        return
    if _samples(batch) is not None:
        positions = batch.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.dim() == 2:
            batch["position_ids"] = packed_positions(module, batch)
    elif any(batch.get(grid) is not None for _, grid, _ in _KINDS.values()):
        positions = batch.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.dim() == 2:
            batch["position_ids"] = _positions(rope, {**batch, "mm_token_type_ids": token_types(module, batch)})


_BLIND = "it sees no such thing. Load the model with model_cls='AutoModelForImageTextToText', or leave images out of the rows"


def rope_index_of(module: Any) -> Any:
    """The model's own function from tokens and grids to positions ``[3, B, T]``; None where its positions have one axis."""
    for part in (module, getattr(module, "base_model", None), getattr(module, "model", None)):
        found = getattr(part, "get_rope_index", None)
        if found is not None:
            return found
    return None


def parts_that_see(module: Any) -> list[str]:
    """Names of the parts of a model that turn pictures into vectors of its language model; none where it has no such parts."""
    if getattr(getattr(module, "config", None), "vision_config", None) is None or not hasattr(module, "get_decoder"):
        return []
    decoder, layer = module.get_decoder(), module.get_output_embeddings()
    if decoder in (None, module):
        return []

    def walk(part: Any, prefix: str) -> list[str]:
        found: list[str] = []
        for name, child in part.named_children():
            if child is decoder or child is layer:
                continue
            holds = any(m is decoder or m is layer for m in child.modules())
            found += walk(child, f"{prefix}{name}.") if holds else [f"{prefix}{name}"]
        return found

    return walk(module, "")


def packed_positions(module: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """``[4, 1, T]``: the text's positions, by which attention tells samples apart, and those of the rotation, each sample as
    it would be alone."""
    ids, types = batch["input_ids"], token_types(module, batch)
    rope, parts, at = rope_index_of(module), [], 0
    grids = {name: batch[name] for name in MEDIA_FIELDS if batch.get(name) is not None and not name.startswith("pixel")}
    lengths = _samples(batch) or [ids.shape[1]]
    for number, length in enumerate(lengths):
        text = torch.arange(length, device=ids.device).expand(1, 1, length)
        piece: dict[str, Any] = {"input_ids": ids[:, at : at + length], "mm_token_type_ids": types[:, at : at + length]}
        for name, grid in grids.items():
            counts = (batch.get("row_counts") or {}).get(name, ())
            if len(counts) != len(lengths) or sum(counts) != len(grid):
                raise BadInputs(f"a packed batch with '{name}' needs 'row_counts', which sample has how many (and 'seq_lens')")
            start = sum(counts[:number])
            if counts[number]:
                piece[name] = grid[start : start + counts[number]]
        seen = any(name in piece for name in ("image_grid_thw", "video_grid_thw"))
        turned = _positions(rope, piece) if seen else text.expand(3, 1, length)
        parts.append(torch.cat([text, turned]))
        at += length
    return torch.cat(parts, dim=2)


def _samples(batch: Mapping[str, Any]) -> list[int] | None:
    """Lengths of a packed batch's samples; None where it is not packed."""
    positions = batch.get("position_ids")
    if batch.get("seq_lens") is None and (
        batch.get("attention_mask") is not None
        or not isinstance(positions, torch.Tensor)
        or positions.shape != batch["input_ids"].shape
        or len(positions) != 1
    ):
        return None
    lengths = row_lengths(batch)
    return lengths if batch.get("seq_lens") is not None or len(lengths) > 1 else None


def _positions(rope: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    wanted = ("input_ids", "mm_token_type_ids", "attention_mask", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    given = {name: batch[name] for name in wanted if batch.get(name) is not None}
    return rope(**given)[0]  # type: ignore[no-any-return]


def token_types(module: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """0 text, 1 image, 2 video for each token: what rows bring, or made of their tokens."""
    types = batch.get("mm_token_type_ids")
    if types is not None:
        return types  # type: ignore[no-any-return]
    types = torch.zeros_like(batch["input_ids"])
    for kind, (_, _, number) in _KINDS.items():
        token = getattr(module.config, f"{kind}_token_id", None)
        if token is not None:
            types[batch["input_ids"] == token] = number
    return types


# ---------------------------------------------------------------------------------------------------- tokens and pixels


def _check_tokens(module: Any, batch: Mapping[str, Any], kind: str, first: int) -> None:
    config = getattr(module, "config", None)
    token = getattr(config, f"{kind}_token_id", None)
    if token is None:
        return
    pixels, grid, _ = _KINDS[kind]
    if grid in inspect.signature(module.forward).parameters and (batch.get(grid) is None) != (batch.get(pixels) is None):
        given, missing = (grid, pixels) if batch.get(pixels) is None else (pixels, grid)
        raise BadInputs(f"the batch has '{given}' without '{missing}'; a row has both of its images, or neither")
    made = _features(config, batch, pixels, grid)
    if made is None:
        return
    there = _tokens(batch, token)
    if len(made) != len(there):  # collated by somebody who does not say which row has which
        made, there = [sum(made)], [sum(there)]
    row = next((k for k, (a, b) in enumerate(zip(made, there, strict=True)) if a != b), None)
    if row is not None:
        who = "" if len(there) > 1 or _rows(batch) == 1 else f" (all {_rows(batch)} rows together)"
        way = f"has {there[row]} tokens of {kind}s (id {token}){who}, and {pixels!r} makes {made[row]}"
        raise BadRow.field(first + row, "input_ids", f"{way}; they must be encoded together, and cut together")
    if batch.get(grid) is not None:
        _check_patches(batch, pixels, grid, first)


def _check_patches(batch: Mapping[str, Any], pixels: str, grid: str, first: int) -> None:
    """As many patches in each row as its grids say: else one row would see what belongs to another."""
    counts = batch.get("row_counts") or {}
    need = _by_row([int(n) for n in batch[grid].prod(-1)], counts.get(grid))
    have = list(counts.get(pixels) or [len(batch[pixels])])
    if len(need) != len(have):
        need, have = [sum(need)], [sum(have)]
    for row, (a, b) in enumerate(zip(have, need, strict=True)):
        if a != b:
            raise BadRow.field(first + row, pixels, f"has {a} patches, and {grid!r} speaks of {b}")


def _rows(batch: Mapping[str, Any]) -> int:
    return len(_samples(batch) or batch["input_ids"])


def _tokens(batch: Mapping[str, Any], token: int) -> list[int]:
    """How often a token stands in each row, padding left out."""
    found = batch["input_ids"] == token
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == found.shape:
        found = found & (mask != 0)
    lengths = _samples(batch)
    pieces: Sequence[torch.Tensor] = found[0].split(lengths) if lengths is not None else list(found)
    return [int(piece.sum()) for piece in pieces]


def _features(config: Any, batch: Mapping[str, Any], pixels: str, grid: str) -> list[int] | None:
    """How many tokens each row's pictures make (all rows' together in one number, if nothing says which row has which); None
    where the config does not tell."""
    counts = batch.get("row_counts") or {}
    if batch.get(grid) is not None:
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
        if merge is None:
            return None
        each = [int(n) // merge**2 for n in batch[grid].prod(-1)]
        return _by_row(each, counts.get(grid))
    if batch.get(pixels) is not None:
        per_tile = getattr(config, "image_seq_length", None)
        if per_tile is None or pixels != "pixel_values" or batch[pixels].dim() != 4:
            return None
        return _by_row([per_tile] * len(batch[pixels]), counts.get(pixels))
    return [0] * _rows(batch)


def _by_row(each: Sequence[int], counts: Sequence[int] | None) -> list[int]:
    if counts is None:
        return [sum(each)]
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    return [sum(each[end - n : end]) for end, n in zip(ends, counts, strict=True)]


def _first_with(batch: Mapping[str, Any], name: str) -> int:
    counts = (batch.get("row_counts") or {}).get(name, ())
    return next((k for k, n in enumerate(counts) if n), 0)
