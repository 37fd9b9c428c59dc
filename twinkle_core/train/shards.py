"""Tensors as each rank holds them, in a folder: all ranks write, and any number of ranks reads what it needs (L2).

torch.distributed.checkpoint does it, in its safetensors format: one file or more a rank, without pickle. A part that several
ranks hold is written once. Who reads may hold other parts, or the whole: parts are cut and joined while they are read.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from twinkle_core.errors import CheckpointDamaged, CheckpointNotWritten
from twinkle_core.ops.sharded import is_sharded, local

#: bytes of one file: what a rank holds twice while it writes
LARGEST = 2**28


def place(folder: Path, stem: str) -> Path:
    """Where a checkpoint's ``model``, ``optimizer`` or ``gradients`` are, as far as they are in shards."""
    return folder / f"{stem}-shards"


def _files(tensors: Mapping[str, torch.Tensor], ranks: int) -> dict[str, int]:
    """The number of the file that each tensor goes to on every rank, so that none gets larger than it may (unless by one
    tensor): as if each rank had as much of a tensor."""
    found, total = {}, 0.0
    for name, tensor in tensors.items():
        total += tensor.numel() * tensor.element_size() / (ranks if is_sharded(tensor) else 1)
        found[name] = 1 + int(total // LARGEST)
    return found


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """It warns of one process, also where it is told of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors into a folder that is there already. All ranks call it together, with the same names.

    Raises:
        CheckpointNotWritten: on all ranks, if one could not.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_files(tensors, ranks), save_distributed=True)
    try:
        with _alone():
            save({name: _in_blocks(tensor) for name, tensor in tensors.items()}, storage_writer=writer, no_dist=ranks == 1)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointNotWritten(str(folder), f"rank {rank}: {cause}") from error


def describe(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes of the whole tensors, and their types.

    Raises:
        CheckpointDamaged: it can't be read, or parts of a tensor are missing.
    """
    return {name: (found.size, found.properties.dtype) for name, found in _metadata(folder).items()}


def _metadata(folder: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    try:
        found: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointDamaged(str(folder), f"its files can't be read ({type(error).__name__}: {error})") from error
    for name, tensor in found.items():
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise CheckpointDamaged(str(folder), f"parts of {name} are missing")
    return found


def read(folder: Path, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a folder, new: cut as those in ``live`` are that have their name and shape and lie apart; whole, on the
    CPU, where those do not. Of a name that is not in ``live`` shape and type alone (``meta``). Each rank reads for itself.

    Raises:
        CheckpointDamaged: as for ``describe``.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    found = {name: _empty(size, dtype, live.get(name)) for name, (size, dtype) in describe(folder).items()}
    wanted: dict[str, Any] = {name: tensor for name, tensor in found.items() if tensor.device.type != "meta"}
    if wanted:
        with _alone():
            load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in wanted.items():
        if is_sharded(tensor):
            cut: Any = live[name]
            found[name] = tensor.redistribute(placements=cut.placements)  # what was read whole; nothing is sent
    return found


def _empty(size: torch.Size, dtype: torch.dtype, live: Any) -> torch.Tensor:
    if live is None:
        return torch.empty(size, dtype=dtype, device="meta")
    if not is_sharded(live) or live.shape != size:
        return torch.empty(size, dtype=dtype)
    from torch.distributed.tensor import empty

    torn = _torn(live)  # what is torn is read whole, and cut then
    placements = [_replicate() if i in torn else placement for i, placement in enumerate(live.placements)]
    if not torn:
        part = torch.empty_like(local(live), dtype=dtype)
        return type(live).from_local(part, live.device_mesh, placements, run_check=False, shape=size, stride=live.stride())  # type: ignore[no-any-return]
    return empty(size, dtype=dtype, device_mesh=live.device_mesh, placements=placements)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def _torn(x: Any) -> set[int]:
    """The dimensions of the mesh along which a part is no block of the whole but several (gate and up in one matrix)."""
    found = set()
    for i, placement in enumerate(x.placements):
        pieces = getattr(placement, "split_factor", None)
        if pieces is not None:  # in as many pieces as later dimensions cut it again, it is one block
            later = [j for j in range(i + 1, len(x.placements)) if x.placements[j].is_shard(placement.dim)]
            if math.prod(x.device_mesh.size(j) for j in later) != pieces:
                found.add(i)
    return found


def _in_blocks(x: Any) -> Any:
    """The tensor with parts that are one block each. Collective where they are not."""
    torn = _torn(x) if is_sharded(x) else ()
    if not torn:
        return x
    from torch.distributed.tensor import Shard

    others = {p.dim for i, p in enumerate(x.placements) if i not in torn and hasattr(p, "dim")}
    placements = [p if i not in torn else _replicate() if p.dim in others else Shard(p.dim) for i, p in enumerate(x.placements)]
    return x.redistribute(placements=placements)
