"""Tenants on several ranks train as in one process on the same global batches, and feel one another no more than there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from twinkle_core.errors import BadLayout
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing import ranks
from twinkle_multilora.layers import Draws
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_transformers.testing import tiny_config

sys.path.insert(0, str(Path(__file__).parent))
from tenant_jobs import Jobs

WEIGHTS = "adapter_model.safetensors"
MESHES = {"dp": {"dp_size": 2}, "fsdp": {"fsdp_size": 2}}


def assert_same_training(alone, parts):
    """Losses and norms to 2e-5; weights apart by less than 1e-4 of what training changed; ranks bit-equal."""
    for part in parts:
        for name, expected in alone["weights"].items():
            seen, start, found = part["seen"][name], part["start"][name], part["weights"][name]
            torch.testing.assert_close(torch.tensor(seen), torch.tensor(alone["seen"][name]), rtol=2e-5, atol=1e-7)
            assert found.keys() == expected.keys()
            assert all(torch.equal(start[k], alone["start"][name][k]) for k in start)
            apart = torch.stack([(found[k] - expected[k]).double().norm() for k in expected]).norm()
            update = torch.stack([(start[k] - expected[k]).double().norm() for k in expected]).norm()
            assert apart / update < 1e-4
            assert all(torch.equal(found[k], parts[0]["weights"][name][k]) for k in expected)


def compare(jobs, world_size, timeout=240):
    parts = ranks.run(Jobs, "train", world_size, {"jobs": jobs}, timeout=timeout)
    alone = Jobs().train(0, 1, {name: {**job, "sizes": {}} for name, job in jobs.items()})
    for name in jobs:
        try:
            assert_same_training(alone[name], [part[name] for part in parts])
        except AssertionError as error:
            error.add_note(f"of the job {name}")
            raise


def test_two_ranks_train_tenants_as_one_process():
    compare(
        {
            f"{mesh} {optimizer} {together}": {"sizes": sizes, "optimizer": optimizer, "together": together}
            for mesh, sizes in MESHES.items()
            for optimizer in ("sgd", "adamw")
            for together in (False, True)
        },
        2,
    )


@pytest.mark.slow
def test_shards_on_two_times_two_ranks():
    sizes = {"dp_size": 2, "fsdp_size": 2}
    compare({o: {"sizes": sizes, "optimizer": o, "together": True} for o in ("sgd", "adamw")}, 4)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)


def test_company_changes_no_bit_on_a_mesh():
    """With dropout. By threads, too, which come in another order on each rank, and share passes nevertheless."""
    for found in ranks.run(Jobs, "company", 2, {"meshes": MESHES}, timeout=240):
        for mesh in MESHES:
            for name in "ab":
                alone = found[f"{mesh} {name} alone"][name]
                for case in ("abc", "cba", "threads"):
                    assert same(found[f"{mesh} {case}"][name], alone), (mesh, case, name)
            assert same(found[f"{mesh} abc"]["c"], found[f"{mesh} threads"]["c"])
            assert max(found[f"{mesh} groups"]) > 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What two ranks tell of their checkpoints, with and without dropout."""
    jobs = {f"{mesh}{dropout}": (sizes, dropout) for mesh, sizes in MESHES.items() for dropout in (0.0, 0.3)}
    given = {"folder": str(tmp_path_factory.mktemp("saved")), "jobs": jobs}
    return ranks.run(Jobs, "checkpoints", 2, given, timeout=240)


def test_checkpoints_of_ranks(saved):
    """A tenant resumes bit for bit, in another slot and company; plain PEFT loads it."""
    for part in saved:
        for name, found in part.items():
            assert found["unbroken"] == found["resumed"], name
            assert all(same(a, b) for a, b in zip(found["first"], found["second"], strict=True))
    for found in saved[0].values():
        for tenant, path in found["paths"].items():
            base = LlamaForCausalLM(tiny_config())
            loaded = get_peft_model_state_dict(PeftModel.from_pretrained(base, path))
            assert same(loaded, found["saved"][tenant])


def test_one_process_goes_on_from_what_ranks_wrote(saved, tmp_path):
    """Without dropout, whose masks belong to ranks."""
    alone = Jobs().checkpoints(0, 1, str(tmp_path), {"one": ({}, 0.0)})["one"]
    for mesh in MESHES:
        assert_goes_on(saved[0][f"{mesh}0.0"], alone)


