"""Weights that lie apart on ranks: torch's ``fully_shard`` (FSDP2) over a model, and how it is filled from one rank."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from twinkle_core.errors import BadLayout, WrongArgument
from twinkle_core.log import get_logger
from twinkle_core.mesh import ORDER, DeviceMesh
from twinkle_core.names import closest
from twinkle_core.ops.sharded import is_sharded, set_to

T = TypeVar("T")
#: what is decided here and not by ``fsdp_config``
_OWN = frozenset({"module", "mesh", "mp_policy", "ignored_params", "dp_mesh_dims"})


def check_config(config: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Options are those of ``fully_shard`` that are a user's to choose; of several processes that shard nothing it is told.

    Raises:
        WrongArgument
    """
    known = sorted(set(inspect.signature(fully_shard).parameters) - _OWN)
    for key in config:
        if key not in known:
            raise WrongArgument("fsdp_config", key, closest(key, known), known)
    if config and mesh.world_size > mesh.sizes["fsdp"] == 1:
        get_logger("transformers").warning("fsdp_config is without effect: the mesh has no fsdp_size over 1")


def torch_mesh(mesh: DeviceMesh, device: torch.device, *dims: str) -> TorchMesh:
    """These dimensions of a mesh, in this order, as this rank sees them."""
    sizes = [mesh.sizes[name] for name in dims]
    others = [name for name in ORDER if name not in dims]
    everyone = torch.empty([*(mesh.sizes[name] for name in others), *sizes], dtype=torch.int)
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        everyone[tuple(at[name] for name in [*others, *dims])] = rank
    if everyone.numel() == everyone[(0,) * len(others)].numel():
        return TorchMesh(device.type, everyone.reshape(sizes), mesh_dim_names=dims)
    return TorchMesh(device.type, everyone.reshape(-1, *sizes), mesh_dim_names=("rest", *dims))[dims]


class _Root(torch.nn.Module):
    """Stands around a model, so that any part of it may run inside one forward of FSDP's: the body, the output layer, heads."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[[], T]) -> T:
        return call()


def blocks_of(module: Any) -> list[torch.nn.Module]:
    """The outermost modules that are gathered one at a time: what the model's authors say must not be split, else the elements
    of its longest list of modules."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    found: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    for m in module.modules():
        if type(m).__name__ in names and m not in inside:
            found.append(m)
            inside.update(m.modules())
    if not found:
        lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
        found = list(max(lists, key=len, default=()))
    return found


def holds(parameter: Any) -> bool:
    """Whether a parameter lies apart on ranks of ``fsdp``."""
    return is_sharded(parameter) and "fsdp" in (parameter.device_mesh.mesh_dim_names or ())


