"""Several processes train as one does on the same global batches."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from twinkle_core.errors import BadArgument, BadLayout, WrongArgument
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing import ranks
from twinkle_transformers import fsdp, tensor
from twinkle_transformers.parallel import KINDS, check_ddp_config, partition, place
from twinkle_transformers.testing import tiny_config, write_tiny_llama

sys.path.insert(0, str(Path(__file__).parent))
from jobs import Jobs, moe_config
from verbs import Verbs


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


#: LoRA that is not on experts
BESIDE = {"targets": ["q_proj", "o_proj"]}


def kept(job):
    """What of a job's options changes what is trained."""
    return {key: value for key, value in job.get("options", {}).items() if key == "targets"}


def compare(jobs, world_size, timeout=240):
    parts = ranks.run(Jobs, "train", world_size, {"jobs": jobs}, timeout=timeout)
    alone = Jobs().train(0, 1, {name: {**job, "sizes": {}, "options": kept(job)} for name, job in jobs.items()})
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


def test_two_ranks_resume_bit_for_bit(tmp_path):
    """With dropout, so that each rank's random state counts; optimizers of whole and of sharded weights."""
    options = {"dropout": 0.2}
    jobs = {
        "dp": {"sizes": {"dp_size": 2}, "optimizer": "adamw", "adapter": "a", "options": options},
        "fsdp": {"sizes": {"fsdp_size": 2}, "optimizer": "adamw"},
        "fsdp_lora": {"sizes": {"fsdp_size": 2}, "optimizer": "adamw", "adapter": "a", "options": options},
    }
    parts = ranks.run(Jobs, "checkpoints", 2, {"folder": str(tmp_path), "jobs": jobs}, timeout=240)
    for part in parts:
        for name, found in part.items():
            assert found["unbroken"] == found["resumed"], name
            assert all(torch.equal(found["first"][k], found["second"][k]) for k in found["first"])
    tensors = load_file(tmp_path / "fsdp" / "model.safetensors")
    assert len([k for k in tensors if "embed_tokens" in k or "lm_head" in k]) == 1, "a tied weight is stored once"
    # one process goes on from what two wrote
    alone = Jobs().resume(
        0,
        1,
        {name: parts[0][name]["path"] for name in ("fsdp", "fsdp_lora")},
        {"fsdp": {"sizes": {}, "optimizer": "adamw"}, "fsdp_lora": {"sizes": {}, "optimizer": "adamw", "adapter": "a"}},
        str(tmp_path),
    )
    expected, found = parts[0]["fsdp"], alone["fsdp"]
    torch.testing.assert_close(torch.tensor(found["seen"]), torch.tensor(expected["unbroken"]), rtol=2e-5, atol=1e-7)
    for key, value in expected["first"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_resume_on_other_meshes(tmp_path):
    """2 ranks, then 1, then 4."""
    spec = {"optimizer": "adamw"}
    two = ranks.run(
        Jobs, "checkpoints", 2, {"folder": str(tmp_path), "jobs": {"m": {**spec, "sizes": {"fsdp_size": 2}}}}, timeout=240
    )[0]["m"]
    one = Jobs().resume(0, 1, {"m": two["path"]}, {"m": {**spec, "sizes": {}}}, str(tmp_path / "one"))["m"]
    job = {"m": {**spec, "sizes": {"fsdp_size": 2, "dp_size": 2}}}
    four = ranks.run(
        Jobs, "resume", 4, {"paths": {"m": one["path"]}, "jobs": job, "folder": str(tmp_path / "four")}, timeout=240
    )
    for found in (one, *(part["m"] for part in four)):
        torch.testing.assert_close(torch.tensor(found["seen"]), torch.tensor(two["unbroken"]), rtol=2e-5, atol=1e-7)
        for key, value in two["first"].items():
            torch.testing.assert_close(found["weights"][key], value, rtol=1e-4, atol=1e-5)


def test_faults_of_data_ranks():
    first, second = ranks.run(Jobs, "faults", 2, {}, timeout=240)
    alone = Jobs().faults(0, 1)
    for found in (first, second):
        assert found["nonfinite"] == "NonFiniteGradients", "one rank's NaN is told on all"
        assert found["kept"]
        assert found["one rank without labels"] == pytest.approx(alone["one rank without labels"], rel=2e-5)
        assert found["no labels at all"] is None
    assert first["one rank without labels"] == second["one rank without labels"]


@pytest.mark.slow
def test_B04_ranks_with_few_tokens_count_by_their_tokens():
    first, second = ranks.run(Jobs, "uneven_tokens", 2, {}, timeout=240)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.tensor([-0.25, 0.25]))
    torch.testing.assert_close(Jobs().uneven_tokens(0, 1), first)


