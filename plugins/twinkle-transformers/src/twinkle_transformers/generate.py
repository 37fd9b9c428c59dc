"""Completions by transformers' own ``generate``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from twinkle_core.errors import BadArgument, BadGeneration, BadRow, ReservedArgument, WrongArgument
from twinkle_core.names import closest
from twinkle_core.processors.input import join_media
from twinkle_core.train.limits import check_count
from twinkle_core.types import InputFeature
from twinkle_transformers.inputs import vocabulary_of
from twinkle_transformers.vision import fit_media, token_types

#: what ``complete`` itself gives to transformers
_FILLED = frozenset({"inputs", "input_ids", "inputs_embeds", "attention_mask"})


def check_options(owner: str, module: Any, options: Mapping[str, Any]) -> None:
    """Raise for an option that transformers' ``generate`` doesn't know, or that would give no text or several for a row.

    Raises:
        ReservedArgument, WrongArgument, BadArgument
    """
    known = {*module.generation_config.to_dict(), *inspect.signature(module.generate).parameters} - {"kwargs"} - _FILLED
    for key in options:
        if key in _FILLED:
            raise ReservedArgument(owner, key)
        if key not in known and not hasattr(module.generation_config, key):
            raise WrongArgument(owner, key, closest(key, known), sorted(k for k in known if not k.startswith("_")))
    if options.get("max_new_tokens") is not None:
        check_count("max_new_tokens", options["max_new_tokens"], least=1)
    if options.get("num_return_sequences") not in (None, 1):
        way = "1: each row gets one text (for several, give the row several times)"
        raise BadArgument("num_return_sequences", options["num_return_sequences"], way)
    if options.get("return_dict_in_generate"):
        raise BadArgument("return_dict_in_generate", options["return_dict_in_generate"], "False: texts are given back")


@contextlib.contextmanager
def drawing_from(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Inside, random numbers are those of a seed that is drawn from ``generator``; on leaving, the random state of torch and of
    the device are what they were. transformers draws from the global state alone. None: that state, which moves on."""
    if generator is None:
        yield
        return
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    there = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(there, device_type=device.type if there else "cuda"):
        torch.default_generator.manual_seed(seed)
        if there:
            with device:
                torch.get_device_module(device).manual_seed(seed)
        yield


def complete(
    module: Any,
    rows: Sequence[InputFeature],
    device: torch.device,
    options: Mapping[str, Any],
    *,
    generator: torch.Generator | None = None,
    keep_end: bool = False,
) -> list[list[int]]:
    """One completion for each prompt, without the prompt and without what follows its end token.

    Prompts are padded on the left, because a completion begins at the right. Options that are not given are the model's own
    generation config, except that at most 128 tokens are made instead of filling a cache of unknown size.

    Args:
        generator: where random numbers come from; None: the global state.
        keep_end: leave the end token on.

    Raises:
        BadRow: a prompt. BadGeneration: transformers refuses the options.
    """
    size = vocabulary_of(module)
    prompts = [_prompt(i, row, size) for i, row in enumerate(rows)]
    longest = max(len(p) for p in prompts)
    config = module.generation_config
    ends = config.eos_token_id if options.get("eos_token_id") is None else options["eos_token_id"]
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = config.pad_token_id if config.pad_token_id is not None else ends[0] if ends else 0
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    settings = {"pad_token_id": pad, **options, "num_return_sequences": 1, "return_dict_in_generate": False}
    if not {"max_new_tokens", "max_length", "generation_config"} & set(settings):
        settings["max_new_tokens"] = 128
    seen = _seen(module, rows, ids, mask)
    try:
        with drawing_from(generator, device):
            made = module.generate(input_ids=ids, attention_mask=mask, **seen, **settings)[:, longest:].tolist()
    except (ValueError, TypeError) as error:
        raise BadGeneration(options, error) from error
    return [_until_end(row, ends, keep_end) for row in made]


def _seen(module: Any, rows: Sequence[InputFeature], ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Images and videos of the prompts, and which tokens they are.

    Raises:
        BadRow: a row whose tokens and pixels differ, or pixels for a model that sees none.
    """
    media = join_media(rows)
    batch: dict[str, Any] = {"input_ids": ids.cpu(), "attention_mask": mask.cpu(), **media}
    fit_media(module, batch)
    takes = inspect.signature(module.forward).parameters
    seen = {name: value.to(ids.device) for name, value in media.items() if name in takes}
    if seen and "mm_token_type_ids" in takes:
        seen["mm_token_type_ids"] = token_types(module, batch).to(ids.device)
    return seen


def _prompt(index: int, row: Mapping[str, Any], vocabulary: int | None) -> list[int]:
    """The ids of one row without its padding.

    Raises:
        BadRow: there is none, or what it holds are no token ids of the model.
    """
    if row.get("input_ids") is None:
        raise BadRow.missing(index, "input_ids", row)
    ids, mask = _flat(index, row, "input_ids"), None
    if row.get("attention_mask") is not None:
        mask = _flat(index, row, "attention_mask")
        if len(mask) != len(ids):
            raise BadRow.length(index, "attention_mask", len(mask), len(ids))
        ids = ids[mask.bool()]
    if not len(ids):
        raise BadRow.field(index, "input_ids", "is empty" if mask is None else "is empty where 'attention_mask' is not 0")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise BadRow.field(index, "input_ids", f"holds {ids.dtype}, not token ids")
    found: list[int] = ids.tolist()
    wrong = next((i for i in (min(found), max(found)) if i < 0 or (vocabulary is not None and i >= vocabulary)), None)
    if wrong is not None:
        raise BadRow.field(index, "input_ids", f"holds {wrong}; a token id of this model is 0 to {(vocabulary or 0) - 1}")
    return found


def _flat(index: int, row: Mapping[str, Any], field: str) -> torch.Tensor:
    try:
        return torch.as_tensor(row[field], device="cpu").flatten()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadRow.field(index, field, f"can't be made a tensor ({error})") from error


def _until_end(ids: list[int], ends: Sequence[int], keep_end: bool) -> list[int]:
    stop = next((i for i, token in enumerate(ids) if token in ends), None)
    return ids if stop is None else ids[: stop + keep_end]
