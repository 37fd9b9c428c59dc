"""Questions that are put to a model by running it on a few tokens, instead of keeping lists of model names."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from twinkle_core.errors import BadLayout, PackingLeaks
from twinkle_core.train.loop_engine import evaluating
from twinkle_transformers.precision import Precision
from twinkle_transformers.token_parts import TokenParts
from twinkle_transformers.tree import text_config
from twinkle_transformers.vision import rope_index_of

#: what configs call that which is done to logits after the output layer
_AFTER_THE_LAYER = ("softcap", "logit_scale", "logits_scaling", "lm_head_multiplier")
#: largest relative difference that rounding makes, by type
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def _differs(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest difference relative to the largest value; 0 where rounding explains it."""
    a, b = a.detach().double(), b.detach().double()
    gap = float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
    return gap if gap > _ROUNDING.get(dtype, 1e-4) or gap != gap else 0.0


def body_of(module: Any) -> Any:
    """The model without its output layer; itself, where it has none (``AutoModel``)."""
    return getattr(module, "base_model", module)


def outputs_of(result: Any) -> Any:
    """What a model says of each token: logits, or the last hidden states of one without an output layer; else None."""
    logits = getattr(result, "logits", None)
    return logits if logits is not None else getattr(result, "last_hidden_state", None)


