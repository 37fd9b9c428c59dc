"""The patch ``fast_lora`` against peft's own layers."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from twinkle_core.contracts.adapters import BASE
from twinkle_core.errors import PatchOrder, WrongType
from twinkle_transformers.compliance import FastLoraSuite, TransformersSuite
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.patches import fast_lora
from twinkle_transformers.testing import tiny_config

ROWS = [{"input_ids": list(range(i, i + 9)), "labels": list(range(i + 1, i + 10))} for i in (3, 40, 90)]
LAYERS = 14  # linear layers of a Llama of two


class TestFastLora(FastLoraSuite):
    pass


def lora(**options):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options})


def model(fast, config=None, names=("a",), precision="no", **options):
    """A tiny model with adapters whose B is not 0."""
    torch.manual_seed(0)
    built = TransformersModel(config=tiny_config(), mixed_precision=precision, fast=fast, **options)
    for name in names:
        built.add_adapter_to_model(name, copy.deepcopy(config or lora()))
        draw = torch.Generator().manual_seed(len(name))
        with torch.no_grad():
            for parameter in built.adapters.parameters(name).values():
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return built


@pytest.fixture
def calls(monkeypatch):
    """One entry for each layer that core has computed."""
    seen = []

    def counted(*args, **kwargs):
        seen.append(kwargs)
        return original(*args, **kwargs)

    original = fast_lora.lora_linear
    monkeypatch.setattr(fast_lora, "lora_linear", counted)
    return seen


def trained(built, steps=3, calls=()):
    """Losses, gradient norms and weights of a few steps; ``calls`` without those of a first run (it asks a model things)."""
    built.forward_only(inputs=ROWS, adapter_name="a")
    if calls:
        calls.clear()
    built.set_optimizer("sgd", lr=0.05, adapter_name="a")
    torch.manual_seed(1)
    numbers = []
    for _ in range(steps):
        loss = built.forward_backward(inputs=ROWS, adapter_name="a")
        numbers += [float(loss), float(built.clip_grad_and_step(1e9, adapter_name="a"))]
    return torch.tensor(numbers), {k: v.clone() for k, v in built.adapters.state_dict("a").items()}


def assert_alike(one, other, most):
    torch.testing.assert_close(one[0], other[0], rtol=most, atol=most)
    for key in other[1]:
        torch.testing.assert_close(one[1][key], other[1][key], rtol=most, atol=most)


CASES = {
    "plain": (lora(), {}),
    "rslora": (lora(use_rslora=True), {}),
    "patterns": (lora(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 1}), {}),
    "dropout": (lora(lora_dropout=0.3), {}),
    "checkpointing": (lora(lora_dropout=0.3), {"gradient_checkpointing": True}),
    "biases": (lora(), {"config": tiny_config(attention_bias=True)}),
    "gaussian": (lora(init_lora_weights="gaussian"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_trains_as_peft_does(case, calls):
    config, options = CASES[case]

    def built(fast):
        torch.manual_seed(0)
        m = TransformersModel(**{"config": tiny_config(), "mixed_precision": "no", **options, "fast": fast})
        m.add_adapter_to_model("a", copy.deepcopy(config))
        return m

    fast = trained(built(True), calls=calls)
    assert len(calls) == 3 * LAYERS * (2 if case == "checkpointing" else 1)
    assert_alike(fast, trained(built(False)), 2e-6)
    assert len(calls) == 3 * LAYERS * (2 if case == "checkpointing" else 1)


@pytest.mark.parametrize(("precision", "most"), [("bf16", 3e-2), ("fp16", 4e-3)])
def test_trains_as_peft_does_under_autocast(precision, most, calls):
    config = lora(lora_dropout=0.2)
    fast = trained(model(True, config, precision=precision), calls=calls)
    assert len(calls) == 3 * LAYERS
    assert_alike(fast, trained(model(False, config, precision=precision)), most)


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"lora_bias": True}, {"target_modules": ["embed_tokens"]}],
    ids=lambda o: next(iter(o)),
)
def test_what_it_cannot_do_stays_peft_bit_for_bit(options, calls):
    """A variant, a bias in B, a layer that is no linear layer."""
    biased = {"config": tiny_config(attention_bias=True, mlp_bias=True)}

    def built(fast):
        torch.manual_seed(0)
        m = TransformersModel(**biased, mixed_precision="no", fast=fast)
        m.add_adapter_to_model("a", lora(**options))
        return m

    fast = trained(built(True))
    slow = trained(built(False))
    assert not calls
    assert torch.equal(fast[0], slow[0]) and all(torch.equal(fast[1][k], slow[1][k]) for k in slow[1])


def outputs(built, **options):
    return built.forward_only(inputs=ROWS, **options)["logits"]


def test_switching_and_turning_off_go_on(calls):
    fast, slow = (model(f, names=("a", "other")) for f in (True, False))
    outputs(fast, adapter_name="a")  # what the model is asked once, by running it
    calls.clear()
    for options in ({"adapter_name": "a"}, {"adapter_name": "other"}, {"adapter_name": "a", "disable_lora": True}):
        torch.testing.assert_close(outputs(fast, **options), outputs(slow, **options), rtol=1e-5, atol=1e-5)
    assert len(calls) == 2 * LAYERS
    assert torch.equal(outputs(fast, adapter_name="a", disable_lora=True), outputs(slow, adapter_name="a", disable_lora=True))
    layers = fast.adapters._layers
    with fast.adapters.activate("a"):  # two at once: peft's own sum
        for layer in layers:
            layer.set_adapter(["twinkle0", "twinkle1"])
        calls.clear()
        both = fast.module(input_ids=torch.tensor([[3, 4, 5]])).logits
        assert not calls
        for layer in layers:
            layer.set_adapter("twinkle0")
            layer.merge()
        merged = fast.module(input_ids=torch.tensor([[3, 4, 5]])).logits
        assert not calls
        for layer in layers:
            layer.unmerge()
        alone = fast.module(input_ids=torch.tensor([[3, 4, 5]])).logits
        assert len(calls) == LAYERS
    torch.testing.assert_close(merged, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(both, alone, atol=1e-3)


def test_peft_sees_its_own_layers(tmp_path):
    """Loads what was saved, in plain peft; mixes adapters by name; merges into the base model."""
    fast = model(True, names=("a", "other"))
    plain = LlamaForCausalLM(tiny_config())
    plain.load_state_dict(fast.adapters.state_dict(BASE))
    plain.eval()
    fast.save("one", output_dir=tmp_path, adapter_name="a")
    loaded = PeftModel.from_pretrained(plain, tmp_path / "one").eval()
    ids = torch.tensor([row["input_ids"] for row in ROWS])
    want = loaded(input_ids=ids).logits
    torch.testing.assert_close(outputs(fast, adapter_name="a"), want, rtol=1e-5, atol=1e-5)
    tree = fast.adapters._peft.eval()
    with torch.no_grad():
        mixed = tree(input_ids=ids, adapter_names=["twinkle0", "twinkle1", "__base__"]).logits
        torch.testing.assert_close(mixed[0], want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mixed[2], outputs(fast, adapter_name=BASE)[2], rtol=1e-5, atol=1e-5)
        with tree.disable_adapter():
            torch.testing.assert_close(tree(input_ids=ids).logits, outputs(fast, adapter_name=BASE), rtol=1e-5, atol=1e-5)
        tree.set_adapter("twinkle0")
        merged = copy.deepcopy(tree).merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)


def test_a_base_layer_that_others_watch_or_change_is_called(calls):
    built = model(True)
    layer = built.adapters._layers[0]
    seen = []
    outputs(built)
    handles = [
        layer.base_layer.register_forward_hook(lambda *_: seen.append("forward")),
        layer.lora_B["twinkle0"].register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    built.set_optimizer("sgd", lr=0.05)
    calls.clear()
    built.forward_backward(inputs=ROWS)
    assert sorted(seen) == ["backward", "forward"] and len(calls) == LAYERS - 1
    for handle in handles:
        handle.remove()
    layer.base_layer.forward = types.MethodType(lambda self, x: torch.zeros(*x.shape[:-1], self.out_features), layer.base_layer)
    calls.clear()
    outputs(built)
    assert len(calls) == LAYERS - 1


def test_keeps_less_for_backward_under_autocast():
    """peft widens its input to fp32, and autocast narrows it again, for each layer that reads it."""

    def kept(built):
        outputs(built)  # weights that adapters leave frozen are narrowed now
        held = {p.untyped_storage().data_ptr() for p in built.module.parameters()}
        seen = {}

        def pack(t):
            storage = t.untyped_storage()
            if storage.data_ptr() not in held:
                seen[storage.data_ptr()] = (storage.nbytes(), t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            built.forward(inputs=ROWS, return_logits=False)
        return sum(size for size, _ in seen.values())

    assert kept(model(True, precision="bf16")) < 0.9 * kept(model(False, precision="bf16"))
    assert kept(model(True)) <= kept(model(False))


def test_said_in_the_table_and_off_by_fast():
    assert "FastLora" in model(True).get_train_configs()
    off = model(False)
    assert "FastLora" not in off.get_train_configs()
    assert not any("forward" in vars(m) for m in off.module.modules())
    with pytest.raises(WrongType, match="fast"):
        TransformersSuite().build(fast="no")


def test_later_adapters_are_reached_and_undo_ends_that(calls):
    built = model(True)
    (patch,) = built.patches
    built.remove_adapter("a")
    assert not any("forward" in vars(m) for m in built.module.modules())
    built.add_adapter_to_model("b", lora(target_modules=["q_proj"]))
    built.add_adapter_to_model("c", lora())
    outputs(built, adapter_name="c")
    calls.clear()
    outputs(built, adapter_name="c")
    assert len(calls) == LAYERS
    patch.undo(built)
    built.add_adapter_to_model("d", lora())
    for name in ("c", "d"):
        outputs(built, adapter_name=name)
    assert len(calls) == LAYERS
    built.apply_patch("fast_lora")
    outputs(built, adapter_name="d")
    assert len(calls) == 2 * LAYERS


def test_undo_under_a_later_patch_changes_nothing():
    built = model(True)
    (patch,) = built.patches
    last = built.adapters._layers[-1]
    own = last.forward

    def traced(x):
        return own(x)

    last.forward = traced
    with pytest.raises(PatchOrder, match="traced"):
        patch.undo(built)
    assert all("forward" in vars(layer) for layer in built.adapters._layers)
    last.forward = own
    patch.undo(built)
    assert not any("forward" in vars(layer) for layer in built.adapters._layers)


def test_on_a_plain_peft_model(calls):
    """Without twinkle's model around it."""
    torch.manual_seed(0)
    plain = get_peft_model(LlamaForCausalLM(tiny_config()), lora())
    ids = torch.tensor([[3, 4, 5, 6]])
    want = plain(input_ids=ids).logits
    patch = fast_lora.FastLora()
    patch.apply(plain)
    torch.testing.assert_close(plain(input_ids=ids).logits, want, rtol=1e-5, atol=1e-5)
    assert len(calls) == LAYERS
    patch.undo(plain)
    assert torch.equal(plain(input_ids=ids).logits, want) and len(calls) == LAYERS
