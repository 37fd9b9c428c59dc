"""Checkpoints of which each rank writes its part: on the same mesh bit for bit, on others to rounding, whole or absent."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from twinkle_core.errors import BadArgument, CheckpointDamaged, RankFailed
from twinkle_core.testing import ranks
from twinkle_core.train import checkpoint, shards
from twinkle_transformers.model import TransformersModel

sys.path.insert(0, str(Path(__file__).parent))
from jobs import Jobs, batches, ready, state, train
from saving import Saving, same

ADAMW = {"optimizer": "adamw", "save": {"sharded": True}}


def assert_goes_on(found, expected, weights):
    torch.testing.assert_close(torch.tensor(found["seen"]), torch.tensor(expected), rtol=2e-5, atol=1e-7)
    for key, value in weights.items():
        torch.testing.assert_close(found["weights"][key], value, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two shards trained 4 steps, were saved, and trained on 3 steps. The folder is not to be changed."""
    folder = tmp_path_factory.mktemp("two")
    jobs = {"m": {**ADAMW, "sizes": {"fsdp_size": 2}}}
    return ranks.run(Jobs, "checkpoints", 2, {"folder": str(folder), "jobs": jobs}, timeout=240)


def test_the_same_mesh_goes_on_bit_for_bit(two):
    for part in two:
        assert part["m"]["unbroken"] == part["m"]["resumed"] and same(part["m"]["first"], part["m"]["second"])
    path = Path(two[0]["m"]["path"])
    held = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    assert not [name for name in held if name in ("model.safetensors", "optimizer.safetensors")]
    assert len([name for name in held if name.startswith("model-shards/")]) == 2 and "config.json" in held
    names = shards.describe(shards.place(path, "model"))
    assert ("lm_head.weight" in names) + ("model.embed_tokens.weight" in names) == 1, "a tied weight is stored once"
    assert checkpoint.inspect(path, hashes=True).sharded == ["model", "optimizer"]


def test_one_process_goes_on(two, tmp_path):
    expected = two[0]["m"]
    one = Jobs().resume(0, 1, {"m": expected["path"]}, {"m": {"optimizer": "adamw", "sizes": {}}}, str(tmp_path))["m"]
    assert_goes_on(one, expected["unbroken"], expected["first"])
    model = TransformersModel(model_id=expected["path"], mixed_precision="no")
    plain = TransformersModel(model_id=model.save("plain", tmp_path), mixed_precision="no")
    again = TransformersModel(model_id=one["path"], mixed_precision="no")
    assert same(model.get_state_dict(), plain.get_state_dict()) and same(model.get_state_dict(), again.get_state_dict())
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight


@pytest.mark.slow
def test_other_meshes_go_on(two, tmp_path):
    """2 shards, then one process, then four ranks; and from shards to tensor parts and back."""
    expected = two[0]["m"]
    paths = {"m": expected["path"]}
    one = Jobs().resume(0, 1, paths, {"m": {**ADAMW, "sizes": {}}}, str(tmp_path / "one"))["m"]
    assert (Path(one["path"]) / "model-shards").is_dir()
    for name, sizes in (("four", {"fsdp_size": 4}), ("hybrid", {"fsdp_size": 2, "dp_size": 2})):
        given = {"paths": {"m": one["path"]}, "jobs": {"m": {**ADAMW, "sizes": sizes}}, "folder": str(tmp_path / name)}
        for part in ranks.run(Jobs, "resume", 4, given, timeout=240):
            assert_goes_on(part["m"], expected["unbroken"], expected["first"])
    given = {"paths": paths, "jobs": {"m": {**ADAMW, "sizes": {"tp_size": 2}}}, "folder": str(tmp_path / "tp")}
    parts = ranks.run(Jobs, "resume", 2, given, timeout=240)
    back = {"paths": {"m": parts[0]["m"]["path"]}, "jobs": {"m": {**ADAMW, "sizes": {"fsdp_size": 2}}}}
    parts += ranks.run(Jobs, "resume", 2, {**back, "folder": str(tmp_path / "back")}, timeout=240)
    for part in parts:
        assert_goes_on(part["m"], expected["unbroken"], expected["first"])


