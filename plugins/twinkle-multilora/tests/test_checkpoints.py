"""A tenant's checkpoints are those of a plain adapter: PEFT reads them, and training goes on from them bit for bit."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from twinkle_core.errors import CheckpointMismatch, CheckpointNotFound, CheckpointNotWritten, RankTooLarge
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import tiny_config

ROWS = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, 9]}, {"input_ids": [9, 4], "labels": [-100, 3]}]
CONFIG = LoraConfig(
    r=4,
    lora_alpha=8,
    use_rslora=True,
    target_modules="all-linear",
    rank_pattern={"q_proj": 2, "down_proj": 6},
    alpha_pattern={"v_proj": 3},
    lora_dropout=0.1,
)


def build(cls=MultiLoraTransformersModel, **options):
    torch.manual_seed(0)
    sizes = {"max_loras": 3, "max_r": 8} if cls is MultiLoraTransformersModel else {}
    return cls(config=tiny_config(), mixed_precision="no", **{**sizes, **options})


def join(model, name, config=CONFIG, optimizer="adamw", seed=1):
    torch.manual_seed(seed)
    model.add_adapter_to_model(name, config)
    model.set_optimizer(optimizer, lr=1e-2, adapter_name=name)
    model.set_lr_scheduler("cosine_warmup", num_warmup_steps=1, num_training_steps=9, adapter_name=name)


def step(model, name, rows=ROWS, size=1):
    loss = float(model.forward_backward(rows, adapter_name=name, gradient_accumulation_steps=size))
    return loss, model.clip_grad_and_step(adapter_name=name)


def weights(model, name):
    return {k: v.clone() for k, v in model.get_state_dict(adapter_name=name).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def test_peft_loads_what_a_tenant_saved(tmp_path):
    """Equal logits, the tenant's own config, and no word of slots or tenants."""
    model = build()
    join(model, "somebody", LoraConfig(r=2, target_modules=["q_proj"]))
    join(model, "tenant_a")
    for _ in range(3):
        step(model, "tenant_a")
    folder = model.save("one", tmp_path, adapter_name="tenant_a")
    keys = list(load_file(f"{folder}/adapter_model.safetensors"))
    assert len(keys) == 2 * 2 * 7
    assert not [k for k in keys if "tenant" in k or "lora_1" in k or "base_layer" in k]
    config = LoraConfig.from_pretrained(folder)
    assert (config.r, config.lora_alpha, config.use_rslora, config.lora_dropout) == (4, 8, True, 0.1)
    assert config.rank_pattern == CONFIG.rank_pattern and config.alpha_pattern == CONFIG.alpha_pattern
    assert len(config.target_modules) == 14  # the resolved list
    text = json.dumps(json.loads((tmp_path / "one" / "adapter_config.json").read_text()))
    assert "tenant" not in text and "lora_1" not in text

    plain = LlamaForCausalLM(tiny_config())
    plain.load_state_dict(model.get_state_dict(adapter_name=""))
    plain = PeftModel.from_pretrained(plain, folder).eval()
    found = model.forward_only(ROWS[:1], adapter_name="tenant_a").logits
    torch.testing.assert_close(plain(input_ids=torch.tensor([ROWS[0]["input_ids"]])).logits, found, rtol=1e-5, atol=1e-5)


def test_a_slot_takes_what_peft_saved(tmp_path):
    model = build()
    plain = LlamaForCausalLM(tiny_config())
    plain.load_state_dict(model.get_state_dict(adapter_name=""))
    config = LoraConfig(r=3, target_modules=["k_proj", "up_proj"], init_lora_weights=False, use_rslora=True)
    plain = get_peft_model(plain, config).eval()
    plain.save_pretrained(tmp_path / "plain")
    model.multi_lora.acquire_lora("a", tmp_path / "plain")
    expected = plain(input_ids=torch.tensor([ROWS[0]["input_ids"]])).logits
    torch.testing.assert_close(model.forward_only(ROWS[:1], adapter_name="a").logits, expected, rtol=1e-5, atol=1e-5)
    assert model.adapters.parameters("a")  # to be trained, though peft wrote that it was for inference
    model.multi_lora.acquire_lora("b", config)
    assert model.load("plain", tmp_path, adapter_name="b")["cur_step"] == 0
    assert same(weights(model, "a"), weights(model, "b"))


@pytest.mark.parametrize("fault", ["rank", "nothing there", "another shape"])
def test_a_folder_that_can_not_be_taken_takes_no_slot(fault, tmp_path):
    big = build(max_r=64)
    join(big, "a", LoraConfig(r=16, target_modules=["q_proj"]))
    folder = big.save("one", tmp_path, adapter_name="a")
    if fault == "another shape":
        config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
        (tmp_path / "one" / "adapter_config.json").write_text(json.dumps({**config, "r": 4}))
        (tmp_path / "one" / "trainer_state.json").unlink()
    model = build()
    error = {"rank": RankTooLarge, "nothing there": CheckpointNotFound, "another shape": CheckpointMismatch}[fault]
    with pytest.raises(error):
        model.multi_lora.acquire_lora("b", folder if fault != "nothing there" else tmp_path)
    assert model.multi_lora.free == 3 and list(model.sessions) == [""]


