"""Several processes: how ranks meet, and the engine that sums gradients over them.

Gradients are summed by this module itself, once for each window, in buckets, and not by a wrapper around the model. A wrapper
(torch's DDP) must be told at each backward whether it is the last, is made anew when an adapter comes, counts a parameter
without a gradient as an error, and averages where sums are wanted; summing at the end of a window needs none of that, and
sends no more bytes. What it gives up is sending while a backward still runs.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from twinkle_core import arguments, settings
from twinkle_core.errors import BadArgument, BadLaunch, FailedElsewhere, ManyProcesses, RanksApart
from twinkle_core.isolation import attempt
from twinkle_core.log import get_logger
from twinkle_core.mesh import DeviceMesh
from twinkle_core.ops.gather import Ranks
from twinkle_core.ops.sharded import is_sharded, local
from twinkle_core.runtime.local import default_mesh
from twinkle_core.train.loop_engine import LoopEngine, gradients
from twinkle_core.train.normalise import as_scalar
from twinkle_core.train.together import leave

if TYPE_CHECKING:
    from twinkle_transformers.layout import Layout

T = TypeVar("T")
#: MB of gradients that travel in one message
BUCKET_MB = 25.0
#: who meets for what, by what of a rank's place must be equal
WORLD, DATA, WEIGHTS, SEQUENCE, TENSOR, EXPERTS = "world", "dp", "weights", "sequence", "tp", "experts"
KINDS = (WORLD, DATA, WEIGHTS, SEQUENCE, TENSOR, EXPERTS)


def mesh_of(owner: str, mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh; by default that of ``initialize``, else data ranks as many as torchrun started.

    Raises:
        ManyProcesses: it has another number of ranks than there are processes.
        BadLaunch: torch's process group says that this is another rank than the mesh says.
    """
    given, mesh = mesh is not None, mesh or default_mesh() or DeviceMesh.from_sizes()
    running = dist.get_world_size() if dist.is_initialized() else settings.world_size()
    if mesh.world_size != running:
        raise ManyProcesses(owner, mesh.world_size, running, given)
    rank = mesh.rank if running > 1 else 0  # told before ranks wait for one that never comes
    if running > 1 and dist.is_initialized() and dist.get_rank() != rank:
        raise BadLaunch.apart(rank, dist.get_rank())
    return mesh


def check_ddp_config(config: Mapping[str, Any]) -> float:
    """How many MB of gradients travel in one message: ``bucket_cap_mb``. What else DistributedDataParallel takes is about how
    it watches backwards, and is without effect.

    Raises:
        WrongArgument, BadArgument: it doesn't know the option either, or it is no size.
    """
    arguments.check(torch.nn.parallel.DistributedDataParallel, config, "ddp_config", positional=1)
    if idle := sorted(set(config) - {"bucket_cap_mb"}):
        text = "ddp_config: %s without effect: gradients are summed once for each window, without a wrapper around the model"
        get_logger("transformers").warning(text, ", ".join(idle) + (" is" if len(idle) == 1 else " are"))
    size = config.get("bucket_cap_mb")
    if isinstance(size, bool) or not (size is None or (isinstance(size, int | float) and 0 < size < math.inf)):
        raise BadArgument("ddp_config: bucket_cap_mb", size, "a number of megabytes above 0, or None")
    return BUCKET_MB if size is None else float(size)


def place(mesh: DeviceMesh, rank: int) -> tuple[int, int, int]:
    """(data rank, part of the sequence, tensor part) of a rank."""
    at = mesh.coordinates(rank)
    data, part = divmod(at["dp"] * mesh.sizes["fsdp"] + at["fsdp"], mesh.ulysses_size)
    return data, part, at["tp"]