@pytest.mark.slow
def test_B34_embeddings_are_contrasted_over_all_ranks():
    parts, alone = ranks.run(Jobs, "embeddings", 2, {}, timeout=240), Jobs().embeddings(0, 1)
    for part in parts:
        assert part["norms"] == pytest.approx(alone["norms"], rel=2e-5)
        for key, value in alone["weights"].items():
            torch.testing.assert_close(part["weights"][key], value, rtol=1e-4, atol=1e-5)


def test_weights_that_lie_apart(tmp_path):
    write_tiny_llama(tmp_path)
    first, second = ranks.run(Jobs, "sharded", 2, {"folder": str(tmp_path)}, timeout=240)
    for found in (first, second):
        assert found["read by one"] and found["same logits"] and found["tied"]
        assert found["bf16"][-1] < found["bf16"][0] and found["dtype"] == "torch.float32"


def test_two_tensor_parts():
    jobs = {f"{o}{a}": {"sizes": {"tp_size": 2}, "optimizer": o, "adapter": a} for o in ("sgd", "adamw") for a in ("", "a")}
    jobs["window"] = {"sizes": {"tp_size": 2}, "optimizer": "sgd", "window": 5, "kind": "normed"}
    compare(jobs, 2)


#: tokens between layers shared too
SHARED = {"tp_size": 2, "sequence_parallel": True}


def test_tokens_between_two_tensor_parts():
    """Rows of odd lengths among them, norms and biases that see a part of the tokens, packed rows, and layers run again."""
    jobs = {f"{o}{a}": {"sizes": SHARED, "optimizer": o, "adapter": a} for o in ("sgd", "adamw") for a in ("", "a")}
    jobs["window"] = {"sizes": SHARED, "optimizer": "sgd", "window": 5, "kind": "normed"}
    jobs["biased"] = {"sizes": SHARED, "optimizer": "adamw", "kind": "biased"}
    jobs["packed"] = {"sizes": SHARED, "optimizer": "sgd", "packed": True}
    jobs["checkpointed"] = {"sizes": SHARED, "optimizer": "sgd", "options": {"gradient_checkpointing": True}}
    compare(jobs, 2)


@pytest.mark.slow
def test_tokens_between_tensor_parts_and_experts_that_are_cut():
    jobs = {o: {"sizes": SHARED, "optimizer": o, "kind": "moe"} for o in ("sgd", "adamw")}
    jobs["lora"] = {"sizes": SHARED, "optimizer": "adamw", "kind": "moe", "adapter": "a", "options": BESIDE}
    compare(jobs, 2)


@pytest.mark.slow
def test_tensor_parts_on_two_times_two_ranks():
    for sizes in ({"dp_size": 2, "tp_size": 2}, {"dp_size": 2, **SHARED}):
        compare({f"{o}{a}": {"sizes": sizes, "optimizer": o, "adapter": a} for o in ("sgd", "adamw") for a in ("", "a")}, 4)


@pytest.mark.slow
def test_what_ranks_hold_between_layers():
    """Norms in layers see half of the tokens, those beside heads all; a model that needs whole rows there is refused; texts
    are generated as without. Ranks that share their rows say so when they were given different ones."""
    for found in ranks.run(Verbs, "between_layers", 2, {}, timeout=240):
        assert found["seen"] == {"input_layernorm": 4, "q_norm": 7 + 1, "norm": 8}
        assert found["texts"] == found["texts alone"]
        assert "ranks 0, 1 compute together on share 0 of the rows, and were given different rows" in found["rows apart"]
        assert "with parts of rows between its layers its outputs differ" in found["mixes"]
        assert "leave sequence_parallel off" in found["mixes"] and found["same"]


