"""A value head: what it computes, that it is trained in fp32, and that it is kept with what it was trained with."""

from __future__ import annotations

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaForCausalLM

from twinkle_core.errors import CheckpointMismatch, NotComputed, NotInOptimizer, PatchOrder, PatchRefused
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import tiny_config

ROWS = [
    {"input_ids": [5, 6, 7, 8], "labels": [-100, 7, 8, 9], "length": 4},
    {"input_ids": [9, 10], "labels": [10, 11], "length": 2},
]
ARGS = {"advantages": [1.0, -0.5], "returns": [[0.0, 1.0, 1.0, 2.0], [0.5, 0.5]]}


def make(config=None, model_id=None, seed=0, **options):
    torch.manual_seed(seed)
    source = {"model_id": model_id} if model_id else {"config": config or tiny_config()}
    return TransformersModel(**source, **{"mixed_precision": "no"} | options)


def ready(model, adapter=None, lr=0.05):
    model.apply_patch("value_head")
    model.set_loss("ppo")  # the base session's, for adapters too
    if adapter is not None:
        model.add_adapter_to_model("a", adapter)
    model.set_optimizer("adamw", lr=lr)
    return model


def step(model, steps=1):
    for _ in range(steps):
        model.forward_backward(ROWS, **ARGS)
        model.clip_grad_and_step()
    return model


def values(model):
    return model.forward_only(ROWS, return_logits=False)["values"]


def filled(head):
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, head.weight.numel()).view_as(head.weight))
        head.bias.fill_(0.25)
    return head


@pytest.mark.parametrize("config", [tiny_config(), tiny_config(tie_word_embeddings=False),
                                    GraniteConfig(**{**tiny_config().to_dict(), "model_type": "granite"}, logits_scaling=4.0)],
                         ids=["tied", "untied", "scaled logits"])  # fmt: skip
def test_values_are_linear_in_the_last_hidden_states(config):
    model = make(config)
    model.apply_patch("value_head")
    head = filled(model.module.value_head)
    model.set_loss("ppo")
    got = model.forward_only(ROWS, return_logits=True)
    assert got.keys() == {"logits", "logps", "values"} and got["values"].shape == (2, 4)
    with torch.no_grad():
        for row, found in zip(ROWS, got["values"], strict=True):
            states = model.module.eval().base_model(torch.tensor([row["input_ids"]])).last_hidden_state[0].double()
            wanted = states @ head.weight[0].double() + head.bias.double()
            torch.testing.assert_close(found[: len(wanted)].double(), wanted, rtol=0, atol=1e-5)
    model.set_processor("input", padding_free=True)
    packed = values(model)[0]
    torch.testing.assert_close(packed, torch.cat([got["values"][0], got["values"][1, :2]]), rtol=0, atol=1e-5)


def test_it_begins_at_zero_and_draws_nothing():
    model = make()
    before = torch.get_rng_state()
    model.apply_patch("value_head")
    assert torch.equal(before, torch.get_rng_state())
    model.set_loss("ppo")
    assert bool((values(model) == 0).all())


def test_its_gradient_is_that_of_the_value_loss():
    """At 0 the head's bias gets coef * sum(V - R) over the labelled tokens."""
    model = ready(make())
    model.forward_backward(ROWS, **ARGS)
    assert float(model.module.value_head.bias.grad) == pytest.approx(0.5 * -(1.0 + 1.0 + 2.0 + 0.5 + 0.5))


@pytest.mark.parametrize("mixed", ["no", "bf16"])
@pytest.mark.parametrize("adapter", [None, LoraConfig(r=4, target_modules="all-linear")], ids=["whole", "lora"])
def test_it_learns_the_returns_in_float32(adapter, mixed):
    model = ready(make(mixed_precision=mixed), adapter)
    heads = [p for name, p in model.adapters.parameters("a" if adapter else "").items() if "value_head" in name]
    step(model, 60)
    assert [p.dtype for p in heads] == [torch.float32] * 2 and values(model).dtype == torch.float32
    held = {id(p) for group in model.sessions["a" if adapter else ""].optimizer.param_groups for p in group["params"]}
    assert all(id(p) in held and bool((p != 0).any()) for p in heads)
    got = values(model)
    wanted = torch.tensor([[0.0, 1.0, 1.0, 2.0], [0.5, 0.5, 0.0, 0.0]])
    trained = torch.tensor([row["labels"] + [-100] * (4 - len(row["labels"])) for row in ROWS]) != -100
    assert (got - wanted)[trained].abs().max() < 0.3


