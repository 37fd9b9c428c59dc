"""Several processes train as one does on the same global batches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from twinkle_core.testing import ranks

sys.path.insert(0, str(Path(__file__).parent))
from jobs import Jobs


def assert_same_training(alone, parts):
    """Losses and norms to 2e-5; weights apart by less than 1e-4 of what training changed; ranks bit-equal."""
    for part in parts:
        torch.testing.assert_close(torch.tensor(part["seen"]), torch.tensor(alone["seen"]), rtol=2e-5, atol=1e-7)
        keys = alone["weights"].keys()
        assert part["weights"].keys() == keys
        assert all(torch.equal(part["start"][k], alone["start"][k]) for k in keys)
        apart = torch.stack([(part["weights"][k] - alone["weights"][k]).double().norm() for k in keys]).norm()
        update = torch.stack([(alone["start"][k] - alone["weights"][k]).double().norm() for k in keys]).norm()
        assert apart / update < 1e-4
        assert all(torch.equal(part["weights"][k], parts[0]["weights"][k]) for k in keys)
        torch.testing.assert_close(part["logits"], alone["logits"], rtol=1e-4, atol=1e-4)


def compare(jobs, world_size, timeout=240):
    parts = ranks.run(Jobs, "train", world_size, {"jobs": jobs}, timeout=timeout)
    alone = Jobs().train(0, 1, {name: {**job, "sizes": {}, "options": {}} for name, job in jobs.items()})
    for name in jobs:
        try:
            assert_same_training(alone[name], [part[name] for part in parts])
        except AssertionError as error:
            error.add_note(f"of the job {name}")
            raise


def test_two_data_ranks():
    jobs = {f"{o}{a}": {"sizes": {"dp_size": 2}, "optimizer": o, "adapter": a} for o in ("sgd", "adamw") for a in ("", "a")}
    jobs["window"] = {"sizes": {"dp_size": 2}, "optimizer": "adamw", "window": 5}
    compare(jobs, 2)


def test_two_shards():
    jobs = {f"{o}{a}": {"sizes": {"fsdp_size": 2}, "optimizer": o, "adapter": a} for o in ("sgd", "adamw") for a in ("", "a")}
    jobs["window"] = {"sizes": {"fsdp_size": 2}, "optimizer": "adamw", "window": 5}
    jobs["untied"] = {"sizes": {"fsdp_size": 2}, "optimizer": "adamw", "kind": "untied"}
    compare(jobs, 2)


@pytest.mark.slow
def test_shards_on_two_times_two_ranks():
    sizes = {"dp_size": 2, "fsdp_size": 2}
    compare({f"{o}{a}": {"sizes": sizes, "optimizer": o, "adapter": a} for o in ("sgd", "adamw") for a in ("", "a")}, 4)