def partition(mesh: DeviceMesh, kind: str) -> list[list[int]]:
    """All ranks in groups of those that meet."""
    keys: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
        WORLD: lambda data, part, tp: (),
        DATA: lambda data, part, tp: (part, tp),
        WEIGHTS: lambda data, part, tp: (tp,),
        SEQUENCE: lambda data, part, tp: (data, tp),
        TENSOR: lambda data, part, tp: (data, part),
        EXPERTS: lambda data, part, tp: (((data * mesh.ulysses_size + part) * mesh.sizes["tp"] + tp) % mesh.ep_size,),
    }
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        groups.setdefault(keys[kind](*place(mesh, rank)), []).append(rank)
    return list(groups.values())


class Meeting:
    """The groups of a mesh in which this rank meets others.

    ``dp``: ranks with different rows. ``sequence``: with parts of the same rows. ``weights``: both together, between which
    gradients are summed. ``tp``: with parts of the same weights. ``experts``: with the same experts.
    ``world``: all.

    Args:
        mesh: of as many ranks as there are processes. The process group is opened if nobody has.
        device: where tensors that travel live.
        bucket_mb: MB of gradients that travel in one message.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, bucket_mb: float = BUCKET_MB) -> None:
        self.mesh, self.device, self._bucket = mesh, device, bucket_mb * 2**20
        self._groups: dict[str, Any] = {}
        self._sizes = {kind: len(partition(mesh, kind)[0]) for kind in KINDS}
        if mesh.world_size == 1:
            return
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo" if device.type == "cpu" else None, device_id=None if device.type == "cpu" else device
            )
            atexit.register(leave)
        for kind, size in self._sizes.items():
            if 1 < size < mesh.world_size:  # all processes make all groups, in one order
                mine, _ = dist.new_subgroups_by_enumeration(partition(mesh, kind))  # type: ignore[no-untyped-call]
                self._groups[kind] = mine

    def size(self, kind: str) -> int:
        """How many meet."""
        return self._sizes[kind]

    def index(self, kind: str) -> int:
        """Which of those that meet this rank is."""
        return dist.get_rank(self.group(kind)) if self._sizes[kind] > 1 else 0

    def group(self, kind: str) -> Any:
        """The process group; None: the default one, of all. Only where more than one rank meets."""
        return self._groups.get(kind)

    def all_reduce(self, x: torch.Tensor, kind: str, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """``x`` summed over the ranks that meet; the argument is left as it is."""
        if self._sizes[kind] > 1:
            dist.all_reduce(x := x.clone(), op=op, group=self.group(kind))
        return x

    def gather_objects(self, obj: Any, kind: str) -> list[Any]:
        found = [obj] * self._sizes[kind]
        if len(found) > 1:
            dist.all_gather_object(found, obj, group=self.group(kind))
        return found

    def ranks(self, kind: str) -> Ranks | None:
        return Ranks(self.group(kind)) if self._sizes[kind] > 1 else None

    def on_all(self, what: str, call: Callable[[], T]) -> T:
        """What ``call`` gives, once it is done on all ranks.

        Raises:
            FailedElsewhere: it failed on another rank; and what ``call`` raises.
        """
        done = attempt(call)
        told = self.gather_objects(done.why, WORLD)
        if done.error is not None:
            raise done.error
        for rank, why in enumerate(told):
            if why:
                raise FailedElsewhere(what, rank, why)
        return cast(T, done.value)

    def agree(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give tensors that lie apart nowhere the values that rank 0 has.

        Raises:
            RanksApart: they have other shapes, or are more, on some rank.
        """
        if self.mesh.world_size == 1:
            return
        tensors = list(tensors)
        shapes = [f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in tensors]
        told = self.gather_objects(shapes, WORLD)
        if any(theirs != told[0] for theirs in told):
            longest = max(map(len, told))
            filled = [theirs + ["none"] * (longest - len(theirs)) for theirs in told]
            at = next(i for i, each in enumerate(zip(*filled, strict=True)) if len(set(each)) > 1)
            raise RanksApart.differently(
                [
                    f"the making of {len(mine)} tensors, of which number {at + 1} is {each[at]}"
                    for mine, each in zip(told, filled, strict=True)
                ]
            )
        for x in tensors:
            dist.broadcast(x.detach(), src=0)

    def draw_apart(self) -> None:
        """From here on, ranks draw random numbers as one process would: the same where they compute the same (parts of one
        layer see one dropout), others where they have other rows. The first rank draws on as it would alone."""
        if self.mesh.world_size == 1:
            return
        states = [torch.get_rng_state()]
        if (device := self.device).type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        dist.broadcast_object_list(states, src=0)
        torch.set_rng_state(states[0])
        if index := self.index(WEIGHTS):
            torch.manual_seed(int(torch.randint(2**62, ())) + index)
        elif device.type != "cpu":
            torch.get_device_module(device).set_rng_state(states[1], device)

    def sum_gradients(self, parameters: Several[torch.nn.Parameter], kind: str) -> None:
        """Sum gradients over the ranks that meet. A parameter that got none on some rank counts 0 there."""
        if self._sizes[kind] == 1 or not parameters:
            return
        here = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        anywhere = self.all_reduce(here, kind).tolist()
        bucket: list[torch.Tensor] = []
        for p, some in zip(parameters, anywhere, strict=True):
            if not some:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            grad = local(p.grad)
            if bucket and (grad.dtype != bucket[0].dtype or sum(g.nbytes for g in bucket) + grad.nbytes > self._bucket):
                self._sum(bucket, kind)
                bucket = []
            bucket.append(grad)
        if bucket:
            self._sum(bucket, kind)

    def _sum(self, bucket: list[torch.Tensor], kind: str) -> None:
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat, group=self.group(kind))
        for grad, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            grad.copy_(part.view_as(grad))


