"""The local runtime: one process, or one of torchrun's (L0)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle_core import settings
from twinkle_core.contracts.runtime import Runtime
from twinkle_core.errors import AlreadyInitialized, BadArgument, NotInitialized

if TYPE_CHECKING:
    from twinkle_core.mesh import DeviceGroup, DeviceMesh


class LocalRuntime(Runtime):
    """Components live in this process; remote declarations change nothing."""

    def __init__(self) -> None:
        self.mesh: DeviceMesh | None = None
        self.groups: Sequence[DeviceGroup] = ()

    def start(
        self,
        *,
        nproc_per_node: int | None,
        groups: Sequence[DeviceGroup],
        mesh: DeviceMesh | None,
        seed: int,
        full_determinism: bool,
    ) -> None:
        """Remember the mesh; torchrun has already started the processes."""
        self.groups, self.mesh = groups, mesh

    def create(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], remote_group: str) -> None:
        """Always here."""

    def default_mesh(self) -> DeviceMesh | None:
        """That of ``initialize``: this process is one of its ranks."""
        return self.mesh

    def placement(self) -> str:
        """This process and the mesh."""
        line = f"local: rank {settings.rank()} of {settings.world_size()}, in this process"
        return line if self.mesh is None else f"{line}\n{self.mesh!r}"

    def shutdown(self) -> None:
        """Nothing was started."""


@dataclass
class _State:
    """What ``initialize`` chose, for the life of the process."""

    runtime: Runtime
    arguments: dict[str, object] | None = None


_state = _State(LocalRuntime())


def initialize(
    mode: str = "local",
    nproc_per_node: int | None = None,
    seed: int = 42,
    full_determinism: bool = False,
    groups: Sequence[DeviceGroup] | None = None,
    global_device_mesh: DeviceMesh | None = None,
    lazy_collect: bool = True,
) -> None:
    """Choose where components live, and seed this process. Never needed for one process.

    Args:
        mode: ``local`` (this process, or torchrun's), or the name of an installed runtime (``ray`` from twinkle-ray).
        nproc_per_node: workers of each machine, for runtimes that start them.
        seed: seeds Python, numpy and torch.
        full_determinism: also asks torch for deterministic kernels.
        groups: named groups of workers, for runtimes that place them.
        global_device_mesh: the mesh that models and data loaders take which are made later and given none.
        lazy_collect: a runtime may delay the collecting of results until they are read.

    Raises:
        BadArgument: what is no list of groups, no mesh, no number of workers. AlreadyInitialized: called before with other
        arguments; shows both. NotInstalled, NeedsLibrary: the runtime is not here.
        What the runtime raises where it can't begin: nothing is chosen then.
    """
    groups = _check(nproc_per_node, groups, global_device_mesh)
    arguments: dict[str, object] = {
        "mode": mode,
        "nproc_per_node": nproc_per_node,
        "seed": seed,
        "full_determinism": full_determinism,
        "groups": groups,
        "global_device_mesh": global_device_mesh,
        "lazy_collect": lazy_collect,
    }
    if _state.arguments is not None:
        if _state.arguments != arguments:
            raise AlreadyInitialized(_state.arguments, arguments)
        return
    from twinkle_core import registry

    runtime = registry.build("runtime", mode, {}, contract=Runtime)
    runtime.start(
        nproc_per_node=nproc_per_node,
        groups=groups or (),
        mesh=global_device_mesh,
        seed=seed,
        full_determinism=full_determinism,
    )
    seed_everything(seed, full_determinism)
    _state.runtime, _state.arguments = runtime, arguments


def _check(nproc_per_node: object, groups: object, mesh: object) -> list[DeviceGroup] | None:
    """The groups as a list; None where there are none.

    Raises:
        BadArgument
    """
    from twinkle_core.mesh import DeviceGroup, DeviceMesh

    if nproc_per_node is not None and (type(nproc_per_node) is not int or nproc_per_node < 1):
        raise BadArgument("nproc_per_node", nproc_per_node, "how many workers each machine has, from 1 up")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise BadArgument("global_device_mesh", mesh, "a DeviceMesh")
    if groups is None:
        return None
    if not isinstance(groups, Sequence) or not all(isinstance(group, DeviceGroup) for group in groups):
        raise BadArgument("groups", groups, "a list of DeviceGroup('name', workers)")
    return list(groups)


def seed_everything(seed: int, full_determinism: bool = False) -> None:
    """Seed Python, numpy (where installed) and torch, all devices."""
    import importlib.util
    import random

    import torch

    random.seed(seed)
    if importlib.util.find_spec("numpy"):
        import numpy

        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if full_determinism:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False


def current_runtime() -> Runtime:
    """The runtime that ``initialize`` chose; local without it."""
    return _state.runtime


def default_mesh() -> DeviceMesh | None:
    """The mesh of ``initialize(global_device_mesh=...)``, which models and data loaders take that are given none."""
    return _state.runtime.default_mesh()


def get_device_placement() -> str:
    """Who sits where, as a drawing."""
    return _state.runtime.placement()


def place(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], remote_group: str) -> Any:
    """What stands for a new instance of a class on a group's workers; None: it is to be constructed here.

    Raises:
        NotInitialized: nobody has said what the group is. What the runtime raises.
    """
    if _state.arguments is None and settings.world_size() == 1:
        raise NotInitialized(cls.__name__, remote_group)
    return _state.runtime.create(cls, args, kwargs, remote_group)


def shutdown() -> None:
    """End what ``initialize`` began, as the end of the process does. Afterwards it may be called anew."""
    _state.runtime.shutdown()
    _state.runtime, _state.arguments = LocalRuntime(), None
