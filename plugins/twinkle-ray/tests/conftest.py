"""One Ray for all tests of a process: two small groups of workers on CPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ray
import torch

sys.path.insert(0, str(Path(__file__).parent))  # before Ray starts: its workers import the classes of these tests from here

from twinkle_core import registry
from twinkle_core.mesh import DeviceGroup
from twinkle_core.runtime import local

GROUPS = [DeviceGroup(name, ranks, device_type="CPU") for name, ranks in (("actor", 2), ("one", 1))]
#: what ``initialize`` chooses for these tests; to others of this process, which share it, nothing was chosen
OURS, OTHERS = local._State(local.LocalRuntime()), local._state


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    local._state = OURS
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    try:
        return (yield)
    finally:
        local._state = OTHERS


@pytest.fixture(autouse=True)
def _quiet_torch():
    """As many threads as a worker has; more only wait for one another."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cluster():
    """The runtime, with groups ``actor`` of two workers and ``one`` of one."""
    # Ray would end workers where other programs of this machine fill its memory
    registry._PROCESS._resolved.clear()  # of what other tests have installed in this process workers know nothing
    registry.refresh()
    quiet = {"memory_monitor_refresh_ms": 0}
    ray.init(num_cpus=5, include_dashboard=False, object_store_memory=80 * 2**20, logging_level="WARNING", _system_config=quiet)
    try:
        local.initialize(mode="ray", groups=GROUPS, seed=7)
        yield local.current_runtime()
    finally:
        local._state = OURS  # the last test may be another's
        local.shutdown()
        ray.shutdown()
