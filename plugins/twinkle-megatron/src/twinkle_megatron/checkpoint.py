"""The optimizer's shards in a checkpoint: written by all ranks, and read again under this or another layout.

Weights are in plain Hugging Face or PEFT files beside them. Adam's moments are in the shards, in 16 bits the fp32 weights too.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch.distributed.checkpoint.api import CheckpointException

from twinkle_core.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotWritten
from twinkle_core.isolation import attempt
from twinkle_core.train.plain import from_plain, to_plain
from twinkle_megatron.optim import MegatronDistributedOptimizer

#: the folder of the shards, inside of the checkpoint's
SHARDS = "megatron"
#: tensors are cut by the model's own axes, so that another layout can read them
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _leaves(value)
    elif isinstance(tree, ShardedBase):
        yield tree


def _model(optimizer: MegatronDistributedOptimizer, inner: str | None) -> dict[str, Any]:
    """The sharded view of the model that the optimizer's is made after; an adapter's slot is not in its names."""
    parts = [ddp.module.sharded_state_dict() for ddp in optimizer.ddps]
    for part in parts if inner is not None else ():
        for key, tensor in part.items():
            if key.endswith(f"linear_fc1.lora_B.{inner}.weight"):
                part[key] = _gate_and_up(tensor)
    tree = parts[0] if len(parts) == 1 else {f"model{i}": part for i, part in enumerate(parts)}
    if inner is not None:
        for leaf in _leaves(tree):
            leaf.key = leaf.key.replace(f".{inner}.", ".adapter.")
    return tree


def _gate_and_up(tensor: Any) -> Any:
    """Each tensor rank has a part of the gate and one of the other half. mcore-bridge takes both for one piece in adapters:
    under another number of ranks the halves would be mixed."""
    before = range(tensor.prepend_axis_num)
    offsets = tuple((axis, tensor.global_offset[axis], tensor.global_shape[axis]) for axis in before)
    return apply_swiglu_sharded_factory(tensor, offsets)


def _sharded(optimizer: MegatronDistributedOptimizer, inner: str | None, *, loading: bool) -> dict[str, Any]:
    state = optimizer.inner.sharded_state_dict(_model(optimizer, inner), is_loading=loading, metadata=dict(METADATA))
    return {"optimizer": state}


def write(optimizer: MegatronDistributedOptimizer, inner: str | None, folder: Path) -> None:
    """Write the shards. Collective."""
    optimizer.tell()
    place = folder / SHARDS
    refused: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            place.mkdir()
        except OSError as error:
            refused = [str(error)]
    dist.broadcast_object_list(refused, src=0)
    if refused[0] is not None:
        raise CheckpointNotWritten(str(folder), refused[0])
    # Megatron would start a process for it, which runs a program's file again and outlives who does not end in the usual way
    filesystem_async._results_queue = queue.Queue()
    done = attempt(lambda: dist_checkpointing.save(_sharded(optimizer, inner, loading=False), str(place)))
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if done.error is None else _reason(done.error))
    if any(why is not None for why in told):
        why = next(filter(None, told), "its shards could not be written")  # one rank knows of all of them
        raise CheckpointNotWritten(str(folder), why) from done.error


def _reason(error: BaseException) -> str:
    """What torch says of all ranks on one, and on the others that there is something."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {why}" for rank, (why, _) in error.failures.items())
    return f"{type(error).__name__}: {error}"


def describe(optimizer: MegatronDistributedOptimizer) -> dict[str, Any]:
    """What is the same on all ranks: hyperparameters by group."""
    kind = type(optimizer).__name__
    groups = [
        {key: to_plain(value, f"'{key}' of optimizer {kind}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"class": kind, "groups": groups, "values": {}, "settings": to_plain(dict(optimizer.settings), "its settings")}


def prepare(
    optimizer: MegatronDistributedOptimizer, inner: str | None, data: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """What ``MegatronDistributedOptimizer.load_state_dict`` takes; nothing is read yet.

    Raises:
        CheckpointMismatch: other groups, or another kind of optimizer. CheckpointDamaged: there are no shards.
    """
    source, place = str(folder / "optimizer.json"), folder / SHARDS
    if len(data["groups"]) != len(optimizer.param_groups):
        raise CheckpointMismatch(source, "it holds other groups of parameters")
    there, here = data["settings"]["optimizer"], optimizer.settings["optimizer"]
    if there != here:
        raise CheckpointMismatch(source, f"it holds the state of optimizer='{there}', and optimizer='{here}' is set")
    if not (place / "metadata.json").is_file():
        raise CheckpointDamaged(str(place), "the optimizer's shards are not there")

    def read() -> None:
        try:
            found = dist_checkpointing.load(_sharded(optimizer, inner, loading=True), str(place))
        except CheckpointException as error:  # no Exception, and not to be caught as one
            raise CheckpointDamaged(str(place), _reason(error) or "a rank could not read its shards") from error
        optimizer.inner.load_state_dict(found["optimizer"])
        optimizer.tell()

    groups = [
        {key: from_plain(value, live.get(key)) for key, value in saved.items()}
        for saved, live in zip(data["groups"], optimizer.param_groups, strict=True)
    ]
    return {"groups": groups, "read": read}
