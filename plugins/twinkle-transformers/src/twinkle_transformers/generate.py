"""Completions by transformers' own ``generate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from twinkle_core.types import InputFeature


def complete(module: Any, rows: Sequence[InputFeature], device: torch.device, options: Mapping[str, Any]) -> list[list[int]]:
    """One completion for each prompt, without the prompt and without what follows its end token.

    Prompts are padded on the left, because a completion begins at the right. Options that are not given are the model's own
    generation config, except that at most 128 tokens are made instead of filling a cache of unknown size.
    """
    prompts = [_ids(row) for row in rows]
    longest = max(len(p) for p in prompts)
    config = module.generation_config
    ends = config.eos_token_id if options.get("eos_token_id") is None else options["eos_token_id"]
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = config.pad_token_id if config.pad_token_id is not None else ends[0] if ends else 0
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    settings = {"pad_token_id": pad, **options}
    if not {"max_new_tokens", "max_length", "generation_config"} & set(settings):
        settings["max_new_tokens"] = 128
    made = module.generate(input_ids=ids, attention_mask=mask, **settings)[:, longest:].tolist()
    return [_until_end(row, ends) for row in made]


def _ids(row: Mapping[str, Any]) -> list[int]:
    ids, mask = row["input_ids"], row.get("attention_mask")
    if isinstance(ids, torch.Tensor):
        ids = ids.flatten()
        return ids[mask.flatten().bool()].tolist() if isinstance(mask, torch.Tensor) else ids.tolist()
    return list(ids)


def _until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    stop = next((i for i, token in enumerate(ids) if token in ends), None)
    return ids if stop is None else ids[:stop]
