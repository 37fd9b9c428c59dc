"""Precision: trainable weights, gradients and optimizer state in fp32, frozen weights in the compute type, autocast around."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.utils.weak import WeakIdKeyDictionary

from twinkle_core.errors import Fp8Unavailable, UnknownOption
from twinkle_core.log import get_logger
from twinkle_core.names import closest

Mixed = Literal["no", "fp8", "fp16", "bf16"]

NARROW = (torch.float16, torch.bfloat16)
_COMPUTE = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(slots=True)
class Stored:
    """How a weight is stored that is held in a narrower type: ``dtype``, and whether narrowing has changed a value."""

    dtype: torch.dtype
    rounded: bool


def widen(parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    """Another type for a parameter and for the gradient that has gathered on it. The parameter keeps its identity."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


class Precision:
    """The types of one model's weights. Two models of one process may have different ones.

    * Weights are kept as the checkpoint stores them until it is known what they are for, so that nothing is lost and nothing
      is held twice: ``master`` turns what is trained into fp32 (bf16 to fp32 is exact); ``freeze`` notes what an adapter
      leaves frozen, and the next forward turns that into the compute type, except what a ``master`` call has claimed. So
      adapters that are added before it all see the weights as they are stored, whatever the order.
    * What a forward has narrowed is not taken back: who wants to train the whole model at full precision afterwards loads it
      again. ``narrowed`` knows which weights those are.
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
        #: whether frozen weights are held in the compute type; sharded ones are fp32, and travel in the compute type
        self.narrows = True
        self._masters = WeakIdKeyDictionary()
        self._waiting = WeakIdKeyDictionary()
        #: parameter -> Stored, of those that are held in a narrower type than they were stored in
        self.narrowed: MutableMapping[torch.nn.Parameter, Stored] = WeakIdKeyDictionary()

    @property
    def load_dtype(self) -> Any:
        """``dtype=`` for ``from_pretrained``: as stored, or fp32 where there is no mixed precision."""
        return "auto" if self.compute and self.narrows else torch.float32

    def master(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """These are trained: fp32, and never frozen into another type. Parameters keep their identity."""
        rounded = 0
        for parameter in parameters:
            self._masters[parameter] = True
            if parameter.dtype in NARROW:
                widen(parameter, torch.float32)
                stored = self.narrowed.pop(parameter, None)
                rounded += stored is not None and stored.rounded
        if rounded:
            get_logger("transformers").warning(
                "%d weight(s) that are to be trained were rounded to %s when adapters computed with them; load the model again "
                "to train it from the weights as they are stored",
                rounded,
                self.mixed,
            )

    def freeze(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """These are frozen: the compute type from the next forward on, unless something trains them. Buffers (rotary tables)
        are not touched."""
        if self.compute is None or not self.narrows:
            return
        for parameter in parameters:
            if parameter.is_floating_point() and parameter.element_size() in (2, 4) and parameter.dtype != self.compute:
                self._waiting[parameter] = True

    def thaw(self) -> None:
        """No adapter leaves anything frozen any more: what no forward has narrowed stays as it is stored."""
        self._waiting.clear()

    def _settle(self) -> None:
        """Narrow what waits for it."""
        waiting = [p for p in self._waiting if p not in self._masters]
        self._waiting.clear()
        flags = []
        for parameter in waiting:
            stored = parameter.data
            parameter.data = stored.to(self.compute)
            flags.append((parameter.data.to(stored.dtype) != stored).any().cpu())
            self.narrowed[parameter] = Stored(stored.dtype, False)
        for parameter, flag in zip(waiting, flags, strict=True):
            self.narrowed[parameter].rounded = bool(flag)

    def note_stored(self, parameter: torch.nn.Parameter, stored: torch.Tensor) -> None:
        """A parameter has been overwritten with what a file stores."""
        exact = parameter.dtype == stored.dtype or parameter.element_size() > stored.element_size()
        if exact or not parameter.is_floating_point():
            self.narrowed.pop(parameter, None)
        else:
            here = parameter.detach().to("cpu", stored.dtype)
            self.narrowed[parameter] = Stored(stored.dtype, not torch.equal(here, stored.to("cpu")))

    @contextmanager
    def as_stored(self, parameters: Iterable[torch.nn.Parameter], read: Container[torch.nn.Parameter]) -> Iterator[None]:
        """Inside, these parameters have the type that they are stored in: what is drawn or copied for them takes it from them.

        Args:
            read: those whose values are looked at inside. The others are one number, spread out: no memory is taken.
        """
        held = [(p, p.data) for p in parameters if p in self.narrowed]
        try:
            for parameter, data in held:
                dtype = self.narrowed[parameter].dtype
                empty = torch.zeros((), dtype=dtype, device=data.device).expand(data.shape)
                parameter.data = data.to(dtype) if parameter in read else empty
            yield
        finally:
            for parameter, data in held:
                parameter.data = data

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward."""
        if self.compute is None:
            return nullcontext()
        self._settle()
        return torch.autocast(device.type, dtype=self.compute)