class Shards:
    """A model under ``fully_shard``: each rank of ``fsdp`` holds a part of each weight, those of ``dp`` the same ones.

    Gradients are summed, not averaged, with each backward: to wait for the window's end would mean to hold whole gradients,
    which is what sharding is to spare. Parameters that come later (adapters) are not sharded.

    Args:
        module: is changed in place; its parameters become DTensors.
        mesh: torch's, ``fsdp``, or ``dp`` and ``fsdp``.
        compute: the type in which weights travel and are computed with; None: as they are.
        config: further options of ``fully_shard``.
        inner: shards what is to lie over other ranks, with the same options.
    """

    def __init__(
        self,
        module: Any,
        mesh: TorchMesh,
        compute: torch.dtype | None,
        config: Mapping[str, Any],
        inner: Callable[[Mapping[str, Any]], None] = lambda options: None,
    ) -> None:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        options: dict[str, Any] = {"reshard_after_forward": True, **config, "mp_policy": policy}
        inner(options)
        options["mesh"] = mesh
        root = _Root(module)
        for block in blocks_of(module):
            fully_shard(block, **options)
        fully_shard(root, **{**options, "reshard_after_forward": False})
        for m in root.modules():
            if isinstance(m, FSDPModule):
                m.set_gradient_divide_factor(1.0)
                m.set_force_sum_reduction_for_comms(True)
        self._root: Any = root
        self._wanted = False

    def run(self, call: Callable[[], T], keep: bool = False) -> T:
        """``call()`` with the weights that all blocks share in place; each block fetches its own. Afterwards they are
        wanted for a backward, or where ``keep`` says so."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* returned a view tensor", UserWarning)  # nobody writes into outputs
            with self.or_reset():
                result = self._root(call)
        self._wanted = torch.is_grad_enabled() or keep
        if not self._wanted:
            self.rest()
        return result  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def or_reset(self) -> Iterator[None]:
        """Around a forward or backward: where it is broken off, FSDP forgets that it began (torch before 2.13 can't)."""
        try:
            yield
        except BaseException:
            if (reset := getattr(self._root, "reset_iter_state", None)) is not None:
                reset()
            self._wanted = False
            raise

    def gather(self) -> None:
        """What all blocks share is in place (again), if a loss or a backward may want it."""
        if self._wanted:
            self._root.unshard()

    def done(self) -> None:
        """Nobody wants it any more."""
        self._wanted = False

    def rest(self) -> None:
        """Let go of what was gathered; a backward that is still to come fetches it again."""
        for m in self._root.modules():
            if isinstance(m, FSDPModule):
                m.reshard()


# ---------------------------------------------------------------------------------------------------- from one rank


def _tensors(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Parameters and buffers, tied ones once, and where they are."""
    seen: set[int] = set()
    for m in module.modules():
        for name, tensor in [*m._parameters.items(), *m._buffers.items()]:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield m, name, tensor


def load_on_first(mesh: DeviceMesh, load: Callable[[], Any], build: Callable[[Any], Any]) -> Any:
    """The model with its weights on rank 0, and without storage on all others.

    Args:
        load: reads the model; called on rank 0 alone, whose failure is raised on all ranks.
        build: a model from its config.

    Raises:
        BadLayout: rank 0 failed, or ``build`` makes another model than ``load``.
    """
    told: list[Any] = [None]
    if mesh.rank == 0:
        try:
            module = load()
            told = [(module.config, [(tuple(t.shape), t.dtype) for _, _, t in _tensors(module)], None)]
        except Exception as error:  # told to all ranks, which wait for it
            dist.broadcast_object_list([(None, None, str(error))], src=0)
            raise
        dist.broadcast_object_list(told, src=0)
        return module
    dist.broadcast_object_list(told, src=0)
    config, tensors, failure = told[0]
    if failure is not None:
        raise BadLayout("memory_efficient_init", f"rank 0, which reads the model for all, failed: {failure}")
    with torch.device("meta"):
        module = build(config)
    mine = list(_tensors(module))
    if [tuple(t.shape) for _, _, t in mine] != [shape for shape, _ in tensors]:
        raise BadLayout("memory_efficient_init", "a model from the config alone has other tensors than the one that is read")
    for (_, _, tensor), (_, dtype) in zip(mine, tensors, strict=True):
        if tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
    return module.eval()


def held(module: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors of a model, to be handed out by ``fill`` after it has been sharded."""
    return [tensor.detach() for _, _, tensor in _tensors(module)]


def fill(module: torch.nn.Module, source: list[torch.Tensor] | None, device: torch.device) -> None:
    """Give a sharded model the weights that rank 0 holds, one tensor at a time.

    Args:
        module: the same on all ranks; where ``source`` is None its tensors have no storage (``meta``).
        source: what ``held`` gave before sharding; on rank 0 alone.
    """
    if source is None:
        module.to_empty(device=device)
    with torch.no_grad():
        for i, (_, _, live) in enumerate(_tensors(module)):
            whole = torch.empty(live.shape, dtype=live.dtype, device=device) if source is None else source[i].to(device)
            dist.broadcast(whole, src=0)
            set_to(live, whole) if is_sharded(live) else live.copy_(whole)
            if source is not None:
                source[i] = whole[:0]