@pytest.mark.slow
def test_tensor_parts_that_lie_apart():
    """Weights cut over tp, and the parts over fsdp; norms whose gradients are parts, and experts that are cut too.

    The windows are closed by SGD: see the test of gradients below."""
    sizes = {"fsdp_size": 2, "tp_size": 2}
    jobs = {f"{o}{a}": {"sizes": sizes, "optimizer": o, "adapter": a} for o in ("sgd", "adamw") for a in ("", "a")}
    jobs["window"] = {"sizes": sizes, "optimizer": "sgd", "window": 5, "kind": "normed"}
    jobs["moe"] = {"sizes": sizes, "optimizer": "adamw", "kind": "moe"}
    jobs["tokens"] = {"sizes": {**sizes, **SHARED}, "optimizer": "sgd", "window": 5, "kind": "normed"}
    jobs["tokens lora"] = {"sizes": {**sizes, **SHARED}, "optimizer": "adamw", "adapter": "a"}
    compare(jobs, 4)


@pytest.mark.slow
def test_gradients_of_tensor_parts_that_lie_apart():
    """What AdamW is given. Weights under AdamW are not compared here: an embedding's element has a gradient of 5e-9, half of
    AdamW's eps, in a tensor whose largest is 1e-2. Rounding makes it 8e-9, and the step of this one element 8e-5 longer."""
    sizes = {"fsdp_size": 2, "tp_size": 2}
    job = {"kind": "normed", "optimizer": "adamw", "window": 5}
    jobs = {"parts": {**job, "sizes": sizes}, "tokens": {**job, "sizes": {**sizes, **SHARED}}}
    alone = Jobs().gradients(0, 1, {"one": {**job, "sizes": {}}})["one"]
    for part in ranks.run(Jobs, "gradients", 4, {"jobs": jobs}, timeout=240):
        for name, found in part.items():
            assert len(found["gradients"]) == len(alone["gradients"]) == 2
            for here, there in zip(found["gradients"], alone["gradients"], strict=True):
                assert here.keys() == there.keys()
                for key, gradient in there.items():
                    assert (here[key] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), (name, key)


@pytest.mark.slow
def test_experts_that_are_cut():
    job = {"sizes": {"tp_size": 2}, "kind": "moe"}
    jobs = {optimizer: {**job, "optimizer": optimizer} for optimizer in ("sgd", "adamw")}
    compare({**jobs, "lora": {**job, "optimizer": "adamw", "adapter": "a", "options": BESIDE}}, 2)


def test_two_shares_of_experts():
    jobs = {o: {"sizes": {"ep_size": 2}, "optimizer": o, "kind": "moe"} for o in ("sgd", "adamw")}
    jobs["window"] = {"sizes": {"ep_size": 2}, "optimizer": "adamw", "kind": "moe", "window": 5}
    jobs["data"] = {"sizes": {"dp_size": 2}, "optimizer": "adamw", "kind": "moe"}
    jobs["shards"] = {"sizes": {"fsdp_size": 2}, "optimizer": "adamw", "kind": "moe", "adapter": "a"}
    jobs["lora"] = {"sizes": {"ep_size": 2}, "optimizer": "adamw", "kind": "moe", "adapter": "a", "options": BESIDE}
    both = {"sizes": {"fsdp_size": 2, "ep_size": 2}, "optimizer": "adamw", "kind": "moe"}
    jobs["both"] = {**both, "window": 5}
    jobs["both lora"] = {**both, "adapter": "a", "options": BESIDE}
    compare(jobs, 2)


@pytest.mark.slow
def test_shares_of_experts_beside_other_parts():
    """Tokens of the same rows on the ranks of tp and of ulysses; read by one rank; layers run again."""
    job = {"optimizer": "sgd", "kind": "moe"}
    both = {"fsdp_size": 2, "ep_size": 2}
    jobs = {"shards": {**job, "sizes": both}}
    jobs["by one"] = {**job, "sizes": both, "options": {"memory_efficient_init": True, "gradient_checkpointing": True}}
    jobs["sequence"] = {**job, "sizes": {"dp_size": 2, "ulysses_size": 2, "ep_size": 2}}
    for name, sizes in (("tensor", {"tp_size": 2, "ep_size": 2}), ("tokens", {**SHARED, "ep_size": 2})):
        jobs[name] = {**job, "sizes": sizes}
        jobs[f"{name} lora"] = {"optimizer": "adamw", "kind": "moe", "sizes": sizes, "adapter": "a", "options": BESIDE}
    compare(jobs, 2)


