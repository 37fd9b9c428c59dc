"""The random state of a process: Python, numpy, torch, accelerators (L2)."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def capture() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Random state as tensors and plain data. numpy's is taken only where numpy is in use."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda/{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    version, numbers, gauss = random.getstate()
    data: dict[str, Any] = {"python": [version, list(numbers), gauss]}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        data["numpy"] = [str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(cached)]
    return tensors, data


Captured = tuple[dict[str, torch.Tensor], dict[str, Any]]


def join(ranks: Sequence[Captured], streams: Sequence[int]) -> Captured:
    """What each rank captured as one: the first rank's as it is, the others' beside it. Ranks draw different numbers, but for
    those of one stream (``DeviceMesh.streams``)."""
    (tensors, data), *others = ranks
    joined = dict(tensors)
    for rank, (theirs, _) in enumerate(others, 1):
        joined |= {f"rank{rank}/{key}": tensor for key, tensor in theirs.items()}
    return joined, {**data, "ranks": [theirs for _, theirs in others], "streams": list(streams)} if others else data


def of_rank(tensors: Mapping[str, torch.Tensor], data: Mapping[str, Any], rank: int, stream: int) -> Captured | None:
    """One rank's part of what ``join`` made: its own where it drew the same stream then, else that of the first rank which did;
    None where nobody did."""
    others, data = data.get("ranks", []), {k: v for k, v in data.items() if k != "ranks"}
    streams = data.pop("streams", range(len(others) + 1))
    if stream not in streams:
        return None
    source = rank if rank < len(streams) and streams[rank] == stream else streams.index(stream)
    if source == 0:
        return {k: t for k, t in tensors.items() if not k.startswith("rank")}, data
    prefix = f"rank{source}/"
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}, others[source - 1]


def check(tensors: Mapping[str, torch.Tensor], data: Mapping[str, Any]) -> None:
    """Restore into generators of its own, so that what can't be restored raises before anything has changed."""
    version, numbers, gauss = data["python"]
    random.Random().setstate((version, tuple(numbers), gauss))
    if "numpy" in data:
        import numpy

        kind, keys, position, has_gauss, cached = data["numpy"]
        numpy.random.RandomState().set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.Generator().set_state(tensors["torch"])


def restore(tensors: Mapping[str, torch.Tensor], data: Mapping[str, Any]) -> None:
    """Put back ``capture()``. Devices that are not here now are left out."""
    version, numbers, gauss = data["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in data:
        import numpy

        kind, keys, position, has_gauss, cached = data["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda/{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda/{i}"], i)