@pytest.mark.slow
def test_parts_of_layers_go_on(tmp_path):
    """Layers that are cut over tp, and over fsdp besides; experts whose gate and up are one matrix, of which a rank has two
    pieces; LoRA on them. The same mesh, then one process, then the other mesh."""
    both = {"fsdp_size": 2, "tp_size": 2}
    kinds = {"full": {}, "moe": {"kind": "moe"}, "lora": {"adapter": "a", "save": {}, "options": {"dropout": 0.2}}}
    jobs = {name: {**ADAMW, **kind, "sizes": both} for name, kind in kinds.items()}
    parts = ranks.run(Jobs, "checkpoints", 4, {"folder": str(tmp_path), "jobs": jobs}, timeout=240)
    for part in parts:
        for name, found in part.items():
            assert found["unbroken"] == found["resumed"], name
            assert same(found["first"], found["second"]), name
    jobs = {name: {**job, "sizes": {}} for name, job in jobs.items() if name != "lora"}
    paths = {name: parts[0][name]["path"] for name in jobs}
    alone = Jobs().resume(0, 1, paths, jobs, str(tmp_path / "one"))
    jobs = {name: {**job, "sizes": {"tp_size": 2}} for name, job in jobs.items()}
    given = {"paths": {name: alone[name]["path"] for name in jobs}, "jobs": jobs, "folder": str(tmp_path / "tp")}
    for found in (alone, *ranks.run(Jobs, "resume", 2, given, timeout=240)):
        for name in jobs:
            assert_goes_on(found[name], parts[0][name]["unbroken"], parts[0][name]["first"])


@pytest.mark.slow
def test_experts_on_their_ranks_go_on(tmp_path):
    """Whole ones, and beside shards; written by each rank, and by one."""
    job = {**ADAMW, "kind": "moe"}
    meshes = {"m": {"ep_size": 2}, "both": {"ep_size": 2, "fsdp_size": 2}, "tensor": {"ep_size": 2, "tp_size": 2}}
    jobs = {name: {**job, "sizes": sizes} for name, sizes in meshes.items()}
    jobs["plain"] = {**jobs["both"], "save": {}}
    parts = ranks.run(Jobs, "checkpoints", 2, {"folder": str(tmp_path), "jobs": jobs}, timeout=240)
    for part in parts:
        for name, found in part.items():
            assert found["unbroken"] == found["resumed"] and same(found["first"], found["second"]), name
    paths = {name: parts[0][name]["path"] for name in jobs}
    alone = Jobs().resume(0, 1, paths, {name: {**job, "sizes": {}} for name in jobs}, str(tmp_path / "one"))
    for name, found in alone.items():
        assert_goes_on(found, parts[0][name]["unbroken"], parts[0][name]["first"])


@pytest.mark.slow
def test_parts_of_experts_go_on(tmp_path):
    """Each expert on two ranks, in parts; the same mesh, one process, and experts on four ranks."""
    job = {**ADAMW, "kind": "moe"}
    given = {"folder": str(tmp_path), "jobs": {"m": {**job, "sizes": {"fsdp_size": 4, "ep_size": 2}}}}
    parts = [part["m"] for part in ranks.run(Jobs, "checkpoints", 4, given, timeout=240)]
    for found in parts:
        assert found["unbroken"] == found["resumed"] and same(found["first"], found["second"])
    alone = Jobs().resume(0, 1, {"m": parts[0]["path"]}, {"m": {**job, "sizes": {}}}, str(tmp_path / "one"))["m"]
    jobs = {"m": {**job, "sizes": {"fsdp_size": 4, "ep_size": 4}}}
    given = {"paths": {"m": alone["path"]}, "jobs": jobs, "folder": str(tmp_path / "four")}
    for found in (alone, *(part["m"] for part in ranks.run(Jobs, "resume", 4, given, timeout=240))):
        assert_goes_on(found, parts[0]["unbroken"], parts[0]["first"])


def test_no_rank_holds_the_whole(tmp_path):
    for rank, part in enumerate(ranks.run(Saving, "nothing_is_gathered", 2, {"folder": str(tmp_path)}, timeout=240)):
        assert part["same"]
        header = 16384
        assert part["own"] <= part["files"][rank] <= part["own"] + header, "its own part, and no more"


def test_dropout_is_one_on_ranks_that_come_to_share_rows(tmp_path):
    """One process's checkpoint, and that of two data ranks, on the parts of a layer: both ranks drop what the first dropped."""
    job = {"optimizer": "adamw", "adapter": "a", "options": {"dropout": 0.5, "targets": ["q_proj", "gate_proj"]}}
    alone = Jobs().checkpoints(0, 1, str(tmp_path), {"one": {**job, "sizes": {}}})["one"]
    given = {"folder": str(tmp_path), "jobs": {"dp": {**job, "sizes": {"dp_size": 2}}}}
    apart = ranks.run(Jobs, "checkpoints", 2, given, timeout=240)
    paths = {"one": alone["path"], "dp": apart[0]["dp"]["path"]}
    given = {"paths": paths, "jobs": {name: {**job, "sizes": {"tp_size": 2}} for name in paths}, "folder": str(tmp_path / "tp")}
    parts = ranks.run(Jobs, "resume", 2, given, timeout=240)
    for part in parts:
        assert_goes_on(part["one"], alone["unbroken"], alone["first"])
    drawn = [load_file(f"{parts[0][name]['path']}/rng.safetensors") for name in paths]
    assert all(torch.equal(tensors["torch"], tensors["rank1/torch"]) for tensors in drawn)


