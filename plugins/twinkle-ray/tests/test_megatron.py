"""MegatronModel on workers: data, tensor and pipeline ranks, as in one process."""

from __future__ import annotations

import pytest
from peft import LoraConfig

from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing import ranks
from twinkle_megatron.model import MegatronModel
from twinkle_megatron.testing import Layouts, windows, write_tiny
from twinkle_multilora.megatron import MultiLoraMegatronModel


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


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"tp_size": 2}])
def test_many_tenants_of_megatron_on_two_workers(cluster, tmp_path, sizes):
    """Rows of each are divided over data ranks, of which two tensor ranks are one; in turns as alone, to the bit."""
    folder = str(write_tiny(tmp_path / "model"))
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    rows = {"ann": windows()[0], "bob": windows()[1][:1]}
    found = []
    for together in (True, False):
        model = MultiLoraMegatronModel(
            folder, device_mesh=mesh, mixed_precision="no", max_loras=2, max_r=4, remote_group="actor"
        )
        for name in rows:
            saved = tmp_path / name
            config = str(saved) if saved.is_dir() else LoraConfig(r=4)
            model.multi_lora.acquire_lora(name, config)
            if not saved.is_dir():
                model.save(name, tmp_path, adapter_name=name)
            model.set_optimizer("default", lr=1e-2, adapter_name=name)
        found.append([])
        for _ in range(3):
            if together:
                losses = model.forward_backward_many(rows)
            else:
                losses = {name: model.forward_backward(own, adapter_name=name) for name, own in rows.items()}
            found[-1] += [(losses[name], model.clip_grad_and_step(1.0, adapter_name=name)) for name in rows]
    assert found[0] == found[1]
    assert all(type(loss) is float and norm > 0 for loss, norm in found[0])
