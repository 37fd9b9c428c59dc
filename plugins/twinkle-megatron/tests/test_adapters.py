"""Several adapters on one model: each keeps its own settings, targets and files."""

from __future__ import annotations

import torch
import transformers
from peft import LoraConfig, PeftModel

from twinkle_megatron.testing import built, steps, windows


def tuned(folder, home, name):
    """Logits of the first window in plain transformers and PEFT."""
    fresh = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(fresh, home / name).eval()
    with torch.no_grad():
        return [model(torch.tensor([row["input_ids"]])).logits[0] for row in windows(1)[0]]


def test_adapters_of_other_targets_and_scales_are_written_whole(llama, tmp_path):
    """mcore-bridge takes each layer with an adapter for one that has all; and of a first adapter it misses ``use_rslora``."""
    model = built(llama, {})
    configs = {
        "first": LoraConfig(r=4, lora_alpha=8, use_rslora=True),
        "second": LoraConfig(r=2, lora_alpha=4, use_rslora=True, target_modules=["o_proj"]),
        "third": LoraConfig(r=3, lora_alpha=4, target_modules=["gate_proj", "up_proj"]),
    }
    for name, config in configs.items():
        model.add_adapter_to_model(name, config)
        model.set_optimizer("default", lr=1e-2, adapter_name=name)
        steps(model, windows(3), name)
    model.remove_adapter("third")
    model.add_adapter_to_model("third", configs["third"])
    for name, config in configs.items():
        model.save(name, tmp_path, adapter_name=name)
        parts = len(config.target_modules or ()) or 7
        assert len(model.get_state_dict(adapter_name=name)) == 4 * 2 * parts
        found = model.forward_only(windows(1)[0], adapter_name=name).logits
        for own, expected in zip(found, tuned(llama, tmp_path, name), strict=True):
            torch.testing.assert_close(own[: len(expected)], expected, rtol=0, atol=1e-5)


def test_dropout_of_a_first_adapter_is_there(llama):
    model, rows = built(llama, {}), windows(1)[0]
    model.add_adapter_to_model("a", LoraConfig(r=4, lora_dropout=0.5))
    for key, parameter in model.adapters.parameters("a").items():
        if "lora_B" in key:
            parameter.data.fill_(0.05)
    one, two = (model.forward(rows).logits.detach() for _ in range(2))
    assert not torch.equal(one, two)
    assert torch.equal(*(model.forward_only(rows).logits for _ in range(2)))


def test_a_checkpoint_from_before_the_first_update_goes_on(llama, tmp_path):
    """There are no moments yet; loading them moves no weight."""
    model, plain = built(llama, {}), built(llama, {})
    for one in (model, plain):
        torch.manual_seed(0)
        one.add_adapter_to_model("a", LoraConfig(r=4))
        one.set_optimizer("default", lr=1e-2, weight_decay=0.1)
    model.save("start", tmp_path, save_optimizer=True)
    start = {key: tensor.clone() for key, tensor in model.get_state_dict().items()}
    steps(model, windows(2), "a")
    model.resume_from_checkpoint(tmp_path / "start")
    assert all(torch.equal(tensor, start[key]) for key, tensor in model.get_state_dict().items())
    assert steps(model, windows(4), "a") == steps(plain, windows(4), "a")
