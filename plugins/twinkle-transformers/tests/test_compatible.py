"""Weights go where they compute what they computed: configs are compared, types are kept, folders are told apart."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, VeraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from twinkle_core.errors import CheckpointDamaged, CheckpointMismatch, HoldsAdapter, WeightsMismatch
from twinkle_transformers.adapters import PeftAdapters
from twinkle_transformers.checkpoint import same_model
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import write_tiny_llama

QV = ["q_proj", "v_proj"]
ROWS = [
    {"input_ids": [5, 6, 7, 8, 9, 10], "labels": [-100, 7, 8, 9, 10, 11]},
    {"input_ids": [20, 30, 40, 50], "labels": [-100, 40, 50, 60]},
]


def lora(**changes):
    return LoraConfig(**{"target_modules": QV, "r": 4, "lora_alpha": 8, **changes})


SAME = {
    "lora": (lora(), lora()),
    "targets written otherwise": (lora(), lora(target_modules=r".*(q|v)_proj")),
    "other start": (lora(), lora(init_lora_weights="gaussian")),
    "patterns": (lora(rank_pattern={"q_proj": 2}), lora(rank_pattern={"q_proj": 2})),
    "frozen": (lora(), lora(inference_mode=True)),
    "loha": (LoHaConfig(target_modules=QV), LoHaConfig(target_modules=QV)),
    "ia3": (
        IA3Config(target_modules=[*QV, "down_proj"], feedforward_modules=["down_proj"]),
        IA3Config(target_modules=[*QV, "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "vera": (VeraConfig(target_modules=QV), VeraConfig(target_modules=QV)),
}
OTHER = {
    "lora_alpha": (lora(lora_alpha=64), "lora_alpha is 8 there and 64 here"),
    "use_rslora": (lora(use_rslora=True), "use_rslora is False there and True here"),
    "use_dora": (lora(use_dora=True), "use_dora is False there and True here"),
    "r": (lora(r=2), "r is 4 there and 2 here"),
    "alpha_pattern": (lora(alpha_pattern={"q_proj": 32}), "alpha_pattern"),
    "rank_pattern": (lora(rank_pattern={"q_proj": 2}), "rank_pattern"),
    "method": (OFTConfig(target_modules=QV), "peft_type is 'LORA' there and 'OFT' here"),
}


def written(llama, config, folder):
    store = PeftAdapters(llama)
    store.acquire("a", config)
    store.write("a", folder)
    store.release("a")


@pytest.mark.parametrize("case", SAME)
def test_a_config_that_computes_the_same_fits(llama, case, tmp_path, caplog):
    saved, live = SAME[case]
    written(llama, saved, tmp_path)
    store = PeftAdapters(llama)
    store.acquire("b", live)
    store.check_compatible("b", tmp_path)
    assert not caplog.records


@pytest.mark.parametrize("case", OTHER)
def test_a_config_that_computes_something_else_is_named_with_both_values(llama, case, tmp_path):
    live, told = OTHER[case]
    written(llama, lora(), tmp_path)
    store = PeftAdapters(llama)
    store.acquire("b", live)
    with pytest.raises(CheckpointMismatch, match=f"adapter 'b'.*{told}"):
        store.check_compatible("b", tmp_path)


def test_another_dropout_is_said_and_taken(llama, tmp_path, caplog):
    written(llama, lora(), tmp_path)
    store = PeftAdapters(llama)
    store.acquire("b", lora(lora_dropout=0.1))
    with caplog.at_level(logging.WARNING):
        store.check_compatible("b", tmp_path)
    assert [r for r in caplog.records if "lora_dropout=0.1" in r.getMessage()]


def test_a_broken_config_is_told_and_the_base_has_none(llama, tmp_path):
    written(llama, lora(), tmp_path)
    store = PeftAdapters(llama)
    store.acquire("b", lora())
    store.check_compatible("", tmp_path)
    store.check_compatible("b", tmp_path / "none")
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointDamaged, match="adapter_config"):
        store.check_compatible("b", tmp_path)


def test_whole_numbers_are_no_weights(llama, tmp_path):
    """Copied into float tensors they would be values that were cut off once."""
    written(llama, lora(), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({k: v.to(torch.int8) for k, v in load_file(file).items()}, file)
    store = PeftAdapters(llama)
    with pytest.raises(WeightsMismatch, match=r"torch\.int8 in the file and torch\.float32 here"):
        store.acquire("a", tmp_path)
    assert store.names() == []


def test_an_adapters_folder_is_no_model(llama, tiny, tmp_path):
    written(llama, lora(), tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"holds an adapter.*add_adapter_to_model"):
        PeftAdapters(llama).read("", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(tiny)}))
    with pytest.raises(HoldsAdapter, match=rf"(?s){tiny}.*add_adapter_to_model\(name, '{tmp_path}'\)"):
        TransformersModel(model_id=tmp_path)
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())  # transformers would load both
    with pytest.raises(HoldsAdapter):
        TransformersModel(model_id=tmp_path)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory, untied):
    folder = tmp_path_factory.mktemp("narrow")
    AutoModelForCausalLM.from_pretrained(untied, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def test_loaded_weights_keep_their_digits_whenever_the_optimizer_comes(narrow, tmp_path):
    m = TransformersModel(model_id=narrow)
    m.set_optimizer("adamw", lr=1e-3)
    m.forward_backward(ROWS)
    m.clip_grad_and_step()
    m.save("x", tmp_path)
    wanted = {k: v.clone() for k, v in m.get_state_dict().items()}
    assert any(not torch.equal(v, v.bfloat16().float()) for v in wanted.values())
    for first in ("load", "set_optimizer"):
        again = TransformersModel(model_id=narrow)
        if first == "load":
            again.load("x", tmp_path)
        again.set_optimizer("adamw")
        if first != "load":
            again.load("x", tmp_path)
        assert all(torch.equal(v, wanted[k]) for k, v in again.get_state_dict().items())
    beneath = TransformersModel(model_id=narrow)
    beneath.add_adapter_to_model("a", lora())
    beneath.load("x", tmp_path, adapter_name="")
    assert {v.dtype for v in beneath.get_state_dict(adapter_name="").values()} == {torch.bfloat16}


@pytest.mark.parametrize("when", ["before", "in the window", "in the step"])
def test_gradients_stay_when_the_optimizer_comes_late(narrow, when):
    """Weights that are trained are wide before their first gradient, so nothing is lost or rounded on the way."""

    def run(when):
        m = TransformersModel(model_id=narrow)
        if when == "before":
            m.set_optimizer("sgd", lr=1.0)
        m.forward(ROWS[:1])
        if when == "in the step":
            m.set_optimizer("sgd", lr=1.0)
        m.backward()
        if when == "in the window":
            m.set_optimizer("sgd", lr=1.0)
        m.forward_backward(ROWS[1:])
        m.clip_grad_norm(float("inf"))
        return torch.cat([p.grad.flatten() for p in m.module.parameters()])

    assert torch.equal(run(when), run("before"))


def test_a_narrow_gradient_is_widened_with_its_weight():
    from twinkle_transformers.precision import Precision

    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weight.grad = torch.full((3,), 2.0, dtype=torch.bfloat16)
    Precision("bf16").master([weight])
    assert weight.dtype == weight.grad.dtype == torch.float32
    assert weight.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("here", ["no", "bf16", "fp16"])
def test_an_adapter_knows_its_base_model_in_every_precision_and_no_sibling(tiny, here, tmp_path, caplog):
    def fresh(folder, precision):
        m = TransformersModel(model_id=folder, mixed_precision=precision)
        m.add_adapter_to_model("a", lora())
        m.set_optimizer("sgd", lr=0.1)
        return m

    for saved in ("no", "bf16", "fp16"):
        m = fresh(tiny, saved)
        m.forward_backward(ROWS)
        m.clip_grad_and_step()
        m.save(saved, tmp_path, save_optimizer=True)
        again = fresh(tiny, here)
        again.forward_only(ROWS)
        again.resume_from_checkpoint(tmp_path / saved)
    sibling = write_tiny_llama(tmp_path / "sibling", seed=1)
    with pytest.raises(CheckpointMismatch, match=f"trained on '{tiny}', and this is '{sibling}'"):
        fresh(sibling, here).resume_from_checkpoint(tmp_path / "no")
    caplog.clear()
    bare = TransformersModel(model_id=sibling, mixed_precision=here)
    bare.add_adapter_to_model("a", tmp_path / "no")
    assert "the base model has other values than the one that the adapter was trained on" in caplog.text


def test_a_plain_adapter_folder_names_its_base_model(tiny, tmp_path, caplog):
    m = TransformersModel(model_id=tiny, mixed_precision="no")
    m.add_adapter_to_model("a", lora())
    m.adapters.write("a", tmp_path)
    m.add_adapter_to_model("b", tmp_path)
    m.load(tmp_path.name, tmp_path.parent, adapter_name="a")
    assert not caplog.records
    sibling = write_tiny_llama(tmp_path / "sibling", seed=1)
    other = TransformersModel(model_id=sibling, mixed_precision="no")
    other.add_adapter_to_model("a", tmp_path)
    assert f"was made for the base model '{tiny}', and this one is '{sibling}'" in caplog.text
    caplog.clear()
    other.load(tmp_path.name, tmp_path.parent)
    assert f"was made for the base model '{tiny}', and this one is '{sibling}'" in caplog.text


@pytest.mark.parametrize(
    ("first", "second", "one"),
    [
        ("org/name", "org/name", True),
        ("org/name", "/cache/hub/models--org--name/snapshots/abc", True),
        ("/cache/modelscope/org/name", "org/name", True),
        ("org/name", "org/other", False),
        ("/a/org/name", "/b/org/name", False),
        ("org/name", "/cache/hub/models--org--other/snapshots/abc", False),
    ],
)
def test_names_that_may_be_of_one_model(first, second, one):
    assert same_model(first, second) is same_model(second, first) is one
