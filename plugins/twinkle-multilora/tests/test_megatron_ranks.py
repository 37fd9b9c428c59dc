"""Under every layout tenants of one Megatron model don't feel one another: each is, to the bit, what it is alone."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import PeftModel

from twinkle_core.data.sampler import share
from twinkle_core.errors import BadInputs, FailedElsewhere, RanksApart, UnknownAdapter
from twinkle_core.testing.ranks import run
from twinkle_megatron.testing import write_tiny
from twinkle_multilora.megatron_testing import TENANTS, InTurns, built, join, rows_of, same, state

OF_TWO = [{"dp_size": 2}, {"tp_size": 2, "sequence_parallel": True}, {"pp_size": 2}]
EXPERTS = [{"dp_size": 2, "ep_size": 2}]
OF_FOUR = [{"dp_size": 2, "tp_size": 2, "sequence_parallel": True}]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("llama"), num_hidden_layers=2))


class AtOnce:
    """Run in processes of its own."""

    def one_is_wrong(self, rank, world_size, folder, layouts):
        """What each rank is told of a call for three in which the second rank has something wrong, and what it leaves."""
        found, names = [], ("ada", "bob", "eve")
        for sizes in layouts:
            model, plain = built(folder, sizes), built(folder, sizes)
            for one in (model, plain):
                for name in names:
                    join(one, name)
            mesh, words = model.engine.mesh, []
            good = {name: share(rows_of(name, 0), mesh.data_rank, mesh.data_world_size) for name in names}
            wrong = [{**good, name: [{"input_ids": [1, 9999], "labels": [1, 2]}]} for name in names]
            wrong += [{**good, "zoe": good["ada"]}, {name: good[name] for name in ("ada", "eve")}]
            for given in wrong:
                try:
                    model.forward_backward_many(given if rank else good)
                except (BadInputs, FailedElsewhere, RanksApart, UnknownAdapter) as error:
                    words.append(f"{type(error).__name__}: {error}")
            for one in (model, plain):
                one.forward_backward_many(good)
            found.append([*words, *(same(state(model, name), state(plain, name)) for name in names)])
            del model, plain, one
        return found


def assert_apart(ranks, layouts):
    for rank, found in enumerate(ranks):
        for sizes, of in zip(layouts, found, strict=True):
            where = f"{sizes} on rank {rank}"
            assert of["in turns"] == of["alone"], where
            assert of["differ"] == [], f"weights, gradients, optimizer or schedule under {where}"
            assert of["base untouched"], where
            for name, turns in of["in turns"].items():
                assert of["moved"][name] > 1e-4, f"{name} does not move under {where}"
                assert sum(norm > 0 for _, norm in turns) == len(turns) // TENANTS[name].backwards, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "world_size", "layouts"),
    [("llama", 2, OF_TWO), ("qwen3_moe", 2, EXPERTS), ("llama", 4, OF_FOUR)],
    ids=["two", "experts", "four"],
)
def test_five_tenants_in_turns_are_each_alone(tmp_path, family, world_size, layouts):
    """One of them comes when the others have trained already."""
    folder = write_tiny(tmp_path / "model", family, num_hidden_layers=2)
    ranks = run(InTurns, "apart", world_size, {"folder": str(folder), "layouts": layouts}, timeout=500)
    assert_apart(ranks, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"tp_size": 2, "sequence_parallel": True}], ids=["data", "tensor"])
def test_a_failure_is_nobody_elses_on_any_rank(llama, sizes):
    assert run(InTurns, "failures", 2, {"folder": llama, "sizes": sizes}, timeout=300) == [[], []]


@pytest.mark.slow
def test_a_call_for_many_that_is_wrong_on_one_rank_is_wrong_on_all(llama):
    """Where ranks met for each tenant without saying for which, one that had left out a tenant met in the next one's place."""
    layouts = [{"dp_size": 2}, {"tp_size": 2}]
    first, second = run(AtOnce, "one_is_wrong", 2, {"folder": llama, "layouts": layouts}, timeout=300)
    for one, two in zip(first, second, strict=True):
        for name, here, there in zip(("ada", "bob", "eve"), one, two, strict=False):
            assert here.startswith(f"FailedElsewhere: forward_backward_many of adapter '{name}' failed on rank 1")
            assert there.startswith("BadInputs")
        assert one[3].startswith("RanksApart") and two[3].startswith("UnknownAdapter")
        assert one[4].startswith("RanksApart") and "rank 1 in forward_backward_many of adapter 'ada, eve'" in one[4]
        assert one[4] == two[4]
        assert one[5:] == two[5:] == [True] * 3


@pytest.mark.slow
def test_a_disk_that_is_full_on_one_rank_is_told_on_all(llama, tmp_path):
    given = {"folder": llama, "home": str(tmp_path), "sizes": {"tp_size": 2, "sequence_parallel": True}}
    assert run(InTurns, "full_disk", 2, given, timeout=300) == [["No space left"]] * 2


@pytest.mark.slow
def test_each_goes_on_from_its_checkpoint_under_another_layout_too(llama, tmp_path):
    """All at once, in slots that others had: bit for bit under the same layout, to rounding under another one."""
    given = {"folder": llama, "home": str(tmp_path / "same"), "names": ["ada", "cyd", "eve"]}
    layouts = [{"tp_size": 2, "sequence_parallel": True}] * 2
    for unbroken, again in run(InTurns, "resume", 2, {**given, "layouts": layouts}, timeout=400):
        assert again == unbroken
    names = [name for name, tenant in TENANTS.items() if "lora_dropout" not in tenant.adapter]  # of other ranks, other masks
    given = {"folder": llama, "home": str(tmp_path / "other"), "names": names}
    (unbroken,), _ = run(InTurns, "resume", 2, {**given, "layouts": [{"tp_size": 2}]}, timeout=300)
    ((one,),) = run(InTurns, "resume", 1, {**given, "layouts": [{}]}, timeout=200)
    for name in names:
        assert [n for turn in one[name] for n in turn] == pytest.approx([n for t in unbroken[name] for n in t], rel=1e-5), name


@pytest.mark.slow
def test_what_each_saves_gives_the_same_logits_in_peft(llama, tmp_path):
    """Of its own rank, alpha and targets, from two tensor ranks that split the sequence."""
    sizes = {"tp_size": 2, "sequence_parallel": True}
    ranks = run(InTurns, "saved", 2, {"folder": llama, "home": str(tmp_path), "sizes": sizes}, timeout=300)
    for name, tenant in TENANTS.items():
        fresh = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
        plain = PeftModel.from_pretrained(fresh, tmp_path / name).eval()
        assert plain.peft_config["default"].r == tenant.config.r
        assert plain.peft_config["default"].lora_alpha == tenant.config.lora_alpha
        for i, row in enumerate(rows_of(name, 0)):
            with torch.no_grad():
                ids = torch.tensor([row["input_ids"]])
                expected = plain(ids).logits[0]
                with plain.disable_adapter():
                    assert float((plain(ids).logits[0] - expected).abs().max()) > 1e-3, "it learned nothing"
            for rank in ranks:
                torch.testing.assert_close(rank[name][i, : len(expected)], expected, rtol=0, atol=1e-5)