def assert_goes_on(found, alone):
    """What ranks wrote is what one process writes, and one process trains on from it."""
    for tenant in "ab":
        wrote, expected = load_file(Path(found["paths"][tenant]) / WEIGHTS), load_file(Path(alone["paths"][tenant]) / WEIGHTS)
        assert wrote.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(wrote[key], value, rtol=1e-4, atol=1e-5)
    gone_on = Jobs().resume(0, 1, found["paths"], {})
    for i, tenant in enumerate("ab"):
        torch.testing.assert_close(
            torch.tensor(gone_on["seen"][tenant]), torch.tensor(found["unbroken"][tenant]), rtol=2e-5, atol=1e-7
        )
        for key, value in gone_on["weights"][tenant].items():
            torch.testing.assert_close(value, found["first"][i][key], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """What two ranks answer, by mesh."""
    given = {"folder": str(tmp_path_factory.mktemp("questions")), "meshes": MESHES}
    first, second = ranks.run(Jobs, "questions", 2, given, timeout=240)
    return {mesh: (first[mesh], second[mesh]) for mesh in MESHES}


@pytest.mark.parametrize("mesh", MESHES)
def test_micro_batches_of_which_ranks_have_more_or_fewer(mesh, questions):
    alone = Jobs().micro({})
    for part in questions[mesh]:
        for case, found in part["micro"].items():
            for name, expected in alone[case].items():
                torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(expected), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("mesh", MESHES)
def test_what_fails_on_one_rank_fails_on_all(mesh, questions):
    """And costs nobody else anything."""
    first, second = (part["faults"] for part in questions[mesh])
    for case, own in (
        ("rows", "BadRow"),
        ("many", "BadRow"),
        ("loss", "ZeroDivisionError"),
        ("loss in company", "ZeroDivisionError"),
    ):
        assert second[case][0] == own
        assert first[case][0] == "FailedElsewhere"
        assert "rank 1" in first[case][1]
        assert own in first[case][1]
    assert "adapter 'a'" in first["rows"][1]
    for found in (first, second):
        for case in ("apart", "apart in company"):
            assert (
                found[case][0] == "RanksApart"
                and "rank 1 in forward_backward of adapter 'a' at temperature 2.0" in found[case][1]
            )
        assert found["nothing"][0] == "EmptyBatch"
        assert found["counts"] == [0, 0]
        assert found["windows"] == [0, 1]
        assert found["as if nothing was"]
        assert found["free"] == 1
        assert found["rng"]
    assert (first["acquire"][0], second["acquire"][0]) == ("FailedElsewhere", "NoSuchPath")
    assert same(first["c"], second["c"])
    assert "lora_2 of 3" in first["local"]
    assert second["tenants"] == 3


@pytest.mark.parametrize("mesh", MESHES)
def test_mixed_precision_and_checkpointing(mesh, questions):
    first, second = (part["mixed"] for part in questions[mesh])
    assert same(first["ab"], first["a"])
    assert same(first["ab"], second["ab"])
    assert torch.tensor(first["a"]["seen"]).isfinite().all()


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_give_one_answer_and_make_the_same_calls(mesh, questions):
    first, second = (part["answers"] for part in questions[mesh])
    assert first["way"] == second["way"] == "apart"
    assert first["norm"] == second["norm"]
    assert torch.equal(first["logps"], second["logps"])
    assert "rank 0 is at step of 'b', and rank 1 waits with forward_backward of 'a'" in second["apart"]


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_size": 2, "ep_size": 2}, {"dp_size": 2, "ulysses_size": 2}])
def test_meshes_that_tenants_cannot_be_laid_over(sizes, monkeypatch):
    monkeypatch.setattr("twinkle_multilora.model.mesh_of", lambda owner, mesh: mesh)  # as if two processes ran
    with pytest.raises(BadLayout, match=list(sizes)[-1]):
        MultiLoraTransformersModel(config=tiny_config(), device_mesh=DeviceMesh.from_sizes(device_type="cpu", **sizes))


def test_ranks_draw_masks_of_their_own():
    """One seed for all ranks, as a checkpoint has it."""
    masks = {Draws(5, rank=rank).mask(3, 1) for rank in range(3)}
    assert len(masks) == 3
    assert Draws(5).mask(3, 1) == Draws(5, rank=0).mask(3, 1)
    assert Draws(5).mask(3, 2) not in masks
