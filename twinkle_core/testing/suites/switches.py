"""What is there once in a process, for every component of it (L2)."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch


def switches() -> dict[str, Any]:
    """What each switch is called -> how it stands."""
    found = {
        "the default dtype": str(torch.get_default_dtype()),
        "the default device": str(torch.get_default_device()),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "the number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradients on": torch.is_grad_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "the filters of warnings": repr(warnings.filters),
        "the level of the root logger": logging.getLogger().level,
    }
    for name in ("benchmark", "deterministic", "enabled", "allow_tf32"):
        found[f"torch.backends.cudnn.{name}"] = getattr(torch.backends.cudnn, name)
    return found


def changed(before: dict[str, Any]) -> list[str]:
    """The switches that stand otherwise now."""
    now = switches()
    return [f"{name} ({value} before, {now[name]} after)" for name, value in before.items() if now[name] != value]


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """On leaving, what losses and metrics are apt to switch is as it was, so that one fault is told once."""
    dtype, gradients, anomaly = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_anomaly_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        torch.autograd.set_detect_anomaly(anomaly)
