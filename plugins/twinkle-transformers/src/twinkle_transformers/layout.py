"""How a model lies over the ranks of a mesh: which of its weights are cut, over whom, and where gradients are summed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from twinkle_transformers import fsdp, tensor
from twinkle_transformers.fsdp import Shards
from twinkle_transformers.parallel import EXPERTS, SEQUENCE, TENSOR, WEIGHTS, Meeting, partition
from twinkle_transformers.sequence import Sequence
from twinkle_transformers.tensor import Experts, Parts
from twinkle_transformers.token_parts import TokenParts


class Layout:
    """How a model lies over the ranks of a mesh. In one process: as it is.

    Args:
        owner: who is constructed, for error texts.
        meeting: of the mesh's ranks.
    """

    def __init__(self, owner: str, meeting: Meeting) -> None:
        self.owner, self.meeting = owner, meeting
        self.shards: Shards | None = None
        self.parts: Parts | None = None
        self.experts: Experts | None = None
        self.sequence: Sequence | None = None

    def lay(self, module: Any, compute: torch.dtype | None, fsdp_config: Mapping[str, Any]) -> None:
        """Cut a model that has the same weights on all ranks (or none yet), in place."""
        mesh, device = self.meeting.mesh, self.meeting.device
        used = [name for name in ("dp", "fsdp", "tp") if mesh.sizes[name] > 1]
        parent: Any = fsdp.torch_mesh(mesh, device, *used) if used else None  # one, so that what tp has cut can be cut again
        if mesh.sizes["tp"] > 1:
            leave = tensor.planned_experts(module) if mesh.ep_size > 1 else ()
            self.parts = Parts(self.owner, module, parent["tp"], mesh.sequence_parallel, leave)
        if mesh.ep_size > 1:
            few = torch.tensor(partition(mesh, EXPERTS), dtype=torch.int).T
            ep = TorchMesh(device.type, few, mesh_dim_names=("fsdp" if mesh.sizes["fsdp"] > 1 else "rest", "ep"))
            self.experts = Experts(self.owner, module, ep, parent["tp"] if self.parts else self._alone())
        if mesh.ulysses_size > 1:
            self.sequence = Sequence(self.owner, module, self.meeting.group(SEQUENCE), mesh.ulysses_size)
        if mesh.sizes["fsdp"] > 1:
            inner = self.experts.shard if self.experts is not None else lambda options: None
            self.shards = Shards(module, parent[tuple(n for n in used if n != "tp")], compute, fsdp_config, inner)

    def note(self) -> None:
        """The model has been laid, and has its weights."""
        for cut in (self.parts, self.experts):
            if cut is not None:
                cut.note()

    def _alone(self) -> Any:
        """torch's mesh of this rank alone, named as the one of ``tp`` is."""
        everyone = torch.arange(self.meeting.mesh.world_size, dtype=torch.int).reshape(-1, 1)
        return TorchMesh(self.meeting.device.type, everyone, mesh_dim_names=("rest", "tp"))["tp"]

    def adapt(self, module: torch.nn.Module, name: str, new: Iterable[torch.nn.Parameter]) -> None:
        """A new adapter: the same on all ranks, and cut as the layers are that carry it.

        Raises:
            TypeError: a layer that carries it is cut in a way in which it can't be.
        """
        self.meeting.agree(new)
        for cut in (self.parts, self.experts):
            if cut is not None:
                cut.adapt(module, name)

    def rest(self) -> None:
        """The model's tensors are to be looked at."""
        if self.shards is not None:
            self.shards.rest()

    @property
    def in_step(self) -> bool:
        """Whether ranks must run the model together, the same number of times."""
        return any(x is not None for x in (self.shards, self.parts, self.experts, self.sequence))

    @property
    def tokens(self) -> TokenParts | None:
        """Where ranks share tokens between layers."""
        return self.parts.tokens if self.parts is not None else None

    def sharing(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward of shared tokens, and its backward."""
        return self.tokens.sharing() if self.tokens is not None else contextlib.nullcontext()

    def summed_over(self, parameter: torch.nn.Parameter) -> list[str]:
        """Between which ranks the window's gradients of a parameter are summed when it closes."""
        if self.experts is not None and parameter in self.experts.own:
            return [] if fsdp.holds(parameter) else [EXPERTS]
        apart = [TENSOR] if self.parts is not None and parameter in self.parts.partial else []
        return apart if fsdp.holds(parameter) else [WEIGHTS, *apart]  # what it holds was summed with each backward

    def describe(self) -> str:
        """In words."""
        mesh = self.meeting.mesh
        if mesh.world_size == 1:
            return "one process: not wrapped"
        words = [f"dp {mesh.sizes['dp']}"] if mesh.sizes["dp"] > 1 else []
        words += [f"fully_shard over {mesh.sizes['fsdp']}"] if self.shards else []
        words += [f"tensor parallel over {mesh.sizes['tp']}"] if self.parts else []
        words += ["tokens between layers too"] if self.tokens else []
        words += [f"experts over {mesh.ep_size}"] if self.experts else []
        words += [f"sequence over {mesh.ulysses_size}"] if self.sequence else []
        return ", ".join(words)


def lay_over(
    layout: Layout,
    read: Callable[[torch.device], Any],
    build: Callable[[Any], Any],
    prepare: Callable[[Any], None],
    *,
    by_one: bool,
    compute: torch.dtype | None,
    fsdp_config: Mapping[str, Any],
) -> tuple[Any, Layout]:
    """A model, laid over the ranks.

    Args:
        read: loads the model, to the device that it is given.
        build: makes it from its config, without weights.
        prepare: is called before it is laid.
        by_one: rank 0 reads for all, where the weights lie apart.

    Raises:
        BadLayout, and what ``read`` raises.
    """
    mesh, device = layout.meeting.mesh, layout.meeting.device
    by_one = by_one and mesh.sizes["fsdp"] > 1
    if by_one:
        module = fsdp.load_on_first(mesh, lambda: read(torch.device("cpu")), build)
    else:
        module = layout.meeting.on_all(f"to make {layout.owner}", lambda: read(device))
    prepare(module)
    tensor.check(layout.owner, getattr(module, "config", None), mesh)
    if not by_one:
        layout.meeting.agree([*module.parameters(), *module.buffers()])
    source = fsdp.held(module) if by_one and mesh.rank == 0 else None
    layout.lay(module, compute, fsdp_config)
    if by_one:
        fsdp.fill(module, source, device)
    layout.note()
    layout.meeting.draw_apart()
    return module, layout
