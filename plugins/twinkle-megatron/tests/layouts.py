"""What the tests run in processes of their own: training under one layout after the other, in one process group."""

from __future__ import annotations

import gc
from typing import Any

import torch

from twinkle_core.data.sampler import share
from twinkle_core.mesh import DeviceMesh
from twinkle_megatron.model import MegatronModel

#: ten windows of four rows; token counts differ from row to row and between the halves of a window
LENGTHS = ([6, 3, 9, 2], [5, 12, 3, 7], [2, 2, 16, 4], [11, 1, 8, 3], [7, 7, 7, 7])


def windows(count: int = 10, vocabulary: int = 250) -> list[list[dict[str, Any]]]:
    """Rows with aligned labels, of which the first are not trained."""
    random = torch.Generator().manual_seed(5)
    found = []
    for step in range(count):
        rows = []
        for length in LENGTHS[step % len(LENGTHS)]:
            ids = torch.randint(1, vocabulary, (length + 1,), generator=random).tolist()
            labels = [-100 if i < length // 3 else token for i, token in enumerate(ids[1:])]
            rows.append({"input_ids": ids[:-1], "labels": labels, "length": length})
        found.append(rows)
    return found


def built(folder: str, sizes: dict[str, Any], **options: Any) -> MegatronModel:
    """A model in fp32; the one before must be out of use."""
    gc.collect()
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    return MegatronModel(folder, device_mesh=mesh, mixed_precision="no", **options)


def steps(model: MegatronModel, batches: list[Any], name: str = "") -> dict[str, list[float]]:
    """Losses over all data ranks, and gradient norms."""
    mesh, losses, norms = model.engine.mesh, [], []
    for rows in batches:
        mine = share(rows, mesh.data_rank, mesh.data_world_size)
        loss = model.forward_backward(mine, adapter_name=name, micro_batch_size=1)
        held = sum(label != -100 for row in mine for label in row["labels"])
        total = model.engine.all_reduce(torch.tensor([float(loss) * held, float(held)], dtype=torch.float64))
        norms.append(float(model.clip_grad_and_step(1.0, adapter_name=name)))
        losses.append(float(total[0] / total[1]))
    return {"losses": losses, "norms": norms}


class Layouts:
    """Methods for ``twinkle_core.testing.ranks.run``."""

    def train(self, rank: int, world_size: int, folder: str, layouts: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
        """Ten updates under each layout."""
        found = []
        for sizes in layouts:
            model = built(folder, sizes)
            model.set_optimizer("default", lr=1e-2)
            found.append(steps(model, windows()))
            del model
        return found
