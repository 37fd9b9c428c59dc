"""Precision: trainable weights, gradients and optimizer state in fp32, frozen weights in the compute type, autocast around."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch.utils.weak import WeakIdKeyDictionary

from twinkle_core.errors import Fp8Unavailable, UnknownOption
from twinkle_core.names import closest

Mixed = Literal["no", "fp8", "fp16", "bf16"]

NARROW = (torch.float16, torch.bfloat16)
_COMPUTE = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def widen(parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    """Another type for a parameter and for the gradient that has gathered on it. The parameter keeps its identity."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


class Precision:
    """The types of one model's weights. Two models of one process may have different ones.

    * Weights are kept as the checkpoint stores them until it is known what they are for, so that nothing is lost and nothing
      is held twice: ``master`` turns what is trained into fp32 (bf16 to fp32 is exact), ``freeze`` turns what an adapter
      leaves frozen into the compute type, except what a ``master`` call has claimed.
    * A ``freeze`` is not taken back: who wants to train the whole model at full precision afterwards loads it again.
    * ``autocast`` is the context of every forward. ``no`` means none of all this: fp32 as loaded, no autocast.

    Raises:
        UnknownOption, Fp8Unavailable
    """

    def __init__(self, mixed: str = "bf16") -> None:
        if mixed not in get_args(Mixed):
            raise UnknownOption("mixed_precision", mixed, closest(str(mixed), get_args(Mixed)), get_args(Mixed))
        if mixed == "fp8":
            raise Fp8Unavailable()
        self.mixed = mixed
        self.compute: torch.dtype | None = _COMPUTE[mixed]
        self._masters = WeakIdKeyDictionary()

    @property
    def load_dtype(self) -> Any:
        """``dtype=`` for ``from_pretrained``: as stored, or fp32 where there is no mixed precision."""
        return "auto" if self.compute else torch.float32

    def master(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """These are trained: fp32, and never frozen into another type. Parameters keep their identity."""
        for parameter in parameters:
            self._masters[parameter] = True
            if parameter.dtype in NARROW:
                widen(parameter, torch.float32)

    def freeze(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """These are frozen: the compute type, unless something trains them. Buffers (rotary tables) are not touched."""
        if self.compute is None:
            return
        for parameter in parameters:
            if parameter not in self._masters and parameter.is_floating_point() and parameter.element_size() in (2, 4):
                parameter.data = parameter.data.to(self.compute)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward."""
        if self.compute is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute)