@pytest.mark.slow
def test_dropout_of_data_ranks_goes_on_where_each_becomes_two(tmp_path):
    job = {"optimizer": "adamw", "adapter": "a", "options": {"dropout": 0.5, "targets": ["q_proj", "gate_proj"]}}
    given = {"folder": str(tmp_path), "jobs": {"m": {**job, "sizes": {"dp_size": 2}}}}
    apart = ranks.run(Jobs, "checkpoints", 2, given, timeout=240)[0]["m"]
    given = {
        "paths": {"m": apart["path"]},
        "jobs": {"m": {**job, "sizes": {"dp_size": 2, "tp_size": 2}}},
        "folder": str(tmp_path),
    }
    for part in ranks.run(Jobs, "resume", 4, given, timeout=240):
        assert_goes_on(part["m"], apart["unbroken"], apart["first"])


def damage(folder, how):
    if how == "missing":
        next(folder.glob("model-shards/*")).unlink()
    elif how == "short":
        file = next(folder.glob("optimizer-shards/*"))
        file.write_bytes(file.read_bytes()[:-4])
    elif how == "changed":
        file = sorted(folder.glob("model-shards/*"))[1]
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        shutil.rmtree(folder / "optimizer-shards")


@pytest.mark.parametrize(
    ("how", "file", "why"),
    [
        ("missing", r"model-shards/shard-0000\d-model", "it is missing"),
        ("short", r"optimizer-shards/shard-0000\d-model", "bytes and was written with"),
        ("changed", r"model-shards/shard-00002-model", "sha256 differs"),
        ("gone", r"optimizer-shards/shard-00001-model", "it is missing"),
    ],
)
def test_shards_that_are_damaged_are_told_by_name(two, tmp_path, how, file, why):
    folder = tmp_path / "c"
    shutil.copytree(two[0]["m"]["path"], folder)
    damage(folder, how)
    built = ready({"sizes": {}, "optimizer": "adamw"})
    before = {k: v.clone() for k, v in state(built).items()}
    with pytest.raises(CheckpointDamaged, match=f"{file}.*{why}"):
        built.resume_from_checkpoint(folder)
    assert same(before, state(built)) and built.sessions[""].cur_step == 0


