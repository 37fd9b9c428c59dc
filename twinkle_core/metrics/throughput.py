"""Tokens a second, and the share of what the device could do (L2)."""

from __future__ import annotations

import math
from typing import Any

import torch

from twinkle_core.contracts.metric import Metric, StepResult
from twinkle_core.errors import BadArgument
from twinkle_core.metrics.speed import Speed
from twinkle_core.train.limits import is_number
from twinkle_core.types import InputFeature, ModelOutput

#: dense bf16 FLOP/s of devices by a part of their name, as their makers' data sheets have them; the first that fits
PEAKS = (
    ("GB200", 2.5e15), ("B200", 2.25e15), ("H200", 989e12), ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12),
    ("H800", 989e12), ("H20", 148e12), ("A100", 312e12), ("A800", 312e12), ("L40S", 362e12), ("L40", 181e12), ("L4", 121e12),
    ("A10G", 70e12), ("A10", 125e12), ("MI300X", 1307e12), ("MI250X", 383e12), ("4090", 165e12), ("3090", 71e12),
)  # fmt: skip


class ThroughputMetric(Metric):
    """``tokens_per_second`` (of all data ranks, padding left out), ``tokens_per_second_per_device``, and ``mfu``.

        mfu = tokens/s * flops_per_token / (devices * peak),   flops_per_token = 6 N

    6 N is a forward and a backward through N parameters (Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, PaLM, appendix
    B, which adds attention's own part: give ``flops_per_token`` for that, or where weights are frozen). Without
    either, or on a device whose peak is not known, there is no ``mfu``. The first window is not measured.

    Args:
        parameters: N, those that a token passes (of a mixture of experts the active ones).
        flops_per_token: in place of 6 N.
        peak_flops: FLOP/s of one device; default what is known of the current one.
    """

    def __init__(
        self, parameters: float | None = None, flops_per_token: float | None = None, peak_flops: float | None = None
    ) -> None:
        given = {"parameters": parameters, "flops_per_token": flops_per_token, "peak_flops": peak_flops}
        for name, value in given.items():
            if value is not None and not (is_number(value) and 0 < value < math.inf):
                raise BadArgument(name, value, "a number above 0, or None")
        self._cost = flops_per_token or (6 * parameters if parameters else 0.0)
        self._own_peak = peak_flops or known_peak()
        self._speed = Speed()
        self._devices, self._peak = 1, self._own_peak

    def accumulate(self, inputs: InputFeature, outputs: ModelOutput) -> None:
        self._speed.add(inputs)

    def on_step(self, result: StepResult) -> None:
        self._speed.close()

    def state(self) -> dict[str, Any]:
        return {**self._speed.state(), "devices": self._devices, "peak": self._peak}

    def merge(self, state: dict[str, Any]) -> None:
        fresh = self._speed.windows == 0
        self._speed.merge(state)
        if not state["timed"]:
            return
        self._devices = state["devices"] + (0 if fresh else self._devices)
        self._peak = state["peak"] + (0.0 if fresh else self._peak)

    def calculate(self) -> dict[str, float]:
        state = self._speed.state()
        if not state["seconds"]:
            return {}
        rate = state["tokens"] / state["seconds"]
        numbers = {"tokens_per_second": rate, "tokens_per_second_per_device": rate / self._devices}
        return numbers | ({"mfu": rate * self._cost / self._peak} if self._cost and self._peak else {})

    def reset(self) -> None:
        self._speed.reset()
        self._devices, self._peak = 1, self._own_peak


def known_peak() -> float:
    """Dense bf16 FLOP/s of the current device; 0 where it is not known."""
    if not torch.cuda.is_available():
        return 0.0
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS if part in name), 0.0)
