"""The runtime ``ray``: components on the workers of a Ray cluster, driven from this process."""

from __future__ import annotations

import inspect
import itertools
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinkle_core import registry, settings
from twinkle_core.contracts.runtime import Runtime
from twinkle_core.errors import DriverIsRank, GroupMesh, NoGroups, SameGroup, UnknownGroup
from twinkle_core.mesh import DeviceGroup, DeviceMesh
from twinkle_core.names import closest
from twinkle_core.runtime.proxy import proxy
from twinkle_ray import address
from twinkle_ray.groups import Group, RayHome
from twinkle_ray.placing import device_of, options, reserve, slots_of
from twinkle_ray.worker import Worker, installed


class RayRuntime(Runtime):
    """Components that are given ``remote_group=`` live on that group's workers; here is a proxy of each.

    Ray is started on this machine, or the cluster that RAY_ADDRESS names is used, or what ``ray.init`` has connected to before.
    The workers of a group meet as torchrun's ranks do, so a model is laid over them by its mesh as anywhere. Answers are read
    when a verb returns.
    """

    takes_part = False

    def __init__(self) -> None:
        self.mesh: DeviceMesh | None = None
        self.groups: dict[str, Group] = {}
        self._devices: dict[str, DeviceGroup] = {}
        self._started = False
        self._reserved: PlacementGroup | None = None
        self._keys = itertools.count()

    def start(
        self,
        *,
        nproc_per_node: int | None,
        groups: Sequence[DeviceGroup],
        mesh: DeviceMesh | None,
        seed: int,
        full_determinism: bool,
    ) -> None:
        """Start the workers of all groups.

        Raises:
            DriverIsRank, NoGroups, SameGroup. NoCluster: nothing answers at RAY_ADDRESS. GroupTooLarge: the cluster can't hold
            them. WorkerMismatch: a worker's machine has other versions of plugins. WorkerDied: one did not start.
        """
        if settings.world_size() > 1:
            raise DriverIsRank("ray", settings.world_size())
        if not groups:
            raise NoGroups("ray")
        names = [group.name for group in groups]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise SameGroup(twice)
        self.mesh = mesh
        if not ray.is_initialized():
            address.connect(settings.ray_address(), encrypted=settings.ray_encrypts())
            self._started = True
        try:
            slots, places = slots_of(groups)
            self._reserved = reserve(slots, nproc_per_node)
            for group, mine in zip(groups, places, strict=True):
                bundles = [at // (nproc_per_node or 1) for at in mine]
                self.groups[group.name] = self._launch(group, bundles, [options(group, slots[at]) for at in mine])
                self._devices[group.name] = group
            for group in groups:
                self._join(self.groups[group.name], device_of(group), seed, full_determinism)
        except BaseException:
            self.shutdown()
            raise

    def check(self) -> None:
        """Whether a cluster answers at RAY_ADDRESS.

        Raises:
            NoCluster
        """
        if not ray.is_initialized():
            address.check(settings.ray_address(), encrypted=settings.ray_encrypts())

    def _launch(self, group: DeviceGroup, bundles: Sequence[int], given: Sequence[dict[str, Any]]) -> Group:
        token, actor = f"{group.name}-{uuid.uuid4().hex}", ray.remote(Worker)
        about = (len(bundles), settings.travelling(), str(Path.cwd()), sys.path)
        actors = [
            actor.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._reserved, placement_group_bundle_index=bundle), **own
            ).remote(token, rank, *about)
            for rank, (bundle, own) in enumerate(zip(bundles, given, strict=True))
        ]
        return Group(group.name, token, actors)

    def _join(self, group: Group, device: str, seed: int, full_determinism: bool) -> None:
        group.places = group.ask("place", [()] * len(group), "the start")
        here = installed()
        for rank, theirs in enumerate(group.ask("snapshot", [(here,)] * len(group), "the start")):
            present = {(row["kind"], row["name"], row["distribution"]) for row in theirs}
            both = [row for row in here if (row["kind"], row["name"], row["distribution"]) in present]
            registry.compare_snapshots(both, theirs, rank=rank, host=group.places[rank].host)  # type: ignore[union-attr]
        self._compare(group)
        (port,) = group.ask("port", [()], "the start")
        first = group.places[0]
        assert first is not None
        mesh = self.mesh if self.mesh is not None and self.mesh.world_size == len(group) else None
        about = ((first.address, port), device, seed, full_determinism, mesh)
        group.ask("join", [about] * len(group), "the meeting of its workers")

    def _compare(self, group: Group) -> None:
        """What was resolved here so far must be the same there."""
        driver = registry.snapshot()
        for rank, theirs in enumerate(group.ask("snapshot", [(driver,)] * len(group), "a comparison of plugins")):
            place = group.places[rank]
            registry.compare_snapshots(driver, theirs, rank=rank, host=place.host if place is not None else "worker")

    def create(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], remote_group: str) -> Any:
        """Construct on the group's workers.

        Raises:
            UnknownGroup, GroupMesh, WorkerMismatch; what the constructor raises.
        """
        group = self.groups.get(remote_group)
        if group is None:
            raise UnknownGroup(remote_group, closest(str(remote_group), self.groups), self.groups)
        kwargs = dict(kwargs)
        if cls.__remote__.execute == "first":  # type: ignore[attr-defined]
            kwargs.pop("device_mesh", None)
            shares = [0]
        else:
            mesh = self._mesh(cls, args, kwargs, group)
            shares = [mesh.at(rank).data_rank for rank in range(len(group))]
        self._compare(group)
        home = RayHome(cls, group, f"{cls.__name__}-{next(self._keys)}", shares)
        return proxy(cls, home, managers=home.build(args, kwargs))

    def _mesh(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], group: Group) -> DeviceMesh:
        """The mesh of an object: its own, else ``global_device_mesh``, which it is then given, else data ranks alone."""
        signature = inspect.signature(cls)
        given = signature.bind_partial(*args, **kwargs).arguments.get("device_mesh")
        mesh = given if isinstance(given, DeviceMesh) else None
        if mesh is None and self.mesh is not None and "device_mesh" in signature.parameters:
            mesh = kwargs["device_mesh"] = self.mesh
        if mesh is not None and mesh.world_size != len(group):
            raise GroupMesh(cls.__name__, mesh.world_size, group.name, len(group))
        return mesh or DeviceMesh.from_sizes(world_size=len(group))

    def placement(self) -> str:
        """A line for each worker."""
        lines = [f"ray: {sum(map(len, self.groups.values()))} worker(s) in {len(self.groups)} group(s)"]
        for name, group in self.groups.items():
            device = self._devices[name]
            what = device_of(device)
            own = f"{device.cpus_per_worker} CPU" if what == "CPU" else f"{device.gpus_per_worker} {what}"
            lines.append(f"  {name}{'' if group.ended is None else ' (ended)'}")
            lines += [f"    {rank:>4}  {place}, {own}" for rank, place in enumerate(group.places)]
        return "\n".join(lines if self.mesh is None else [*lines, repr(self.mesh)])

    def shutdown(self) -> None:
        """End the workers, give their places back, and end Ray if it was started here."""
        for group in self.groups.values():
            group.end("the runtime was shut down")
        self.groups.clear()
        if self._reserved is not None and ray.is_initialized():
            remove_placement_group(self._reserved)
        self._reserved = None
        if self._started:
            ray.shutdown()
            self._started = False