@pytest.mark.slow
def test_ranks_are_told_alike_of_damage(two, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(two[0]["m"]["path"], folder)
    damage(folder, "changed")
    spec = {"sizes": {"fsdp_size": 2}, "optimizer": "adamw"}
    first, second = ranks.run(Saving, "damaged", 2, {"path": str(folder), "spec": spec}, timeout=240)
    assert first == second and first["kept"] and first["step"] == 0 and "shard-00002" in first["said"]


def test_parts_that_no_file_holds_are_told(two, tmp_path):
    """Without the list of files: what the files' headers say must be whole."""
    folder = tmp_path / "model-shards"
    shutil.copytree(Path(two[0]["m"]["path"]) / "model-shards", folder)
    next(folder.glob("shard-00001*")).unlink()
    with pytest.raises(CheckpointDamaged, match=r"parts of .* are missing"):
        shards.describe(folder)


def test_another_model_is_refused_before_anything_changes(two):
    built = ready({"sizes": {}, "optimizer": "adamw", "kind": "untied"})
    before = {k: v.clone() for k, v in state(built).items()}
    path = Path(two[0]["m"]["path"])
    with pytest.raises(ValueError, match=r"lm_head\.weight|embed_tokens"):
        built.load(path.name, path.parent)
    assert same(before, state(built))


def test_a_disk_that_refuses_on_one_rank_is_told_on_all(tmp_path):
    parts = ranks.run(Saving, "disk_refuses", 2, {"folder": str(tmp_path)}, timeout=240)
    for part in parts:
        full, in_the_way = part["said"]
        assert "rank 1" in full and "No space left" in full and "older checkpoint" in full
        assert "in the way" in in_the_way or "is not a checkpoint" in in_the_way
        assert part["kept"] and part["left"] == ["c", "d"], "nothing half-written is left"
        assert Path(part["again"]).is_dir()


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes_leaves_the_last_checkpoint(tmp_path):
    with pytest.raises(RankFailed, match="exit status -9"):
        ranks.run(Saving, "killed", 2, {"folder": str(tmp_path)}, timeout=120)
    assert checkpoint.inspect(tmp_path / "c", hashes=True).cur_step == 1
    again = Jobs().resume(0, 1, {"m": str(tmp_path / "c")}, {"m": {"optimizer": "adamw", "sizes": {}}}, str(tmp_path / "n"))
    assert again["m"]["seen"]
    checkpoint.inspect(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [], "what was half-written is swept away"


def test_an_adapter_is_always_plain_files(tmp_path):
    built = ready({"sizes": {}, "optimizer": "adamw", "adapter": "a"})
    with pytest.raises(BadArgument, match="sharded=True: it must be False: the weights of adapter 'a' are written as plain"):
        built.save("c", tmp_path, sharded=True)
    assert not (tmp_path / "c").exists()


def test_large_tensors_are_spread_over_files(monkeypatch, tmp_path):
    monkeypatch.setattr(shards, "LARGEST", 20_000)
    built = ready({"sizes": {}, "optimizer": "sgd"})
    train(built, "", batches()[:1])
    path = Path(built.save("c", tmp_path, sharded=True))
    assert len(list(path.glob("model-shards/*"))) > 2
    other = ready({"sizes": {}, "optimizer": "sgd"})
    other.load("c", tmp_path)
    assert same(state(built), state(other))


def test_an_open_window_of_several_ranks_goes_on(tmp_path):
    """Bit for bit where gradients are summed with each backward, to rounding where at the window's end; and in one process."""
    jobs = {
        "dp": {"sizes": {"dp_size": 2}, "optimizer": "adamw"},
        "dp_lora": {"sizes": {"dp_size": 2}, "optimizer": "adamw", "adapter": "a"},
        "fsdp": {"sizes": {"fsdp_size": 2}, "optimizer": "adamw"},
        "tp": {"sizes": {"tp_size": 2}, "optimizer": "adamw", "kind": "normed"},
        "tp_lora": {"sizes": {"tp_size": 2}, "optimizer": "adamw", "kind": "normed", "adapter": "a"},
        "tokens": {"sizes": {"tp_size": 2, "sequence_parallel": True}, "optimizer": "adamw", "kind": "normed"},
        "tokens_lora": {"sizes": {"tp_size": 2, "sequence_parallel": True}, "optimizer": "adamw", "adapter": "a"},
        "ulysses": {"sizes": {"dp_size": 2, "ulysses_size": 2}, "optimizer": "adamw"},
    }
    parts = ranks.run(Saving, "open_window", 2, {"folder": str(tmp_path), "jobs": jobs}, timeout=240)
    for part in parts:
        for name, found in part.items():
            unbroken, resumed = found["unbroken"], found["resumed"]
            assert resumed["norm"] == pytest.approx(unbroken["norm"], rel=2e-5), name
            if name == "fsdp":
                assert unbroken["norm"] == resumed["norm"] and same(unbroken["weights"], resumed["weights"])
            for key, value in unbroken["weights"].items():
                torch.testing.assert_close(resumed["weights"][key], value, rtol=1e-4, atol=1e-5)
    alone = Saving().go_on(
        0, 1, {name: parts[0][name]["path"] for name in jobs}, {name: {**job, "sizes": {}} for name, job in jobs.items()}
    )
    for name, found in alone.items():
        assert found["norm"] == pytest.approx(parts[0][name]["unbroken"]["norm"], rel=2e-5), name
        for key, value in parts[0][name]["unbroken"]["weights"].items():
            torch.testing.assert_close(found["weights"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_B47_tied_embeddings_that_lie_apart_stay_tied(tmp_path):
    """Stored once, one object after loading, equal after the next step; where they are not tied, both are stored."""
    first, second = ranks.run(Saving, "tied", 2, {"folder": str(tmp_path)}, timeout=240)
    for found in (first, second):
        assert "would part the tied embedding and output layer" in found["copied"]
        for form in (False, True):
            tied, parted = found[str(tmp_path / f"llama{form}")], found[str(tmp_path / f"untied{form}")]
            for each in (tied, parted):
                assert each["reloaded"] and each["stepped"]
            assert tied["one object"] and tied["equal"] and not parted["one object"] and not parted["equal"]
    ends = {"lm_head.weight", "model.embed_tokens.weight"}
    for kind, count in (("llama", 1), ("untied", 2)):
        assert len(ends & load_file(tmp_path / f"{kind}False/model.safetensors").keys()) == count
        assert len(ends & shards.describe(tmp_path / f"{kind}True/model-shards").keys()) == count
