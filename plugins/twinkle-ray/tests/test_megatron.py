"""MegatronModel on workers: data, tensor and pipeline ranks, as in one process."""

from __future__ import annotations

import pytest

from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing import ranks
from twinkle_megatron.model import MegatronModel
from twinkle_megatron.testing import Layouts, windows, write_tiny


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"tp_size": 2}, {"pp_size": 2}])
def test_megatron_on_two_workers(cluster, tmp_path, sizes):
    folder = str(write_tiny(tmp_path / "model"))
    alone = ranks.run(Layouts, "train", 1, {"folder": folder, "layouts": [{}]}, timeout=300)[0][0]
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    model = MegatronModel(folder, device_mesh=mesh, mixed_precision="no", remote_group="actor")
    model.set_optimizer("default", lr=2e-3)
    losses, norms = [], []
    for rows in windows():
        losses.append(model.forward_backward(rows, micro_batch_size=1))
        norms.append(model.clip_grad_and_step(1.0))
    assert losses == pytest.approx(alone["losses"], rel=2e-5)
    assert norms == pytest.approx(alone["norms"], rel=2e-4)
