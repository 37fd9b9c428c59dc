"""One worker process: a rank as torchrun would have started it, with the objects that live on it."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from twinkle_core import registry, settings
from twinkle_core.errors import ElsewhereObject
from twinkle_core.index import Entry
from twinkle_core.log import get_logger
from twinkle_core.runtime import local
from twinkle_core.runtime.calls import Answer
from twinkle_core.runtime.serve import Server

if TYPE_CHECKING:
    from twinkle_core.mesh import DeviceMesh

#: the objects of this process, by group
_SERVERS: dict[str, Server] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is."""

    host: str
    pid: int
    address: str

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


class Worker:
    """An actor. It does one call after the other, in the order in which they were sent.

    Args:
        group: whose worker it is; unlike any other group's.
        rank: its number in the group.
        world_size: workers of the group.
        variables: of the environment of who started it, as ``settings.travelling`` gives them.
        folder: where relative paths begin, if there is such a folder here.
        path: where modules are looked for besides.
    """

    def __init__(
        self, group: str, rank: int, world_size: int, variables: Mapping[str, str], folder: str, path: Sequence[str]
    ) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size
        settings.adopt(variables)
        sys.path += [entry for entry in path if entry not in sys.path]
        if Path(folder).is_dir():
            os.chdir(folder)
        elif rank == 0:
            get_logger("ray").warning("%s has no folder %s: relative paths begin in %s", platform.node(), folder, Path.cwd())
        self.server = _SERVERS[group] = Server(_check, tells=rank == 0)

    def place(self) -> Place:
        """Where it is."""
        return Place(platform.node(), os.getpid(), ray.util.get_node_ip_address())

    def port(self) -> int:
        """A port of this machine that nobody uses."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def join(self, master: tuple[str, int], device: str, seed: int, full_determinism: bool, mesh: DeviceMesh | None) -> None:
        """Become a rank, and meet the others: over gloo on CPUs, over NCCL (or what the device has) elsewhere."""
        # of devices that it does not own a worker sees none
        settings.become_rank(self.rank, self.world_size, local_rank=0, master=master)
        import torch
        import torch.distributed as dist

        if self.world_size > 1 and device == "CPU":
            dist.init_process_group("gloo")
        elif self.world_size > 1:
            accelerator = torch.accelerator.current_accelerator()
            assert accelerator is not None
            torch.accelerator.set_device_index(0)
            dist.init_process_group(device_id=torch.device(accelerator.type, 0))
        local.initialize(seed=seed, full_determinism=full_determinism, global_device_mesh=mesh)

    def snapshot(self, of: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """What is here under the names of another process's snapshot."""
        return registry.snapshot(of)

    def build(self, packed: bytes) -> Answer:
        """Construct an object: packed are its key, class and arguments."""
        return self.server.build(lambda: cloudpickle.loads(packed))

    def call(self, packed: bytes) -> Answer:
        """Call a method."""
        return self.server.call(lambda: cloudpickle.loads(packed))

    def next(self, number: int) -> Answer:
        """The next item of an iterator."""
        return self.server.next(number)

    def let_go(self, number: int) -> None:
        """An iterator is not wanted any more."""
        self.server.let_go(number)

    def drop(self, key: str) -> None:
        """An object is not wanted any more."""
        self.server.drop(key)


def _check(value: Any) -> None:
    """Raise for what can't be sent, or not be understood on arrival."""
    cloudpickle.loads(cloudpickle.dumps(value))


def here(group: str, name: str, what: str, key: str, path: str) -> Any:
    """The object that a proxy stood for, on one of its own workers. ``name`` and ``what``: of group and object, in words.

    Raises:
        ElsewhereObject: this is no such worker.
    """
    if group not in _SERVERS:
        raise ElsewhereObject(what, name)
    return _SERVERS[group].object(key, path)


def installed() -> list[dict[str, str]]:
    """A row for each component that is installed here, as ``registry.snapshot`` has them."""
    from twinkle_core import snapshots
    from twinkle_core.names import PLURAL

    entries: list[Entry] = [entry for kind in PLURAL for entry in registry.index().of(kind)]
    return snapshots.of(entries)
