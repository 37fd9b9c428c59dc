"""A run whose model lives on workers elsewhere (L0 at import)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twinkle_core import errors, registry, settings
from twinkle_core.config.schema import TrainConfig, WorkersConfig
from twinkle_core.config.source import Source
from twinkle_core.contracts.runtime import Runtime
from twinkle_core.mesh import DeviceGroup, DeviceMesh

#: what the group of the run is called
GROUP = "actor"
LOCAL = "local"


def faults(config: TrainConfig, source: Source) -> Iterator[tuple[str, str]]:
    """A runtime that nobody provides, or that can't begin; workers that there won't be."""
    if config.mode == LOCAL:
        if config.workers is not None:
            yield source.origin(("workers",)), "workers: there are none without a mode that starts them (mode: ray)"
        return
    try:
        registry.build("runtime", config.mode, {}, contract=Runtime).check()
    except errors.TwinkleError as error:
        yield source.origin(("mode",)), str(error)
    if settings.world_size() > 1:
        yield source.origin(("mode",)), f"mode: {config.mode} starts its workers itself; start one process, without torchrun"


def mesh(config: TrainConfig) -> DeviceMesh:
    """The mesh of the workers: as many as ``workers.ranks`` says, else as the mesh has.

    Raises:
        BadMesh
    """
    workers = config.workers or WorkersConfig()
    sizes: dict[str, Any] = config.mesh.model_dump() if config.mesh is not None else {}
    device = "cpu" if workers.device_type.upper() == "CPU" else None
    return DeviceMesh.from_sizes(world_size=workers.ranks, device_type=device, **sizes)


@contextmanager
def running(config: TrainConfig, mesh: DeviceMesh | None) -> Iterator[dict[str, Any]]:
    """The workers, while the run lasts. Gives what the model's constructor is told of them."""
    if config.mode == LOCAL:
        yield {}
        return
    from twinkle_core.runtime import local

    assert mesh is not None
    workers = config.workers or WorkersConfig()
    given = workers.model_dump(exclude={"ranks"})
    group = DeviceGroup(GROUP, mesh.world_size, **given)
    local.initialize(mode=config.mode, seed=config.training.seed, groups=[group])
    try:
        yield {"remote_group": GROUP}
    finally:
        local.shutdown()