def test_a_whole_model_keeps_it(tmp_path):
    model = step(ready(make()), 3)
    path = model.save("whole", tmp_path, save_optimizer=True)
    assert {k for k in load_file(tmp_path / "whole/model.safetensors") if "value" in k} == {
        "value_head.weight",
        "value_head.bias",
    }
    again = ready(make(model_id=path))
    again.resume_from_checkpoint(path)
    assert torch.equal(values(again), values(model))
    assert torch.equal(values(step(again)), values(step(model)))
    loaded = make(seed=5)
    loaded.apply_patch("value_head")
    loaded.set_loss("ppo")
    loaded.load("whole", tmp_path)
    resumed = make(model_id=path)
    resumed.apply_patch("value_head")
    resumed.set_loss("ppo")
    resumed.load("whole", tmp_path)
    assert torch.equal(values(loaded), values(resumed)) and bool((values(loaded) != 0).any())
    with pytest.raises(CheckpointMismatch, match=r"value_head"):
        make().load("whole", tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([ROWS[0]["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, loaded.forward_only([ROWS[0]]).logits, rtol=0, atol=1e-5)


def test_each_adapter_has_one_of_its_own_and_keeps_it(tmp_path):
    make().save("base", tmp_path)
    model = ready(make(model_id=tmp_path / "base"), LoraConfig(r=4, target_modules="all-linear"))
    model.add_adapter_to_model("b", LoraConfig(r=2, target_modules=["q_proj"]))
    with model.adapter("a"):
        step(model, 3)
        ours = values(model)
        assert bool((ours != 0).any())
        base = model.forward_only(ROWS, disable_lora=True, return_logits=False)["values"]
    with model.adapter("b"):
        assert bool((values(model) == 0).all()) and bool((base == 0).all())
    path = model.save("a", tmp_path, adapter_name="a", save_optimizer=True)
    stored = load_file(tmp_path / "a/adapter_model.safetensors")
    assert {k for k in stored if "value" in k} == {f"base_model.model.value_head.{part}" for part in ("weight", "bias")}

    again = make(model_id=tmp_path / "base")
    again.apply_patch("value_head")
    again.add_adapter_to_model("a", path)
    again.set_loss("ppo")
    assert torch.equal(values(again), ours)
    again.set_optimizer("adamw", lr=0.05)
    again.resume_from_checkpoint(path)
    model.remove_adapter("b")
    assert torch.equal(values(step(again)), values(step(model)))


def test_plain_peft_loads_what_is_saved(tmp_path):
    make().save("base", tmp_path)
    model = step(ready(make(model_id=tmp_path / "base"), LoraConfig(r=4, target_modules="all-linear")), 2)
    model.save("a", tmp_path)
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    plain.value_head = torch.nn.Linear(32, 1)
    plain = PeftModel.from_pretrained(plain, tmp_path / "a").eval()
    with torch.no_grad():
        ids = torch.tensor([ROWS[0]["input_ids"]])
        got = plain.base_model.model.value_head(plain.base_model.model.model(ids).last_hidden_state)[..., 0]
    torch.testing.assert_close(got, values(model)[:1], rtol=0, atol=1e-5)


def test_a_checkpoint_with_a_head_asks_for_the_patch(tmp_path):
    make().save("base", tmp_path)
    model = step(ready(make(model_id=tmp_path / "base"), LoraConfig(r=4, target_modules="all-linear")))
    path = model.save("a", tmp_path)
    bare = make(model_id=tmp_path / "base")
    with pytest.raises(CheckpointMismatch, match="value_head"):
        bare.add_adapter_to_model("a", path)
    assert bare.adapters.names() == []


def test_one_that_comes_late_is_told():
    model = make()
    model.set_loss("ppo")
    model.set_optimizer("adamw", lr=1e-3)
    with pytest.raises(NotComputed, match=r"gives no values: it has no value head; apply_patch\('value_head'\)"):
        model.forward_backward(ROWS, **ARGS)
    model.apply_patch("value_head")
    with pytest.raises(NotInOptimizer, match=r"value_head\.weight"):
        model.forward_backward(ROWS, **ARGS)
    model.set_optimizer("adamw", lr=1e-3)
    step(model)
    assert bool((model.module.value_head.bias != 0).all())

    late = make()
    patches = list(late.patches)
    late.add_adapter_to_model("a", LoraConfig(r=4, target_modules="all-linear"))
    with pytest.raises(PatchRefused, match=r"adapter 'a' was made without a value head.*\n.*before add_adapter_to_model"):
        late.apply_patch("value_head")
    assert not hasattr(late.module, "value_head") and late.patches == patches


def test_it_is_taken_away_when_no_adapter_stands_on_it():
    model = make()
    names = [name for name, _ in model.module.named_parameters()]
    model.apply_patch("value_head")
    model.add_adapter_to_model("a", IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]))
    assert any("value_head" in name for name in model.adapters.parameters("a"))
    with pytest.raises(PatchOrder, match="ValueHeadPatch can't be undone: the ModulesToSaveWrapper that is 'value_head' now"):
        model.patches[-1].undo(model)
    model.remove_adapter("a")
    model.patches[-1].undo(model)
    assert [name for name, _ in model.module.named_parameters()] == names
    with pytest.raises(PatchRefused, match=r"ValueHeadPatch\(hidden_size=0\): it must be a whole number from 1 up"):
        model.apply_patch("value_head", hidden_size=0)


def test_adapters_that_come_after_the_first_forward_begin_from_the_same_head():
    """What an adapter leaves frozen is narrowed at the first forward; a head is not, so a second adapter's is exact."""
    model = ready(make(mixed_precision="bf16"), LoraConfig(r=4, target_modules="all-linear"))
    step(model)
    model.add_adapter_to_model("b", LoraConfig(r=4, target_modules="all-linear"))
    with model.adapter("b"):
        assert values(model).dtype == torch.float32 and bool((values(model) == 0).all())


def test_the_head_is_not_told_as_left_out(caplog):
    """Each adapter trains one of its own, so it is no layer that got none."""
    model = make()
    model.apply_patch("value_head")
    model.add_adapter_to_model("a", LoraConfig(r=2, target_modules="all-linear"))
    assert "leaves out" not in caplog.text
    assert "a" in model.adapters.names() and any("value_head" in key for key in model.adapters.parameters("a"))
