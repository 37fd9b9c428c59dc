"""Single verbs on several processes, what each draws, and what is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from twinkle_core.errors import ManyProcesses
from twinkle_core.mesh import DeviceMesh
from twinkle_core.runtime import local
from twinkle_core.testing import ranks
from twinkle_core.testing.toys import random_rows
from twinkle_transformers.parallel import mesh_of
from twinkle_transformers.testing import tiny_config

sys.path.insert(0, str(Path(__file__).parent))
from jobs import model, state
from verbs import Verbs


@pytest.mark.slow
def test_split_verbs_train_as_in_one_process():
    """Also with a loss that runs the output layer itself, after a training forward and after an evaluation."""
    meshes = {"dp": {"dp_size": 2}, "fsdp": {"fsdp_size": 2}, "tp": {"tp_size": 2}}
    parts = ranks.run(Verbs, "split", 2, {"meshes": meshes}, timeout=240)
    alone = Verbs().split(0, 1, {"one": {}})
    for part in parts:
        for name, found in part.items():
            expected = alone[f"one {name.split()[1]}"]
            assert found["seen"] == pytest.approx(expected["seen"], rel=2e-5), name
            for key, value in expected["weights"].items():
                torch.testing.assert_close(found["weights"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_dropout_is_the_same_where_rows_are():
    meshes = {"tp": {"tp_size": 4}, "both": {"dp_size": 2, "tp_size": 2}, "dp": {"dp_size": 4}}
    meshes["tp"] = {"dp_size": 2, "tp_size": 2}
    meshes["shards"] = {"fsdp_size": 2, "tp_size": 2}
    parts = ranks.run(Verbs, "dropout", 4, {"meshes": meshes}, timeout=240)
    for name in meshes:
        for i, one in enumerate(parts):
            for other in parts[:i]:
                a, b = one[name], other[name]
                assert torch.equal(a["drawn"], b["drawn"]) == (a["data_rank"] == b["data_rank"]), name
                assert a["held"].keys() == b["held"].keys()
                assert all(torch.equal(a["held"][k], b["held"][k]) for k in a["held"]), f"{name}: ranks drift apart"


@pytest.mark.slow
def test_what_ranks_cannot_do_is_refused_by_name(tmp_path):
    tiny_config(num_attention_heads=3, num_key_value_heads=3, hidden_size=24).save_pretrained(tmp_path)  # and no weights
    for found in ranks.run(Verbs, "refused", 2, {"folder": str(tmp_path)}, timeout=240):
        for name in ("tp", "ep"):
            said = f"adapter 'a' can't be made: ParamWrapper on Qwen3MoeExperts, whose weights are cut over {name} ranks"
            assert said in found[f"experts {name}"] and "take fsdp_size, or other target modules" in found[f"experts {name}"]
            assert found[f"kept {name}"] and found[f"goes on {name}"]
        assert "hidden" in found["hidden"] and "leave ulysses_size at 1" in found["hidden"]
        assert "embeddings" in found["embeddings"] and "leave ulysses_size at 1" in found["embeddings"]
        assert found["goes on ulysses"]
        assert "3 attention heads can't be shared by tp_size 2" in found["unread"], "told before weights are looked for"


@pytest.mark.parametrize("sizes", [{"dp_size": 2}, pytest.param({"fsdp_size": 2}, marks=pytest.mark.slow)], ids=["dp", "fsdp"])
def test_ranks_that_come_apart_fail_together_and_go_on(sizes, tmp_path):
    """A verb that one rank calls alone, what differs between ranks, rows that one can't use: all say so at once."""
    first, second = ranks.run(Verbs, "apart", 2, {"sizes": sizes, "folder": str(tmp_path)}, timeout=240)
    verbs = ["save", "calculate_metric", "forward_only", "clip_grad_and_step"] + ["generate"] * ("fsdp_size" in sizes)
    for name in verbs:
        for found in (first, second):
            assert found[name].startswith("RanksApart: ranks make different calls"), found[name]
            assert f"rank 0 in {name} of the base model; rank 1 in forward of the base model" in found[name]
    for found in (first, second):
        assert f"'{tmp_path}/c0'" in found["names"] and f"rank 1 in save of the base model as '{tmp_path}/c1'" in found["names"]
        assert found["written"] == []
        for name in ("rates", "ranks", "targets"):
            assert found[name].startswith("RanksApart: ranks make the same call with different settings"), found[name]
        assert "rank 0 in clip_grad_and_step of the base model with SGD (lr 0.1, " in found["rates"]
        assert "rank 1 in clip_grad_and_step of the base model with SGD (lr 0.2, " in found["rates"]
        assert "[2, 32] float32; rank 1 in the making of 4 tensors, of which number 1 is [3, 32]" in found["ranks"], found[
            "ranks"
        ]
        assert found["goes on"] == first["goes on"] > 0 and found["adapters"] == []
        assert found["window"] == (2, True), "what the window held before is as it was"
        assert found["norm"] == first["norm"] > 0 and found["loss"] == first["loss"]
    for name, kind in (
        ("ids", "BadRow"),
        ("labels", "BadRow"),
        ("classes", "BadRow"),
        ("long", "BadRow"),
        ("evaluated", "BadRow"),
    ):
        verb = "forward_only" if name == "evaluated" else "forward_backward"
        own = second[name]
        assert own.startswith(f"{kind}: row "), own
        assert (
            first[name] == f"FailedElsewhere: {verb} of the base model failed on rank 1, and was given up on all ranks: {own}"
        )
    alone = model({})
    alone.set_optimizer("sgd", lr=0.1)
    rows = random_rows([5, 7, 6, 5], vocabulary=250)
    for _ in range(2):
        alone.forward_backward(rows, gradient_accumulation_steps=2)
    assert first["norm"] == pytest.approx(alone.clip_grad_and_step(), rel=2e-5)
    for key, value in state(alone).items():
        torch.testing.assert_close(first["weights"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_mesh_of_initialize_is_the_default():
    for found in ranks.run(Verbs, "default_mesh", 2, {}, timeout=240):
        assert found["taken"] == "fully_shard over 2" and found["given"] == "dp 2" and found["same"]
        assert found["rows"] == [4, 2] and found["explicit"] == 4


def test_whose_mesh_does_not_fit_is_told(monkeypatch):
    runtime = local.LocalRuntime()
    mesh = DeviceMesh.from_sizes(fsdp_size=2)
    runtime.start(nproc_per_node=None, groups=(), mesh=mesh, seed=42, full_determinism=False)
    monkeypatch.setattr(local, "_state", local._State(runtime))
    with pytest.raises(
        ManyProcesses, match=r"no device mesh was given, and that of initialize\(global_device_mesh=\.\.\.\) has 2"
    ):
        mesh_of("TransformersModel", None)
    with pytest.raises(ManyProcesses, match=r"TransformersModel: its device mesh has 4 rank"):
        mesh_of("TransformersModel", DeviceMesh.from_sizes(dp_size=4))
    assert mesh_of("TransformersModel", DeviceMesh.from_sizes()).world_size == 1