def test_a_checkpoint_with_another_scale_is_refused(tmp_path):
    model = build()
    join(model, "a", LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    join(model, "b", LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"]))
    model.save("one", tmp_path, adapter_name="a")
    before = weights(model, "b")
    with pytest.raises(CheckpointMismatch, match="lora_alpha"):
        model.load("one", tmp_path, adapter_name="b")
    assert same(before, weights(model, "b"))


@pytest.mark.parametrize("within", [False, True], ids=["between windows", "within a window"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_tenant_resumes_in_another_slot_and_company(within, checkpointing, tmp_path):
    """With dropout, a schedule and Adam: losses, norms and weights go on to the bit, whoever else trains meanwhile."""
    unbroken = build(gradient_checkpointing=checkpointing)
    join(unbroken, "a")
    for _ in range(5 if within else 4):
        step(unbroken, "a", size=2)
    folder = unbroken.save("half", tmp_path, adapter_name="a", save_optimizer=True, consumed_train_samples=7)
    expected = [step(unbroken, "a", size=2) for _ in range(5)]

    other = build()
    join(other, "first", LoraConfig(r=8, target_modules=["q_proj"], lora_dropout=0.5), seed=5)
    join(other, "z", seed=6)
    step(other, "z")
    step(other, "first")
    progress = other.resume_from_checkpoint(folder, adapter_name="z")
    assert progress == {"cur_step": 2, "consumed_train_samples": 7, "gradient_accumulation_steps": 2}
    found = []
    for _ in range(5):
        found.append(step(other, "z", size=2))
        step(other, "first")
    assert found == expected
    assert same(weights(unbroken, "a"), weights(other, "z"))


def alike(found, expected):
    """To rounding: TransformersModel computes padded rows, and a model with slots computes them without padding."""
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        found, expected = found.values(), expected.values()
    pairs = zip(map(torch.as_tensor, found), map(torch.as_tensor, expected), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def test_a_tenant_moves_to_a_model_of_its_own_and_back(tmp_path):
    """A checkpoint says nothing of slots: TransformersModel goes on from it, and a slot from what that saved."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")  # without dropout, which is drawn otherwise
    shared, own = build(), build(TransformersModel)
    join(shared, "first", LoraConfig(r=8, target_modules=["q_proj"]))
    join(shared, "a", config)
    join(own, "alone", config, seed=9)
    for _ in range(3):
        step(shared, "a")
    folder = shared.save("three", tmp_path, adapter_name="a", save_optimizer=True)
    expected = [step(shared, "a") for _ in range(3)]
    own.resume_from_checkpoint(folder, adapter_name="alone")
    assert alike([step(own, "alone") for _ in range(3)], expected)
    assert alike(weights(own, "alone"), weights(shared, "a"))

    folder = own.save("six", tmp_path, adapter_name="alone", save_optimizer=True)
    expected = [step(own, "alone") for _ in range(2)]
    join(shared, "back", config, seed=8)
    shared.resume_from_checkpoint(folder, adapter_name="back")
    assert alike([step(shared, "back") for _ in range(2)], expected)
    assert alike(weights(own, "alone"), weights(shared, "back"))


def test_resuming_leaves_the_others(tmp_path):
    """Random state is the process's, and it is restored; no tenant's dropout comes from it."""
    expected, found = [], []
    for resumes, losses in ((False, expected), (True, found)):
        model = build()
        join(model, "a")
        join(model, "b", seed=2)
        for _ in range(2):
            step(model, "b")
        folder = model.save("b", tmp_path, adapter_name="b", save_optimizer=True)
        losses.append(step(model, "a"))
        model.forward_backward(ROWS, adapter_name="a", gradient_accumulation_steps=2)
        if resumes:
            step(model, "b")
            model.resume_from_checkpoint(folder, adapter_name="b")
        losses += [step(model, "a", size=2) for _ in range(3)]
        losses.append(weights(model, "a"))
    assert found[:-1] == expected[:-1] and same(found[-1], expected[-1])


@pytest.mark.parametrize("failing", ["safetensors", "state"])
def test_a_full_disk_leaves_all_tenants(failing, tmp_path, monkeypatch):
    """Nothing half-written, the older checkpoint whole, and training as if nobody had saved."""
    model, plain = build(), build()
    for one in (model, plain):
        join(one, "a")
        join(one, "b", seed=2)
        step(one, "a")
    model.save("one", tmp_path, adapter_name="a", save_optimizer=True)
    older = {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()}
    step(model, "a")
    step(plain, "a")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        where = "twinkle_transformers.checkpoint.save_file" if failing == "safetensors" else "pathlib.Path.write_text"
        patched.setattr(where, full)
        with pytest.raises(CheckpointNotWritten, match="No space left"):
            model.save("one", tmp_path, adapter_name="a", save_optimizer=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()} == older
    assert [p.name for p in tmp_path.iterdir()] == ["one"]
    for name in "ab":
        assert step(model, name) == step(plain, name)
        assert same(weights(model, name), weights(plain, name))