def counts_from_zero(module: Any, precision: Precision, device: torch.device) -> bool:
    """Whether a model that is given no positions numbers a row's tokens 0, 1, 2, ..., as processors do.

    RoBERTa and its kin begin after the padding token's number, so positions from 0 would be others than they were trained on.
    """
    config: Any = getattr(module, "config", None)
    pad, body = getattr(config, "pad_token_id", None), body_of(module)
    size = getattr(config, "vocab_size", None) or 16
    ids = torch.tensor([[i for i in range(min(size, 16)) if i != pad][:8]], device=device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if "use_cache" in inspect.signature(body.forward).parameters:
        inputs["use_cache"] = False
    with evaluating(module), precision.autocast(device):
        alone = outputs_of(body(**inputs))
        told = outputs_of(body(**inputs, position_ids=torch.arange(ids.shape[1], device=device)[None]))
    return alone is None or told is None or not _differs(alone, told, alone.dtype)


def check_shared_tokens(module: Any, tokens: TokenParts, precision: Precision, device: torch.device) -> None:
    """Whether a model whose ranks share tokens between layers computes what it does when each has them all.

    Raises:
        BadLayout: something between its layers needs whole rows.
    """
    size, count = getattr(text_config(module), "vocab_size", None) or 16, 4 * tokens.size
    inputs: dict[str, Any] = {"input_ids": torch.arange(1, 1 + count, device=device)[None] % size}
    if caches(module):
        inputs["use_cache"] = False
    name, way = type(module).__name__, "leave sequence_parallel off"
    with evaluating(module), precision.autocast(device), torch.no_grad():
        whole = outputs_of(module(**inputs))
        try:
            with tokens.sharing():
                shared = outputs_of(module(**inputs))
        except (RuntimeError, ValueError, KeyError) as error:
            raise BadLayout(name, f"between its layers it can't compute parts of rows ({error}); {way}") from error
    if whole is None or shared is None or whole.shape != shared.shape or (gap := _differs(whole, shared, whole.dtype)):
        seen = f"by {gap:.1%}" if whole is not None and shared is not None and whole.shape == shared.shape else "in shape"
        raise BadLayout(name, f"with parts of rows between its layers its outputs differ {seen}; {way}")


def caches(module: Any) -> bool:
    """Whether the model keeps what generation needs unless ``use_cache=False`` says no. Some models that see hand the word on
    without naming it; with a cache they don't tell packed samples apart."""
    takes = inspect.signature(module.forward).parameters
    if "use_cache" in takes:
        return True
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    generates = hasattr(module, "can_generate") and module.can_generate()
    hands_on = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    return bool(generates and hands_on and getattr(text, "use_cache", False))


def output_layer_of(module: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether the model's logits are its output layer's output on the last hidden state, and nothing more.

    Runs the first tokens of a batch both ways: with the hidden state as it is, and with one so large that a cap shows, which
    today's small logits may not reach. What the config says of scales and caps counts too. Random numbers are not drawn,
    training flags are put back.
    """
    if _says_more(text_config(module)):
        return False
    layer, body = module.get_output_embeddings(), getattr(module, "base_model", None)
    if layer is None or body is None or body is module or "input_ids" not in inputs:
        return False
    takes = inspect.signature(body.forward).parameters
    if not set(inputs) <= set(takes) and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return False
    ids = inputs["input_ids"][:1, :8]
    few = {"input_ids": ids} | ({"use_cache": False} if "use_cache" in inputs else {})
    with evaluating(module):
        hidden = getattr(body(**few), "last_hidden_state", None)
        if hidden is None:
            return False
        logits, ours = module(**few).logits, layer(hidden)
        if ours.shape != logits.shape or _differs(ours, logits, ours.dtype):
            return False
        with _input_times(layer, _factor(hidden, ours)):  # wherever it is called from: in the model, and here
            logits, ours = module(**few).logits, layer(hidden)
    return _differs(ours, logits, ours.dtype) == 0.0


def _says_more(text: Any) -> bool:
    """Whether a config names something that is done to logits after the output layer."""
    values = vars(text) if text is not None else {}
    return any(
        value not in (None, False, 1)
        for name, value in values.items()
        if any(word in name for word in _AFTER_THE_LAYER) and not name.startswith("attn") and isinstance(value, (int, float))
    )


def _factor(hidden: torch.Tensor, logits: torch.Tensor) -> float:
    """What makes logits of about 1000, with hidden states that float16 still holds."""
    return min(1e3 / max(float(logits.abs().max()), 1e-6), 3e4 / max(float(hidden.abs().max()), 1e-6))


@contextlib.contextmanager
def _input_times(layer: torch.nn.Module, factor: float) -> Iterator[None]:
    handle = layer.register_forward_pre_hook(lambda _, args: (args[0] * factor, *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def check_isolation(module: Any, takes: frozenset[str], precision: Precision, device: torch.device) -> None:
    """Whether rows of a packed sequence keep apart: other tokens in row a must not move row b, and b must be what it is alone.

    Raises:
        PackingLeaks: with what was seen.
    """
    size = getattr(text_config(module), "vocab_size", None) or 16
    a, other, b = (torch.arange(start, start + n, device=device) % size for start, n in ((1, 5), (6, 5), (11, 4)))
    positions = torch.cat([torch.arange(5), torch.arange(4)]).to(device)[None]

    name = type(module).__name__

    def run(*rows: torch.Tensor) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": torch.cat(rows)[None]}
        if "position_ids" in takes and len(rows) > 1:
            several = rope_index_of(module) is not None  # positions of three axes, after the text's
            inputs["position_ids"] = positions.expand(4, 1, -1) if several else positions
        if caches(module):
            inputs["use_cache"] = False
        result = outputs_of(module(**inputs))
        if result is None:
            raise PackingLeaks(name, "it gives neither logits nor hidden states, by which it could be found out")
        if result.shape[:2] != inputs["input_ids"].shape:
            raise PackingLeaks(name, f"it gives one result for a whole sequence ({list(result.shape)}), not for each row")
        return result[0, -4:]  # type: ignore[no-any-return]

    with evaluating(module), precision.autocast(device):
        packed, changed, alone = run(a, b), run(other, b), run(b)
    leak = _differs(packed, changed, packed.dtype)
    if leak:
        raise PackingLeaks(name, f"other tokens in one row change the next row's outputs ({leak:.1%}); {_why(module, takes)}")
    shift = _differs(packed, alone, packed.dtype)
    if shift:
        raise PackingLeaks(name, f"a packed row's outputs are not what they are alone ({shift:.1%}); {_why(module, takes)}")


def _why(module: Any, takes: frozenset[str]) -> str:
    """The probable reason, in words."""
    recurrent = ("mamba", "deltanet", "rwkv", "linearattention", "recurrent", "shortconv", "ssm")
    kinds = sorted({type(m).__name__ for m in module.modules() if any(r in type(m).__name__.lower() for r in recurrent)})
    if kinds:
        return f"its layers carry a state along the sequence ({', '.join(kinds[:2])})"
    if "position_ids" not in takes:
        return "it takes no position_ids, so it can't know where a row begins"
    how = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return f"its attention ({how}) does not begin anew where positions do"
