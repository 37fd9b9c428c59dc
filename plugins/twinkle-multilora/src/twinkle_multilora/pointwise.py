"""Functions whose numbers depend on their place in a tensor, and passes of such a size that they don't.

A kernel on the CPU computes a tensor by vectors, and what is left over one number after the other. For most functions both are
the same to the bit; for some (silu, sigmoid, the tanh form of gelu) they are two formulas. Several threads have a part each, so
there are rests in the middle as well, and where they are goes by the size of the whole: a row of one tenant would feel how many
rows others have. Where each part is whole vectors there is no rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: numbers for which a thread is worth its while, as ATen's kernels see it (``at::internal::GRAIN_SIZE``)
GRAIN = 32768
#: numbers from which on a kernel of gelu gives all threads a part (``GELU_MIN_ELEMENTS_FOR_MULTI_THREADING``)
SPREAD = 16384
#: whole vectors of any type and machine, two of which are computed at a time
VECTORS = 64
#: tokens of passes that are tried, and numbers in them, where kernels begin to divide their work and somewhat above
COUNTS = (17, 101, 333, 2048)
SIZES = (SPREAD, 23000, GRAIN, 47000, 95000)


@functools.lru_cache(maxsize=4096)
def aligned(count: int, widths: tuple[int, ...], threads: int) -> int:
    """The least number of rows, from ``count`` on, with which no kernel has a rest.

    Args:
        widths: numbers a row has where a function depends on its place.
        threads: among which a kernel divides its work.
    """
    while not all(_is_whole(count * width, threads) for width in widths):
        count += 1
    return count


def _is_whole(size: int, threads: int) -> bool:
    """Whether each thread's part of a tensor is whole vectors, as ``at::parallel_for`` cuts it: for kernels that take a thread
    for each ``GRAIN`` numbers, and for those that take all threads above ``SPREAD``."""
    parts = {min(threads, -(-size // GRAIN)), threads if size > SPREAD else 1}
    return size % VECTORS == 0 and all(-(-size // count) % VECTORS == 0 for count in parts)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tries each function that runs inside, forward and backward, on its own numbers.

    Args:
        rows: of the pass.

    ``widths``: numbers a row has of each function that depends on its place; ``why``: one for which no size of the pass helps.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.why = ""
        self._rows = rows
        self._seen: dict[tuple[Any, ...], bool] = {}
        self._found: set[int] = set()

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted(self._found))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.pointwise in func.tags:
            self._try(func, args, kwargs)
        return func(*args, **kwargs)

    def _try(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if not tensors or any(type(t) not in (Tensor, torch.nn.Parameter) or t.is_complex() for t in tensors):
            return
        if not any(t.is_floating_point() for t in tensors) or any(isinstance(v, Tensor) for v in kwargs.values()):
            return
        size = torch.broadcast_shapes(*(t.shape for t in tensors)).numel()  # type: ignore[no-untyped-call]
        key = (func, size, *(t.dtype for t in tensors))
        if size == 0 or key in self._seen:
            return
        kinds = {tensors[0].dtype, torch.float32}  # in a narrow type one in thousands differs
        varies = any(_varies(functools.partial(_called, func, args, kwargs), _numbers(tensors, kind)) for kind in kinds)
        self._seen[key] = varies
        if not varies:
            return
        if tensors[0].device.type != "cpu" or size % self._rows:
            self.why = self.why or f"{func} gives a number other bits in another place"
            return
        width = size // self._rows
        self._found.add(width)
        counts = (*COUNTS, *(numbers // width + 1 for numbers in SIZES))
        for count in counts if any(t.numel() == size for t in tensors) else ():
            call = functools.partial(_called, func, args, kwargs)
            if not _holds(call, _numbers(tensors, tensors[0].dtype), aligned(count, (width,), torch.get_num_threads()) * width):
                self.why = self.why or f"{func} gives a number other bits in a pass of another size"


def _called(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Iterator[Tensor]) -> Tensor:
    """The function on other tensors."""
    result: Tensor = func(*(next(tensors) if isinstance(a, Tensor) else a for a in args), **kwargs)
    return result


def _numbers(tensors: Sequence[Tensor], kind: torch.dtype) -> list[Tensor]:
    """1024 numbers for each argument: its own, as often as it takes, then some that are spread out."""
    found = []
    spread = torch.linspace(-6, 6, 512, device=tensors[0].device)
    for i, whole in enumerate(torch.broadcast_tensors(*tensors)):  # type: ignore[no-untyped-call]
        own = whole.detach().reshape(-1)[:512]
        own = own.repeat(-(-512 // own.numel()))[:512]
        if own.is_floating_point():
            found.append(torch.cat([own.to(kind), spread.roll(i * 37).to(kind)]))
        else:
            found.append(own.repeat(2))
    return found


def _varies(call: Callable[[Iterator[Tensor]], Tensor], numbers: Sequence[Tensor]) -> bool:
    """Whether numbers by sevens, which are no vectors, come out otherwise than all at once."""
    whole = call(iter([t.clone() for t in numbers]))
    parts = zip(*(torch.split(t, 7) for t in numbers), strict=True)
    return not _same(torch.cat([call(iter([t.clone() for t in part])) for part in parts]), whole)


def _holds(call: Callable[[Iterator[Tensor]], Tensor], numbers: Sequence[Tensor], size: int) -> bool:
    """Whether so many numbers come out as 1024 of them do."""
    times = -(-size // 1024)
    many = call(iter([t.repeat(times)[:size] for t in numbers]))
    return _same(many, call(iter([t.clone() for t in numbers])).repeat(times)[:size])


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