class MeshEngine(LoopEngine):
    """Core's loop on each rank; gradients, norms and counts are those of all ranks."""

    layout: Layout

    @property
    def meeting(self) -> Meeting:
        """Of the mesh's ranks."""
        return self.layout.meeting

    @property
    def in_step(self) -> bool:  # type: ignore[override]
        return self.layout.in_step

    def around(self, call: Callable[[], T], keep: bool = False) -> T:
        """What runs weights of the model runs inside. ``keep``: a loss is still to run the output layer."""
        return call() if self.layout.shards is None else self.layout.shards.run(call, keep)

    def mode(self, train: bool) -> contextlib.AbstractContextManager[Any]:
        if self.layout.shards is not None:
            self.layout.shards.gather()  # a loss may run the output layer
        return super().mode(train)

    def backward(self, loss_sum: torch.Tensor, *, sync: bool = True) -> None:
        if self.layout.shards is not None:
            self.layout.shards.gather()  # what a loss ran itself comes before FSDP's own hooks
        with self.layout.shards.or_reset() if self.layout.shards is not None else contextlib.nullcontext():
            super().backward(loss_sum, sync=sync)
        if self.layout.shards is not None:
            self.layout.shards.done()

    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        self.layout.rest()  # what a forward left in place would be old
        return super().update(optimizer)

    def all_reduce(self, x: torch.Tensor, over: str = DATA) -> torch.Tensor:
        return self.meeting.all_reduce(x, over)

    def gather_objects(self, obj: Any, over: str = DATA) -> list[Any]:
        return self.meeting.gather_objects(obj, over)

    def gather_numbers(self, numbers: Several[float | torch.Tensor]) -> list[list[float]]:
        mine = torch.stack([as_scalar(number, self.device) for number in numbers])
        everyone = [mine] * self.mesh.world_size
        if len(everyone) > 1:
            dist.all_gather(everyone := [torch.empty_like(mine) for _ in everyone], mine)
        return torch.stack(everyone).tolist()

    def ranks(self, over: str = DATA) -> Any:
        return self.meeting.ranks(over)

    def agree(self, fine: bool) -> bool:
        here = torch.tensor(float(fine), device=self.device)
        return bool(self.meeting.all_reduce(here, WORLD, dist.ReduceOp.MIN).item())

    def finish_grads(self, optimizer: torch.optim.Optimizer, scale: torch.Tensor | float) -> bool:
        """The window has closed: sum its gradients over ranks (each holds sums over its own tokens), then as ever."""
        over: dict[str, list[torch.nn.Parameter]] = {}
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            for kind in self.layout.summed_over(p):
                over.setdefault(kind, []).append(p)
        for kind in (k for k in KINDS if k in over):
            self.meeting.sum_gradients(over[kind], kind)
        return super().finish_grads(optimizer, scale)

    def window_gradients(self, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        """Summed over the ranks that the window's end sums over; a parameter that got none anywhere is left out."""
        found: dict[str, torch.Tensor] = {}
        here = torch.tensor([float(p.grad is not None) for p in parameters.values()], device=self.device)
        anywhere = self.meeting.all_reduce(here, WORLD).tolist()
        for (name, p), some in zip(parameters.items(), anywhere, strict=True):
            if some:
                found[name] = grad = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
                for kind in self.layout.summed_over(p):
                    local(grad).copy_(self.meeting.all_reduce(local(grad), kind))
        return found

    def set_window_gradients(self, parameters: Mapping[str, torch.nn.Parameter], gradients: Mapping[str, torch.Tensor]) -> None:
        """The first rank of those that the window's end sums over gets them; the others have brought nothing yet."""
        for name, p in parameters.items():
            first = all(self.meeting.index(kind) == 0 for kind in self.layout.summed_over(p))
            self.set_gradient(p, gradients.get(name) if first else None)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Ranks look at their own parts, and must scale alike afterwards. (torch's own takes no list of plain tensors and
        DTensors.)"""
        grads = [local(g) for g in gradients(optimizer)]
        assert self.scaler is not None
        if not self.layout.in_step or self.scaler._scale is None:
            super().unscale(optimizer)
            return
        overflow = torch.zeros(1, device=self.device)
        inverse = self.scaler._scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow, inverse)
        state = self.scaler._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.UNSCALED
        state["found_inf_per_device"] = {self.device: self.meeting.all_reduce(overflow, WORLD, dist.ReduceOp.MAX)}

    def make_optimizer(
        self, cls: Any, parameters: Mapping[str, torch.nn.Parameter], kwargs: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        meshes = {p.device_mesh if is_sharded(p) else None for p in parameters.values()}  # type: ignore[attr-defined]
        if len(meshes) > 1 and "foreach" not in kwargs and "foreach" in inspect.signature(cls).parameters:
            kwargs = {**kwargs, "foreach": False}  # torch's fast way takes no list of plain tensors and DTensors
        return super().make_optimizer(cls, parameters, kwargs)

    def total_norm(self, optimizer: torch.optim.Optimizer, norm_type: float) -> torch.Tensor:
        """Parts of one gradient that lie on several ranks are added up over those; what all ranks hold counts once."""
        grads = gradients(optimizer)
        if not any(is_sharded(g) for g in grads):
            return super().total_norm(optimizer, norm_type)
        groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for grad in grads:
            groups.setdefault(_apart(grad), []).append(local(grad))
        infinite = math.isinf(norm_type)
        total = torch.zeros((), device=self.device)
        for over, parts in groups.items():
            norms = torch.stack(torch._foreach_norm(parts, norm_type)).to(total)
            value = norms.max() if infinite else norms.pow(norm_type).sum()
            for group in over:
                dist.all_reduce(value, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
            total = torch.maximum(total, value) if infinite else total + value
        return total if infinite else total.pow(1.0 / norm_type)


def _apart(grad: Any) -> tuple[Any, ...]:
    """The process groups over which parts of a gradient lie apart."""
    if not is_sharded(grad):
        return ()
    return tuple(grad.device_mesh.get_group(i) for i, placement in enumerate(grad.placements) if not placement.is_replicate())
