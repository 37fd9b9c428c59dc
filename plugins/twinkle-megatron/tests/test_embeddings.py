"""Embeddings and losses on hidden states, over every layout, as transformers and one process have them."""

from __future__ import annotations

import gc

import pytest
import torch

from twinkle.model import TransformersModel
from twinkle_core.errors import NotComputed
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.ranks import run
from twinkle_megatron.testing import built, steps, windows

LAYOUTS = [
    {"tp_size": 2},
    {"tp_size": 2, "sequence_parallel": True},
    {"dp_size": 2},
    {"cp_size": 2},
    {"pp_size": 2},
    {"pp_size": 2, "vpp_size": 2},
]


def rows_of(step):
    """Four groups of an anchor, a positive and up to two negatives, of all lengths."""
    random = torch.Generator().manual_seed(step)
    rows = []
    for size in (3, 4, 2, 3):
        for i in range(size):
            ids = torch.randint(1, 250, (int(torch.randint(2, 14, (1,), generator=random)),), generator=random).tolist()
            rows.append({"input_ids": ids, "labels": int(i == 0), "length": len(ids)})
    return rows


def train(model, rank=0, count=1, **options):
    """Losses over all ranks, norms, and the embeddings of a batch after three updates."""
    model.set_loss("infonce", temperature=0.1, **options)
    numbers = []
    for step in range(3):
        rows = rows_of(step)
        groups = [rows[:3], rows[3:7], rows[7:9], rows[9:]]
        mine = [row for group in groups[rank::count] for row in group]
        loss = model.forward_backward(mine)
        total = model.engine.all_reduce(torch.tensor(float(loss)))
        numbers += [float(total) / count, float(model.clip_grad_and_step(1.0))]
    shown = model.forward_only(rows_of(7), task="embedding", micro_batch_size=5)
    assert "logits" not in shown
    return {"numbers": numbers, "embeddings": shown["embeddings"]}


class Embeddings:
    """Run in processes of its own."""

    def train(self, rank, world_size, folder, layouts, pooling):
        found = []
        for sizes in layouts:
            gc.collect()
            model = built(folder, sizes)
            model.apply_patch("embedding", pooling=pooling)
            model.set_optimizer("default", lr=5e-3)
            mesh = model.engine.mesh
            found.append(train(model, mesh.data_rank, mesh.data_world_size))
            del model
        return found

    def hidden(self, rank, world_size, folder, layouts):
        found = []
        for sizes in layouts:
            model = built(folder, sizes)
            model.set_loss("fused_linear_cross_entropy")
            model.set_optimizer("default", lr=2e-3)
            found.append(steps(model, windows(4)))
            del model
        return found


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["last_token", "mean"])
def test_embeddings_train_as_they_do_in_transformers(llama, pooling):
    ranks = run(Embeddings, "train", 2, {"folder": llama, "layouts": LAYOUTS, "pooling": pooling}, timeout=400)
    mesh = DeviceMesh.from_sizes(device_type="cpu")
    model = TransformersModel(model_id=llama, mixed_precision="no", device_mesh=mesh)
    model.apply_patch("embedding", pooling=pooling)
    model.set_optimizer("adamw", lr=5e-3)
    expected = train(model)
    assert expected["numbers"][0] > 0.1 and expected["numbers"][1] > 0.01
    for rank in ranks:
        for sizes, found in zip(LAYOUTS, rank, strict=True):
            assert found["numbers"] == pytest.approx(expected["numbers"], rel=1e-4), sizes
            torch.testing.assert_close(found["embeddings"], expected["embeddings"], rtol=0, atol=1e-4)


def test_embeddings_are_of_a_pooling_head(llama):
    model, rows = built(llama, {}), [{"input_ids": row["input_ids"]} for row in rows_of(0)]
    with pytest.raises(NotComputed, match=r"apply_patch\('embedding'"):
        model.forward_only(rows, task="embedding")
    model.apply_patch("embedding")
    shown = model.forward_only(rows, task="embedding")["embeddings"]
    assert shown.shape == (12, 32)
    torch.testing.assert_close(shown.norm(dim=1), torch.ones(12))


@pytest.mark.slow
def test_a_loss_on_hidden_states_trains_as_one_on_logps(llama, alone):
    layouts = [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}, {"cp_size": 2}]
    for rank in run(Embeddings, "hidden", 2, {"folder": llama, "layouts": layouts}, timeout=300):
        for sizes, found in zip(layouts, rank, strict=True):
            for what in ("losses", "norms"):
                assert found[what] == pytest.approx(alone(llama)[what][:4], rel=1e-5), (sizes, what)
