"""Adapters that PEFT has made, in all their forms, compute here what they compute there, and so does what is saved of them."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers
from peft import LoraConfig

from twinkle_core.errors import BadAdapter
from twinkle_core.testing.ranks import run
from twinkle_megatron.testing import built, steps, windows, write_tiny

QV = ["q_proj", "v_proj"]
ALL = [*QV, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FORMS = {
    "an A for each": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ALL}),
    "queries and values": ("qwen2", {"r": 8, "lora_alpha": 16, "target_modules": QV}),
    "rank stabilised": ("mistral", {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ALL}),
    "gate and up in one": ("glm4", {"r": 4, "lora_alpha": 8, "target_modules": [*QV, "gate_up_proj", "down_proj"]}),
    "patterns": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": [*QV, "down_proj"],
            "rank_pattern": {"v_proj": 2, "layers.1.mlp.down_proj": 6},
            "alpha_pattern": {"q_proj": 4, "layers.1.mlp.down_proj": 3},
        },
    ),
}


def foreign(folder, home, settings, **more):
    """An adapter with random A and B, and the model with it."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings, **more)).eval()
    for key, parameter in model.named_parameters():
        if ".lora_B." in key:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(str(home))
    return model


def logits_of(model, rows):
    with torch.no_grad():
        return [model(torch.tensor([row["input_ids"]])).logits[0] for row in rows]


def assert_near(found, expected):
    for row, logits in zip(found, expected, strict=True):
        torch.testing.assert_close(row[: len(logits)], logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_of_pefts_computes_the_same_and_is_trained_on(tmp_path, form):
    family, settings = FORMS[form]
    folder, rows = write_tiny(tmp_path / "model", family), windows(1)[0]
    theirs = foreign(folder, tmp_path / "foreign", settings)
    model = built(str(folder), {})
    plain = model.forward_only(rows).logits
    model.add_adapter_to_model("a", tmp_path / "foreign")
    expected = logits_of(theirs, rows)
    assert max(float((row[: len(e)] - e).abs().max()) for row, e in zip(plain, expected, strict=True)) > 0.05
    assert_near(model.forward_only(rows).logits, expected)
    model.set_optimizer("default", lr=1e-2)
    numbers = steps(model, windows(6), "a")
    assert numbers["losses"][5] < numbers["losses"][0] - 0.05
    saved = model.save("a", tmp_path / "out")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_near(model.forward_only(rows).logits, logits_of(peft.PeftModel.from_pretrained(fresh, saved).eval(), rows))
    model.add_adapter_to_model("b", saved)
    assert torch.equal(model.forward_only(rows, adapter_name="b").logits, model.forward_only(rows, adapter_name="a").logits)
    assert model.adapters.describe("a") == model.adapters.describe("b")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True, "target_modules": ALL}, "dora|lora_magnitude"),
        ({"modules_to_save": ["lm_head"], "target_modules": QV}, "lm_head"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
        ({"layers_to_transform": [1], "target_modules": ALL}, "layers_to_transform"),
    ],
)
def test_what_of_an_adapter_has_no_form_here_is_refused(llama, tmp_path, settings, words):
    foreign(llama, tmp_path / "foreign", settings, r=4)
    model = built(llama, {})
    with pytest.raises(BadAdapter, match=words):
        model.add_adapter_to_model("a", tmp_path / "foreign")
    assert model.adapters.names() == []


class Foreign:
    """Run in processes of its own."""

    def logits(self, rank, world_size, folder, adapter, layouts):
        found = []
        for sizes in layouts:
            model = built(folder, sizes)
            model.add_adapter_to_model("a", adapter)
            found.append(model.forward_only(windows(1)[0]).logits)
            del model
        return found


@pytest.mark.slow
def test_an_adapter_of_pefts_computes_the_same_over_ranks(llama, tmp_path):
    theirs = foreign(llama, tmp_path / "foreign", FORMS["patterns"][1])
    layouts = [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}, {"pp_size": 2}]
    given = {"folder": llama, "adapter": str(tmp_path / "foreign"), "layouts": layouts}
    for rank in run(Foreign, "logits", 2, given, timeout=200):
        for found in rank:
            assert_near(found, logits_of(theirs, windows(1)[0]))
