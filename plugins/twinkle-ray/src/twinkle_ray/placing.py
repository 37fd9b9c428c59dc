"""Which worker gets what of a cluster: Ray's placement groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from twinkle_core.errors import GroupTooLarge
from twinkle_core.mesh import DeviceGroup

#: seconds until resources that others hold are given up
WAIT = 20.0


@dataclass(slots=True)
class Slot:
    """A place for a worker, or for workers of several groups that share its devices."""

    device: str
    devices: int
    cpus: int = 0
    shared: int = 0  # by how many workers

    @property
    def resources(self) -> dict[str, float]:
        """As Ray counts."""
        own = {} if self.device == "CPU" else {self.device: float(self.devices)}
        return {"CPU": float(self.cpus), **own}


def device_of(group: DeviceGroup) -> str:
    """What Ray calls a group's devices: ``CPU``, ``GPU`` (also for cuda), ``NPU``, ..."""
    name = group.device_type.upper()
    return "GPU" if name == "CUDA" else name


def slots_of(groups: Sequence[DeviceGroup]) -> tuple[list[Slot], list[list[int]]]:
    """The places, and for each group those of its workers: new ones where it says how many, else those it names."""
    slots: list[Slot] = []
    named: dict[int, int] = {}
    places: list[list[int]] = []
    for group in groups:
        device, mine = device_of(group), []
        for member in group.members:
            at = len(slots) if isinstance(group.ranks, int) else named.setdefault(member, len(slots))
            if at == len(slots):
                slots.append(Slot(device, 0 if device == "CPU" else group.gpus_per_worker))
            slot = slots[at]
            if device != "CPU" and slot.device == "CPU":
                slot.device, slot.devices = device, group.gpus_per_worker
            slot.cpus, slot.shared = slot.cpus + group.cpus_per_worker, slot.shared + (device != "CPU")
            mine.append(at)
        places.append(mine)
    return slots, places


def reserve(slots: Sequence[Slot], nproc_per_node: int | None) -> PlacementGroup:
    """Reserve all places at once.

    Args:
        nproc_per_node: workers of each machine, which has exactly so many (the last one the rest); None: as Ray packs them.

    Raises:
        GroupTooLarge: the cluster has not got them; or not free, for 20 s.
    """
    needed = _sum([slot.resources for slot in slots])
    has = ray.cluster_resources()
    lacking = [name for name, amount in needed.items() if has.get(name, 0) < amount]
    if lacking:
        way = "Give smaller groups, or connect to a larger cluster (RAY_ADDRESS)"
        if "CPU" in lacking:
            way += "; to share cores, call ray.init(num_cpus=...) before initialize"
        elif not has.get(lacking[0]):
            way += "; on CPUs: DeviceGroup(..., device_type='CPU')"
        raise GroupTooLarge(_words(needed), f"the cluster has {_words({name: has.get(name, 0) for name in needed})}", way)
    size = nproc_per_node or 1
    bundles = [_sum([slot.resources for slot in slots[i : i + size]]) for i in range(0, len(slots), size)]
    reserved = placement_group(bundles, strategy="PACK" if nproc_per_node is None else "STRICT_SPREAD")
    if not reserved.wait(WAIT):
        remove_placement_group(reserved)
        free = ray.available_resources()
        there = f"the cluster has {_words({name: free.get(name, 0) for name in needed})} free, after {WAIT:g} s of waiting"
        if nproc_per_node is not None:
            there += f" (asked for on {len(bundles)} machine(s) with {size} worker(s) each)"
        raise GroupTooLarge(_words(needed), there, "Wait for other jobs to end, or give smaller groups")
    return reserved


def options(group: DeviceGroup, slot: Slot) -> dict[str, Any]:
    """What Ray gives a worker of a group in a place."""
    found: dict[str, Any] = {"num_cpus": group.cpus_per_worker, "max_restarts": 0, "max_task_retries": 0}
    device = device_of(group)
    if device == "CPU":
        return found
    amount = slot.devices / slot.shared
    return {**found, "num_gpus": amount} if device == "GPU" else {**found, "resources": {device: amount}}


def _sum(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, amount in part.items():
            total[name] += amount
    return dict(total)


def _words(resources: dict[str, float]) -> str:
    words = [f"{amount:g} {name}{'' if amount == 1 else 's'}" for name, amount in resources.items()]
    return " and ".join(words)
