"""Weights in and out: bit for bit for whole models, and the same logits for adapters in plain transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from twinkle_core.errors import BadAdapter
from twinkle_core.testing.ranks import run
from twinkle_megatron.testing import built, steps, windows, write_tiny


class Files:
    """Run in processes of its own."""

    def export(self, rank, world_size, folder, home, layouts):
        """Save the model as it came, and an adapter that was trained; logits of both, on each rank."""
        found = []
        for i, sizes in enumerate(layouts):
            torch.manual_seed(0)
            model = built(folder, sizes)
            model.save(f"whole{i}", home)
            rows = windows(1)[0]
            whole = model.forward_only(rows).logits
            model.add_adapter_to_model("a", LoraConfig(r=4, lora_alpha=8))
            model.set_optimizer("default", lr=1e-2)
            numbers = steps(model, windows(4), "a")
            model.save(f"adapter{i}", home)
            found.append({"whole": whole, "adapter": model.forward_only(rows).logits, **numbers})
            del model
        return found


def logits_of(model, rows):
    with torch.no_grad():
        return [model(torch.tensor([row["input_ids"]])).logits[0] for row in rows]


def assert_equal_logits(found, expected):
    for row, logits in zip(found, expected, strict=True):
        torch.testing.assert_close(row[: len(logits)], logits, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("llama", [{"tp_size": 2}, {"pp_size": 2}]),
        ("glm4", [{"tp_size": 2}]),
        ("qwen3_moe", [{"dp_size": 2, "ep_size": 2}, {"tp_size": 2, "sequence_parallel": True, "ep_size": 2}]),
    ],
)
def test_what_is_written_is_read_by_others(tmp_path, family, layouts):
    """The vocabulary, 251, is no multiple of two tensor ranks."""
    folder = write_tiny(tmp_path / "model", family, vocab_size=251)
    given = {"folder": str(folder), "home": str(tmp_path / "out"), "layouts": layouts}
    ranks = run(Files, "export", 2, given, timeout=400)
    plain, rows = load_file(folder / "model.safetensors"), windows(1)[0]
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    base = logits_of(hf, rows)
    for i in range(len(layouts)):
        written = load_file(tmp_path / "out" / f"whole{i}" / "model.safetensors")
        assert written.keys() == plain.keys()
        assert all(torch.equal(written[key], tensor) for key, tensor in plain.items())
        fresh = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tuned = logits_of(PeftModel.from_pretrained(fresh, tmp_path / "out" / f"adapter{i}").eval(), rows)
        assert max(float((a - b).abs().max()) for a, b in zip(tuned, base, strict=True)) > 1e-2, "it learned nothing"
        for rank in ranks:
            assert_equal_logits(rank[i]["whole"], base)
            assert_equal_logits(rank[i]["adapter"], tuned)
            assert rank[i]["losses"] == pytest.approx(ranks[0][0]["losses"], rel=1e-4), "an adapter starts alike everywhere"


def test_a_family_that_the_bridge_writes_wrongly_is_mended(tmp_path):
    """GLM-4 keeps gate and up in one tensor; mcore-bridge writes them apart, which transformers does not read."""
    folder = write_tiny(tmp_path / "glm", "glm4")
    model = built(str(folder), {})
    saved = Path(model.save("whole", tmp_path / "out"))
    plain, written = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
    assert written.keys() == plain.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in plain.items())
    model.add_adapter_to_model("a", LoraConfig(r=4, target_modules=["gate_up_proj", "o_proj"]))
    model.set_optimizer("default", lr=1e-2)
    rows = windows(1)[0]
    base = model.forward_only(rows).logits
    steps(model, windows(4), "a")
    tuned = model.forward_only(rows).logits
    assert float((tuned - base).abs().max()) > 1e-2
    saved = model.save("a", tmp_path)
    assert {key.split(".")[-3] for key in load_file(Path(saved) / "adapter_model.safetensors")} == {"gate_up_proj", "o_proj"}
    fresh = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_equal_logits(tuned, logits_of(PeftModel.from_pretrained(fresh, saved).eval(), rows))
    model.add_adapter_to_model("b", saved)
    assert torch.equal(model.forward_only(rows, adapter_name="b").logits, tuned)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_adapters_that_peft_would_read_wrongly_are_refused(tmp_path, family):
    model = built(str(write_tiny(tmp_path / "model", family)), {})
    with pytest.raises(BadAdapter, match=rf"family '{family}'(.|\n)*TransformersModel"):
        model.add_adapter_to_model("a", LoraConfig(r=4))
    assert model.adapters.names() == []


def test_adapters_come_and_go(llama, tmp_path):
    """One that is loaded from its folder computes the same; without any, the model is what it was."""
    model, rows = built(llama, {}), windows(1)[0]
    start = model.forward_only(rows).logits
    model.add_adapter_to_model("a", LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    assert torch.equal(model.forward_only(rows).logits, start), "a new adapter changes nothing"
    model.set_optimizer("default", lr=1e-2)
    steps(model, windows(3), "a")
    tuned = model.forward_only(rows).logits
    assert torch.equal(model.forward_only(rows, disable_lora=True).logits, start)
    saved = model.save("a", tmp_path)
    config = json.loads((Path(saved) / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    model.add_adapter_to_model("b", saved)
    assert torch.equal(model.forward_only(rows, adapter_name="b").logits, tuned)
    model.remove_adapter("a")
    assert torch.equal(model.forward_only(rows, adapter_name="b").logits, tuned)
    model.remove_adapter("b")
    assert torch.equal(model.forward_only(rows).logits, start)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LoraConfig(r=4, target_modules=["q_proj"]), "k_proj, v_proj are one layer"),
        (LoraConfig(r=4, target_modules=["lm_head"]), "target 'lm_head' is not known"),
        (LoraConfig(r=4, use_dora=True), "use_dora=True is not honoured"),
        (LoraConfig(r=4, modules_to_save=["lm_head"]), "modules_to_save="),
        (LoraConfig(r=4, rank_pattern={"q_proj": 8}), "rank_pattern="),
        ({"r": 4}, "no LoraConfig"),
    ],
)
def test_a_config_that_is_not_honoured_whole_is_refused(llama, config, words):
    model = built(llama, {})
    with pytest.raises(BadAdapter, match=words):
        model.add_adapter_to_model("a", config)
    assert model.adapters.names() == []