@pytest.mark.slow
def test_shares_of_experts_of_which_two_ranks_have_each():
    """Parts of each expert on the two, or copies; more ranks for experts than for rows."""
    job, lora = {"optimizer": "adamw", "kind": "moe"}, {"adapter": "a", "options": BESIDE}
    shards, hybrid = {"fsdp_size": 4, "ep_size": 2}, {"dp_size": 2, "fsdp_size": 2, "ep_size": 2}
    jobs = {"shards": {**job, "sizes": shards}, "lora": {**job, "sizes": shards, **lora}}
    jobs |= {"hybrid": {**job, "sizes": hybrid, "window": 5}}
    jobs["copies"] = {**job, "sizes": {"dp_size": 2, "tp_size": 2, "ep_size": 2}}
    jobs["all"] = {**job, "sizes": {"fsdp_size": 2, "ep_size": 4, **SHARED}, "optimizer": "sgd"}
    jobs["parts"] = {**job, "sizes": {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, "optimizer": "sgd", "window": 5}
    jobs["one"] = {**job, "sizes": {"fsdp_size": 4, "ep_size": 4}, "optimizer": "sgd"}
    compare(jobs, 4)


def test_two_parts_of_the_sequence():
    sizes = {"dp_size": 2, "ulysses_size": 2}
    jobs = {f"{o}{a}": {"sizes": sizes, "optimizer": o, "adapter": a} for o in ("sgd", "adamw") for a in ("", "a")}
    jobs["window"] = {"sizes": sizes, "optimizer": "sgd", "window": 5, "kind": "normed"}
    jobs["packed"] = {"sizes": sizes, "optimizer": "sgd", "packed": True}
    jobs["checkpointed"] = {"sizes": sizes, "optimizer": "sgd", "options": {"gradient_checkpointing": True}}
    compare(jobs, 2)


@pytest.mark.slow
def test_parts_of_the_sequence_on_two_times_two_ranks():
    """Data ranks that each share their rows, and weights that lie apart besides."""
    data, shards = {"dp_size": 4, "ulysses_size": 2}, {"fsdp_size": 4, "ulysses_size": 2}
    jobs = {f"{o}{n}": {"sizes": s, "optimizer": o} for o in ("sgd", "adamw") for n, s in (("dp", data), ("fsdp", shards))}
    compare(jobs, 4)


@pytest.mark.slow
def test_two_tenants_train_as_in_one_process():
    meshes = {"dp": {"dp_size": 2}, "fsdp": {"fsdp_size": 2}, "tp": {"tp_size": 2}}
    parts = ranks.run(Jobs, "tenants", 2, {"meshes": meshes}, timeout=240)
    alone = Jobs().tenants(0, 1, {"one": {}})["one"]
    for part in parts:
        for name, found in part.items():
            assert len(found["norms"]) == 5
            assert found["norms"] == pytest.approx(alone["norms"], rel=2e-5), name
            for adapter, weights in alone["weights"].items():
                apart = torch.stack([(found["weights"][adapter][k] - w).norm() for k, w in weights.items()]).norm()
                update = torch.stack([(alone["start"][adapter][k] - w).norm() for k, w in weights.items()]).norm()
                assert apart / update < 1e-4, name


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"pp_size": 2}, r"pp_size 2 is not for transformers models \(fsdp_size and tp_size share the weights\)"),
        ({"cp_size": 2}, "ulysses_size shares long rows"),
        ({"tp_size": 3}, r"4 attention heads can't be shared by tp_size 3 \(4 / 3 = 1.333\)"),
        ({"tp_size": 4}, r"2 key-value heads can't be shared by tp_size 4 \(2 / 4 = 0.5\)"),
        ({"dp_size": 4, "ulysses_size": 4}, r"2 key-value heads can't be shared by ulysses_size 4"),
        ({"tp_size": 2, "dp_size": 2, "ulysses_size": 2}, "both share the attention heads"),
        ({"dp_size": 2, "ep_size": 2}, "LlamaConfig has no experts"),
        ({"dp_size": 2, "sequence_parallel": True}, "sequence_parallel shares tokens among the ranks of tp, and tp_size is 1"),
    ],
)
def test_meshes_that_make_no_sense_say_why(sizes, text):
    mesh = DeviceMesh.from_sizes(**sizes)
    with pytest.raises(BadLayout, match=text):
        tensor.check_mesh("TransformersModel", mesh)
        tensor.check("TransformersModel", tiny_config(), mesh)


