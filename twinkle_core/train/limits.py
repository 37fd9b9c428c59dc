"""What numbers given to the verbs may be (no torch)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from twinkle_core.errors import BadAdapter, BadArgument


def is_number(value: Any) -> bool:
    """Whether a value is a real number: no truth value, text or None."""
    return isinstance(value, Real) and not isinstance(value, bool)


#: why a configuration brings a text where a number was written
A_TEXT = "a number, and this is a text (YAML reads 1e-4 as one; 1.0e-4 is a number there)"


def number_texts(kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Keywords whose value is a text that spells a number, or holds one."""
    for key, value in kwargs.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(v, str) and _spells_number(v) for v in values):
            yield key


def _spells_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_clip(max_grad_norm: Any, norm_type: Any) -> None:
    """Raise BadArgument unless both are above 0. Asked before gradients are touched: a negative bound would turn them round."""
    if not is_number(max_grad_norm) or not max_grad_norm > 0:
        way = "a number above 0 (float('inf') measures without clipping)"
        raise BadArgument("max_grad_norm", max_grad_norm, way)
    if not is_number(norm_type) or not norm_type > 0:
        raise BadArgument("norm_type", norm_type, "a number above 0, or float('inf')")


def check_temperature(temperature: Any) -> None:
    """Raise BadArgument unless logits can be divided by it."""
    if not is_number(temperature) or not 0 < temperature < math.inf:
        raise BadArgument("temperature", temperature, "a finite number above 0")


def check_lora(name: str, config: Any) -> None:
    """Raise BadAdapter unless the numbers of an adapter's config can be computed with, as far as it has them: a scale of NaN,
    or a dropout that leaves nothing, would show in training alone."""
    patterns = getattr(config, "alpha_pattern", None)
    alphas = {f"alpha_pattern[{key!r}]": alpha for key, alpha in patterns.items()} if isinstance(patterns, Mapping) else {}
    if hasattr(config, "lora_alpha"):
        alphas = {"lora_alpha": config.lora_alpha, **alphas}
    for where, alpha in alphas.items():
        if not is_number(alpha) or not 0 < alpha < math.inf:
            raise BadAdapter(name, f"{where}={alpha!r} must be a finite number above 0; updates are scaled by it over the rank")
    dropout = getattr(config, "lora_dropout", 0.0)
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise BadAdapter(name, f"lora_dropout={dropout!r} must be at least 0 and below 1; 0 leaves nothing out")


def check_count(name: str, value: Any, *, least: int = 0) -> None:
    """Raise BadArgument unless it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadArgument(name, value, f"a whole number of at least {least}")
