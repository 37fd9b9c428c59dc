"""Megatron-Core and transformers on the same weights and batches: one result."""

from __future__ import annotations

import pytest

from twinkle.model import TransformersModel
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.ranks import run
from twinkle_megatron.testing import Layouts, windows, write_tiny


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_ten_updates_are_the_same_in_both_backends(tmp_path, family):
    """Losses and gradient norms to 1e-4, with rows of different numbers of labels; AdamW on both sides."""
    folder = write_tiny(tmp_path / family, family)
    (megatron,) = run(Layouts, "train", 1, {"folder": str(folder), "layouts": [{}]}, timeout=300)[0]
    model = TransformersModel(model_id=folder, mixed_precision="no", device_mesh=DeviceMesh.from_sizes(device_type="cpu"))
    model.set_optimizer("adamw", lr=2e-3)
    losses, norms = [], []
    for rows in windows():
        losses.append(float(model.forward_backward(rows, micro_batch_size=1)))
        norms.append(float(model.clip_grad_and_step(1.0)))
    assert megatron["losses"] == pytest.approx(losses, rel=1e-4)
    assert megatron["norms"] == pytest.approx(norms, rel=1e-4)