def test_tokens_of_a_model_that_sees_are_not_shared():
    config = types.SimpleNamespace(get_text_config=tiny_config)
    with pytest.raises(BadLayout, match="sequence_parallel is for models of texts, and this is a SimpleNamespace; leave it"):
        tensor.check("TransformersModel", config, DeviceMesh.from_sizes(**SHARED))


def test_experts_are_shared_evenly():
    with pytest.raises(BadLayout, match=r"4 experts can't be shared by ep_size 3"):
        tensor.check("TransformersModel", moe_config(), DeviceMesh.from_sizes(dp_size=3, ep_size=3))


def test_parts_of_experts_are_even():
    """An expert of 3 x 5 on two ranks."""
    experts = torch.nn.Module()
    experts.weight = torch.nn.Parameter(torch.zeros(4, 3, 5))
    found = object.__new__(tensor.Experts)
    found.owner, found._places = "TransformersModel", [(experts, "weight")]
    found.mesh = {"fsdp": types.SimpleNamespace(size=lambda: 2), "ep": types.SimpleNamespace(size=lambda: 4)}
    with pytest.raises(BadLayout, match=r"weight of Module \[4, 3, 5\] has no axis of 2 equal parts; take dp_size"):
        found.shard({})
    experts.scale = torch.nn.Parameter(torch.zeros(4, 4))
    experts.weight = torch.nn.Parameter(torch.zeros(4, 4, 5))
    with pytest.raises(BadLayout, match="scale of Module is no expert's; take dp_size"):
        found.shard({})


def test_every_rank_is_in_one_group_of_each_kind():
    mesh = DeviceMesh.from_sizes(dp_size=4, fsdp_size=2, tp_size=2, ulysses_size=2)
    for kind in KINDS:
        groups = partition(mesh, kind)
        assert sorted(r for g in groups for r in g) == list(range(16)) and len({len(g) for g in groups}) == 1
    for group in partition(mesh, "dp"):
        assert sorted(place(mesh, r)[0] for r in group) == [0, 1, 2, 3]
        assert sorted(mesh.at(r).data_rank for r in group) == [0, 1, 2, 3]
    for group in partition(mesh, "sequence"):
        assert len({mesh.at(r).data_rank for r in group}) == 1


def test_options_of_wrappers_are_checked():
    with pytest.raises(WrongArgument, match="bucket_cap_mb"):
        check_ddp_config({"bucket_cap": 1})
    with pytest.raises(WrongArgument, match="reshard_after_forward"):
        fsdp.check_config({"reshard_after_foward": True}, DeviceMesh.from_sizes())
    assert check_ddp_config({"bucket_cap_mb": 4}) == 4.0
    assert check_ddp_config({}) == 25.0
    for size in (0, -1, True, "4", math.inf):
        with pytest.raises(BadArgument, match=r"ddp_config: bucket_cap_mb=.* a number of megabytes above 0"):
            check_ddp_config({"bucket_cap_mb": size})


def test_options_of_shards_are_told_where_nothing_is_sharded(caplog):
    for sizes in ({}, {"fsdp_size": 2}):
        fsdp.check_config({"reshard_after_forward": True}, DeviceMesh.from_sizes(**sizes))
    fsdp.check_config({}, DeviceMesh.from_sizes(dp_size=2))
    assert caplog.messages == []
    fsdp.check_config({"reshard_after_forward": True}, DeviceMesh.from_sizes(dp_size=2))
    assert caplog.messages == ["fsdp_config is without effect: the mesh has no fsdp_size over 1"]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp_size": 2}, {"tp_size": 2}], ids=["fsdp", "tp"])
def test_what_goes_beside_the_usual_step(sizes):
    parts, alone = ranks.run(Jobs, "beside", 2, {"sizes": sizes}, timeout=240), Jobs().beside(0, 1, {})
    for part in parts:
        assert part["fp16"] == alone["fp16"]
        assert part["hidden"] == pytest.approx(alone["hidden"], rel=2e-5)
        assert part["values"] == pytest.approx(alone["values"], rel=2e-5)
    assert [updates for _, updates in alone["fp16"]] == [1, 1, 2], "an overflow skips its update"
