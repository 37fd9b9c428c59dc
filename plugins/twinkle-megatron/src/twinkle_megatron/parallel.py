"""The mesh as Megatron's process groups, and whether a model can be laid over it."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from mcore_bridge.bridge import gpt_bridge
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from twinkle_core import settings
from twinkle_core.errors import BadLaunch, BadLayout, BadMesh, ManyLayouts
from twinkle_core.mesh import DeviceMesh

OWNER = "MegatronModel"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the mesh under Megatron's names."""

    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    world: int
    sp: bool
    #: what each rank's part of a sequence must be a multiple of; no matter of groups
    tile: int = dataclasses.field(default=1, compare=False)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Layout:
        """Of a mesh, whose order of ranks is Megatron's own (tp, cp, dp, pp from the fastest on).

        Raises:
            BadLayout: a size that Megatron has no place for, chunks without a pipeline, sequence parallel without tensor ranks.
        """
        sizes = mesh.sizes
        if sizes["fsdp"] > 1 or mesh.ulysses_size > 1:
            raise BadLayout(
                OWNER, "it has no fsdp_size and no ulysses_size; use dp_size (its optimizer is sharded) and cp_size"
            )
        if mesh.vpp_size > 1 and sizes["pp"] == 1:
            raise BadLayout(
                OWNER, f"vpp_size = {mesh.vpp_size} cuts the layers of pipeline stages, and pp_size is 1; set pp_size too"
            )
        if mesh.sequence_parallel and sizes["tp"] == 1:
            raise BadLayout(
                OWNER, "sequence_parallel splits the sequence over the tensor ranks, and tp_size is 1; set tp_size too"
            )
        return cls(
            tp=sizes["tp"],
            pp=sizes["pp"],
            vpp=mesh.vpp_size,
            cp=sizes["cp"],
            ep=mesh.ep_size,
            etp=mesh.etp_size,
            world=mesh.world_size,
            sp=mesh.sequence_parallel,
        )

    @property
    def multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sp else 1) * self.tile

    def check(self, shape: dict[str, int]) -> None:
        """Whether a model fits.

        Args:
            shape: what the model has of ``num_attention_heads``, ``num_query_groups``, ``num_layers``, ``num_moe_experts``.

        Raises:
            BadLayout: with the arithmetic.
        """
        stages = ("pp_size × vpp_size", self.pp * self.vpp) if self.vpp > 1 else ("pp_size", self.pp)
        rules = (
            ("tp_size", self.tp, "num_attention_heads"),
            ("tp_size", self.tp, "num_query_groups"),
            (*stages, "num_layers"),
            ("ep_size", self.ep, "num_moe_experts"),
        )
        for name, size, field in rules:
            total = shape.get(field)
            if total and total % size:
                raise BadLayout.divides(OWNER, name, size, field, total)
        if not shape.get("num_moe_experts"):
            if self.ep > 1:
                raise BadLayout(OWNER, f"ep_size = {self.ep} lays out experts, and this model has none; leave ep_size at 1")
        elif self.tp > 1 and not self.sp:
            raise BadLayout(
                OWNER, f"experts under tp_size = {self.tp} need the sequence split too: DeviceMesh(…, sequence_parallel=True)"
            )
        elif self.ep == 1 and self.etp != self.tp:
            why = "tensor ranks would each train a copy of all experts, on their part of the sequence"
            raise BadLayout(
                OWNER,
                f"tp_size = {self.tp} with ep_size = 1 and etp_size = {self.etp}: {why}; set ep_size, or etp_size={self.tp}",
            )


class User:
    """Stands for a model that uses the groups, as long as it lives."""


class Groups:
    """Megatron's process groups: of the whole process, so all models of one process that live share a layout."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.hosts: Any = None  # all ranks, as they tell what is on no device
        self.users: weakref.WeakSet[User] = weakref.WeakSet()

    def enter(self, layout: Layout, user: User) -> None:
        """Make the groups of a layout, or use those that are there.

        Raises:
            ManyLayouts: a live model uses another layout.
        """
        if self.layout != layout:
            gc.collect()  # a model that is out of use may wait to be collected
            if len(self.users):
                raise ManyLayouts(str(self.layout), str(layout))
            gpt_bridge.EP_PP_GROUP = None  # mcore-bridge makes one more, of the first layout that there was
            if self.layout is not None:
                parallel_state.destroy_model_parallel()
                self.layout = None
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                create_gloo_process_groups=True,
            )
            self.hosts = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
            self.layout = layout
        self.users.add(user)


#: of this process, as Megatron's own
GROUPS = Groups()


def connect(device: torch.device, world: int) -> None:
    """The default process group, unless it is there: by torchrun's environment, or of this process alone.

    Raises:
        BadMesh: as many processes as the mesh has ranks do not run.
        BadLaunch: the group that is there says that this is another rank than RANK says.
    """
    there = dist.get_world_size() if dist.is_initialized() else settings.world_size()
    if there != world:
        raise BadMesh(
            f"the mesh has {world} rank(s), and {there} process(es) run; start as many: torchrun --nproc-per-node {world}"
        )
    if dist.is_initialized():
        if world > 1 and dist.get_rank() != settings.rank():
            raise BadLaunch.apart(settings.rank(), dist.get_rank())
        return
    backend = "gloo" if device.type == "cpu" else "nccl"
    if world == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    else:
        dist.init_process_group(backend)


def common_seed() -> int:
    """A number that all ranks share: drawn from torch's random state of the first one."""
    seed = torch.randint(2**31 - 2**16, (1,))
    if dist.get_world_size() > 1:
        found: list[Any] = [int(seed)]
        dist.broadcast_object_list(found, src=0)
        return int(found[0])
    return int(seed)


def seed_ranks(seed: int) -> None:
    """Megatron's random states: equal where ranks hold copies, different where they hold parts."""
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
