"""The same training on workers and in one process."""

from __future__ import annotations

import torch

from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.toys import random_rows
from twinkle_transformers.model import TransformersModel

STEPS = 10
LR = {"sgd": 0.1, "adamw": 1e-3}


def batches():
    """Global batches of rows of unequal lengths; of some rows few or no tokens are labelled, and one batch is one row."""
    found = []
    for step in range(STEPS):
        rows = random_rows([3 + (5 * step + 7 * i) % 11 for i in range(5)], vocabulary=250)
        rows = [{**row, "input_ids": [(t + step) % 250 for t in row["input_ids"]]} for row in rows]
        for row in rows[-2:]:
            row["labels"] = [-100] * (len(row["labels"]) - 1) + row["labels"][-1:] if step % 2 else [-100] * len(row["labels"])
        found.append(rows[:1] if step == 3 else rows)
    return found


def built(folder, group=None, adapter=None, optimizer="sgd", cls=TransformersModel, **sizes):
    """A model of a folder, with the adapter of another folder; on a group's workers, or here."""
    where = {} if group is None else {"remote_group": group}
    if sizes:
        where["device_mesh"] = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    made = cls(model_id=str(folder), mixed_precision="no", **where)
    if adapter is not None:
        made.add_adapter_to_model("a", str(adapter))
    made.set_optimizer(optimizer, lr=LR[optimizer])
    made.add_metric("loss")
    return made


def state(model):
    return {key: value.clone() for key, value in model.get_state_dict().items()}


def train(model, rows, window=1):
    """(loss of the call, mean over the window, gradient norm) of each window."""
    found = []
    for i in range(0, len(rows), window):
        losses = [float(model.forward_backward(batch, gradient_accumulation_steps=window)) for batch in rows[i : i + window]]
        norm = model.clip_grad_and_step(0.5)
        found.append([losses[-1], model.calculate_metric()["loss"], norm])
    return found


def assert_same(there, here, start):
    """(seen, weights): losses and norms to 2e-5; weights apart by less than 1e-4 of what training changed."""
    torch.testing.assert_close(torch.tensor(there[0]), torch.tensor(here[0]), rtol=2e-5, atol=1e-7)
    keys = here[1].keys()
    assert there[1].keys() == keys
    apart = torch.stack([(there[1][k] - here[1][k]).double().norm() for k in keys]).norm()
    update = torch.stack([(start[k] - here[1][k]).double().norm() for k in keys]).norm()
    assert update > 0
    assert apart / update < 1e-4


def compare(folder, group="actor", rows=None, window=1, **how):
    rows = batches() if rows is None else rows
    sizes = {key: how.pop(key) for key in list(how) if key.endswith("_size")}
    here, there = built(folder, **how), built(folder, group, **how, **sizes)
    start = state(here)
    assert all(torch.equal(value, start[key]) for key, value in state(there).items())
    assert_same((train(there, rows, window), state(there)), (train(here, rows, window), state(here)), start)
