"""Which worker gets what."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ray.cluster_utils import Cluster

from twinkle_core.errors import BadMesh
from twinkle_core.mesh import DeviceGroup
from twinkle_ray.placing import device_of, options, slots_of


def test_numbers_are_new_places_and_lists_are_shared():
    groups = [
        DeviceGroup("a", [0, 1]),
        DeviceGroup("b", [1, 2], gpus_per_worker=1, cpus_per_worker=3),
        DeviceGroup("c", 2, device_type="CPU"),
        DeviceGroup("d", 1, device_type="npu", gpus_per_worker=2),
    ]
    slots, places = slots_of(groups)
    assert places == [[0, 1], [1, 2], [3, 4], [5]]
    assert [slot.resources for slot in slots] == [
        {"CPU": 1.0, "GPU": 1.0},
        {"CPU": 4.0, "GPU": 1.0},
        {"CPU": 3.0, "GPU": 1.0},
        {"CPU": 1.0},
        {"CPU": 1.0},
        {"CPU": 1.0, "NPU": 2.0},
    ]
    assert [options(groups[0], slots[at])["num_gpus"] for at in places[0]] == [1.0, 0.5]
    assert options(groups[1], slots[2])["num_cpus"] == 3
    assert "num_gpus" not in options(groups[2], slots[3])
    assert options(groups[3], slots[5])["resources"] == {"NPU": 2.0}
    assert [device_of(DeviceGroup("x", 1, device_type=kind)) for kind in ("cuda", "GPU", "cpu")] == ["GPU", "GPU", "CPU"]


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_sizes_of_a_worker_are_checked(size):
    with pytest.raises(BadMesh, match="cpus_per_worker"):
        DeviceGroup("a", 1, cpus_per_worker=size)


PROGRAM = """
import ray, twinkle
from twinkle import DeviceGroup
from twinkle_core import registry
from twinkle_core.errors import GroupTooLarge

twinkle.initialize(mode="ray", nproc_per_node=1, groups=[DeviceGroup("actor", 2, device_type="CPU")])
model = registry.resolve("model", "toy")(remote_group="actor")
model.set_optimizer("sgd", lr=0.1)
rows = [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}] * 2
print("loss", model.forward_backward(rows), model.clip_grad_and_step())
held = ray.util.placement_group_table().values()
print("nodes", len({node for group in held for node in group["bundles_to_node_id"].values()}))
"""


@pytest.mark.slow
def test_workers_on_two_machines_by_their_address(tmp_path):
    """Two of Ray's nodes, with two cores each, on this machine; a worker on each though one could hold both."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80 * 2**20})
    try:
        cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20)
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        given = {**os.environ, "RAY_ADDRESS": cluster.address}
        done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=240, env=given)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "loss 4." in done.stdout and "nodes 2" in done.stdout
        three = program.read_text().replace('"actor", 2,', '"actor", 3,')
        program.write_text(three)
        done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=240, env=given)
        assert "(asked for on 3 machine(s) with 1 worker(s) each)" in done.stderr, done.stdout + done.stderr
    finally:
        cluster.shutdown()
