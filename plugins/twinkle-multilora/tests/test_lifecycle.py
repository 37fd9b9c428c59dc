"""Tenants come and go: what is honoured, what is refused by name, and what a refusal leaves alone."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from peft.tuners.lora import LoraRuntimeConfig
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, LlamaForSequenceClassification

from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.errors import (
    BadAdapter,
    BadArgument,
    BadRow,
    DuplicateAdapter,
    LoraDisabled,
    NoTrainableParameters,
    RankTooLarge,
    SlotsFull,
    UnknownAdapter,
    WhichAdapter,
    WrongArgument,
)
from twinkle_multilora.adapters import SlotAdapters
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_multilora.options import _SERVED
from twinkle_multilora.pool import LoraTenant
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import tiny_config

ROWS = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, 9]}, {"input_ids": [9, 4], "labels": [-100, 3]}]
CONFIG = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])


def build(**options):
    return MultiLoraTransformersModel(config=tiny_config(), mixed_precision="no", **{"max_loras": 2, "max_r": 8, **options})


def weights(model, name):
    return {k: v.clone() for k, v in model.get_state_dict(adapter_name=name).items()}


@pytest.fixture
def model():
    return build()


# ---------------------------------------------------------------------------------------------------- the manager


def test_it_is_a_transformers_model(model):
    """No verb is written anew along its classes; and what one tenant's steps give is what a TransformersModel gives."""
    assert isinstance(model, TransformersModel)
    verbs = {name for name in vars(TwinkleModel) if not name.startswith("_")}
    own = [cls for cls in type(model).__mro__ if cls.__module__.startswith("twinkle_multilora.")]
    assert len(own) > 2 and not [(cls, name) for cls in own for name in verbs & vars(cls).keys()]
    plain = TransformersModel(config=tiny_config(), mixed_precision="no")
    plain.adapters.load_state_dict("", model.get_state_dict(adapter_name=""))
    seen = []
    for each in (model, plain):
        torch.manual_seed(1)
        each.add_adapter_to_model(
            "a", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), gradient_accumulation_steps=2
        )
        each.set_optimizer("adamw", lr=1e-2)
        each.set_lr_scheduler("linear_warmup", num_warmup_steps=2, num_training_steps=4)
        each.add_metric("accuracy")
        found = []
        for i in range(6):
            found.append(float(each.forward_backward(ROWS if i % 2 else ROWS[:1])))
            norm = each.clip_grad_and_step(0.1)
            found += [] if norm is None else [float(norm)]
        found.append(float(each.forward_only(ROWS).logps.sum()))
        seen.append((found, each.calculate_metric(is_training=True), weights(each, "a")))
    (shared, metric, own_weights), (expected, plain_metric, plain_weights) = seen
    assert shared == pytest.approx(expected, rel=1e-4) and metric == pytest.approx(plain_metric, rel=1e-4)
    assert own_weights.keys() == plain_weights.keys()
    for key, value in plain_weights.items():
        torch.testing.assert_close(own_weights[key], value, rtol=1e-4, atol=1e-5)


def test_tenants_and_slots(model):
    lora = model.multi_lora
    assert (lora.max_loras, lora.max_r, lora.free) == (2, 8, 2)
    assert [f.name for f in dataclasses.fields(LoraTenant)] == [
        "index",
        "adapter_name",
        "config",
        "tenant_adapter_name",
        "tenant_config",
    ]
    assert lora.acquire_lora("tenant_a", CONFIG) == "lora_0"
    assert lora.acquire_lora("tenant_b", LoraConfig(r=8)) == "lora_1"
    held = lora.tenants()
    assert [(t.index, t.adapter_name, t.config.r, t.tenant_adapter_name, t.tenant_config.r) for t in held] == [
        (0, "lora_0", 8, "tenant_a", 4),
        (1, "lora_1", 8, "tenant_b", 8),
    ]
    lora.release_lora("tenant_a")
    assert lora.free == 1 and lora.tenants()[0].tenant_adapter_name is None and lora.tenants()[0].tenant_config is None
    assert lora.acquire_lora("tenant_c", CONFIG) == "lora_0"
    assert model.adapters.names() == ["tenant_b", "tenant_c"]
    held[0].tenant_config.r = 1
    assert lora.tenants()[0].tenant_config.r == 4  # what is given out is a copy


def test_a_slots_name_means_its_tenant(model):
    slot = model.multi_lora.acquire_lora("tenant_a", CONFIG)
    model.multi_lora.acquire_lora("tenant_b", CONFIG)
    model.set_optimizer("sgd", lr=0.1, adapter_name=slot)
    model.forward_backward(ROWS, adapter_name="tenant_a")
    assert model.clip_grad_and_step(adapter_name=slot) > 0
    assert model.sessions["tenant_a"].cur_step == 1
    with model.multi_lora.adapter("tenant_a") as name:
        assert name == slot
        assert model.forward(ROWS).logits.shape == (2, 4, 264)
    with model.adapter("lora_1"):
        model.forward_backward(ROWS)
    assert model.sessions["tenant_b"].window.count == 1
    model.remove_adapter(slot)
    with pytest.raises(UnknownAdapter):
        model.forward_only(ROWS, adapter_name=slot)
    assert list(model.sessions) == ["", "tenant_b"]


@pytest.mark.parametrize("name", ["lora_0", "lora_17"])
def test_a_slots_name_is_no_tenants_name(model, name):
    with pytest.raises(BadAdapter, match="slots are called"):
        model.add_adapter_to_model(name, CONFIG)
    model.add_adapter_to_model("lora_", CONFIG)
    model.add_adapter_to_model("my_lora_0", CONFIG)


def test_acquire_and_add_are_one(model):
    model.add_adapter_to_model("a", CONFIG)
    assert model.multi_lora.tenants()[0].tenant_adapter_name == "a"
    model.multi_lora.acquire_lora("b", CONFIG, gradient_accumulation_steps=3)
    assert model.sessions["b"].window.size == 3
    model.multi_lora.release_lora("a")
    assert list(model.sessions) == ["", "b"]
    model.remove_adapter("b")
    assert model.multi_lora.free == 2


def test_a_duplicate_leaves_the_live_tenant(model):
    model.multi_lora.acquire_lora("a", CONFIG)
    model.set_optimizer("adamw", lr=0.1, adapter_name="a")
    before, session = weights(model, "a"), model.sessions["a"]
    with pytest.raises(DuplicateAdapter):
        model.multi_lora.acquire_lora("a", LoraConfig(r=2))
    with pytest.raises(DuplicateAdapter):
        model.adapters.acquire("a", LoraConfig(r=2))
    assert model.sessions["a"] is session and model.multi_lora.free == 1
    assert all(torch.equal(v, before[k]) for k, v in weights(model, "a").items())


def test_unknown_names_are_told(model):
    model.multi_lora.acquire_lora("tenant_a", CONFIG)
    for call in (
        lambda: model.multi_lora.release_lora("tenant_q"),
        lambda: model.forward_only(ROWS, adapter_name="tenant_q"),
        lambda: model.multi_lora.adapter("tenant_q").__enter__(),
        lambda: model.forward_only(ROWS, adapter_name="lora_1"),
    ):
        with pytest.raises(UnknownAdapter, match="tenant_a"):
            call()


def test_several_tenants_and_none_named(model):
    model.multi_lora.acquire_lora("a", CONFIG)
    model.forward_only(ROWS)
    model.multi_lora.acquire_lora("b", CONFIG)
    with pytest.raises(WhichAdapter, match="a, b"):
        model.forward_only(ROWS)


@pytest.mark.parametrize(
    "sizes", [{"max_loras": 0}, {"max_r": -1}, {"max_length": 1.5}, {"max_loras": True}, {"max_r": "8"}, {"max_loras": None}]
)
def test_sizes_are_checked_before_a_model_is_built(sizes):
    with pytest.raises(BadArgument, match=next(iter(sizes))):
        MultiLoraTransformersModel(model_id="nowhere", **sizes)


def test_a_misspelt_argument_is_told():
    with pytest.raises(WrongArgument, match="max_loras"):
        build(max_lora=3)


@pytest.mark.parametrize("targets", ["nope", ["nope"], ["embed_tokens"]])
def test_places_that_can_have_no_slots(targets):
    with pytest.raises(BadAdapter):
        build(target_modules=targets)


def test_rows_that_are_too_long():
    model = build(max_length=3)
    model.multi_lora.acquire_lora("a", CONFIG)
    with pytest.raises(BadRow, match=r"row 0: 'input_ids' has 4 tokens.*at most 3"):
        model.forward_backward(ROWS, adapter_name="a")
    batch = {"input_ids": torch.tensor([[9, 4, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 0, 0]])}
    model.forward_only(batch, adapter_name="a")  # padding doesn't count
    with pytest.raises(BadRow, match="at most 3"):
        model.forward_only({**batch, "attention_mask": torch.ones(1, 4, dtype=torch.long)}, adapter_name="a")
    assert model.sessions["a"].window.count == 0


def test_the_base_belongs_to_all(model):
    """It is frozen from the beginning; what asks to train it is refused."""
    assert not any(p.requires_grad for p in model.module.parameters())
    with pytest.raises(NoTrainableParameters):
        model.set_optimizer("sgd", lr=0.1)
    with pytest.raises(NoTrainableParameters):
        model.forward_backward(ROWS)


# ---------------------------------------------------------------------------------------------------- contexts


def test_a_disabled_context_is_the_tenants_session_over_the_base(model):
    model.multi_lora.acquire_lora("a", CONFIG)
    for p in model.adapters.parameters("a").values():
        p.data.fill_(0.1)
    base = model.forward_only(ROWS, adapter_name="").logits
    own = model.forward_only(ROWS, adapter_name="a").logits
    assert not torch.equal(base, own)
    with model.multi_lora.adapter("a", disable_lora=True):
        assert torch.equal(model.forward_only(ROWS).logits, base)
        assert torch.equal(model.forward(ROWS).logits, base)
        reference = model.calculate_loss()
        for verb in (model.backward, lambda: model.forward_backward(ROWS)):
            with pytest.raises(LoraDisabled):
                verb()
    with pytest.raises(LoraDisabled):  # outside as well: that forward was the base model's
        model.backward(adapter_name="a")
    labels = torch.cat([torch.tensor(row["labels"]) for row in ROWS])
    shown = torch.cat([logits[: len(row["labels"])] for logits, row in zip(base, ROWS, strict=True)])
    assert reference == pytest.approx(float(torch.nn.functional.cross_entropy(shown, labels)), rel=1e-5)
    assert abs(reference - float(model.forward_backward(ROWS, adapter_name="a"))) > 1e-3
    assert torch.equal(model.forward_only(ROWS, adapter_name="a").logits, own)


def test_a_disabled_context_says_nothing_of_others(model):
    for name in "ab":
        model.multi_lora.acquire_lora(name, CONFIG)
        for p in model.adapters.parameters(name).values():
            p.data.fill_(0.1)
    own = model.forward_only(ROWS, adapter_name="b").logits
    with model.multi_lora.adapter("a", disable_lora=True):
        assert torch.equal(model.forward_only(ROWS, adapter_name="b").logits, own)
        assert not torch.equal(model.forward_only(ROWS).logits, own)


# ---------------------------------------------------------------------------------------------------- options

HONOURED = {
    "defaults of all-linear": {"target_modules": "all-linear"},
    "peft's own targets": {"target_modules": None, "task_type": "CAUSAL_LM"},
    "a regular expression": {"target_modules": r".*\.1\..*_proj"},
    "exclude_modules": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "layers_to_transform": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "rslora": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}, "target_modules": ["q_proj", "v_proj"]},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 3}, "target_modules": ["q_proj", "v_proj"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "weights that start at random": {"init_lora_weights": False},
    "dropout": {"lora_dropout": 0.25},
    "one that says how bytes are stored": {"fan_in_fan_out": True},
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("options", HONOURED.values(), ids=HONOURED)
def test_honoured_as_in_plain_peft(options):
    """The same targets, first weights (by the seed), random state afterwards, scaling and logits, to the bit."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **options})
    torch.manual_seed(0)
    model = build()
    plain = LlamaForCausalLM(tiny_config())
    plain.load_state_dict(model.get_state_dict(adapter_name=""))
    torch.manual_seed(3)
    model.multi_lora.acquire_lora("a", copy.deepcopy(config))
    drawn = torch.rand(3)
    torch.manual_seed(3)
    plain = get_peft_model(plain, copy.deepcopy(config)).eval()
    assert torch.equal(torch.rand(3), drawn)
    state = {k.replace(".default", ""): p for k, p in plain.named_parameters() if "lora_" in k}
    assert list(state) == list(model.adapters.parameters("a"))
    for key, live in model.adapters.parameters("a").items():
        assert torch.equal(live, state[key]), key
        with torch.no_grad():
            live.add_(0.05)
            state[key].add_(0.05)
    ids = torch.tensor([[5, 6, 7]])
    found = model.forward_only([{"input_ids": [5, 6, 7]}], adapter_name="a").logits
    torch.testing.assert_close(found, plain(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


REFUSED = {
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["norm"]},
    "bias": {"bias": "all"},
    "lora_bias": {"lora_bias": True},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "layer_replication": {"layer_replication": [(0, 1), (0, 1)]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"},
    "target_parameters": {"target_parameters": ["q_proj.weight"]},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "use_qalora": {"use_qalora": True},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", REFUSED)
def test_refused_by_name(model, option):
    model.multi_lora.acquire_lora("a", CONFIG)
    before = weights(model, "a")
    with pytest.raises(BadAdapter, match=option):
        model.multi_lora.acquire_lora("b", LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **REFUSED[option]}))
    assert model.multi_lora.free == 1 and list(model.sessions) == ["", "a"]
    assert all(torch.equal(v, before[k]) for k, v in weights(model, "a").items())


def test_the_way_out_is_one_that_slots_have(model):
    """Elsewhere a tied output layer may be trained with its embedding; here no option makes that possible."""
    with pytest.raises(BadAdapter, match="can't be served by a slot") as refused:
        model.multi_lora.acquire_lora("a", LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert "ensure_weight_tying" not in str(refused.value)


@pytest.mark.filterwarnings("ignore")
def test_no_option_is_passed_over(model):
    """Each field of peft's config that isn't served is refused when it is set: also those of versions to come."""
    for field in dataclasses.fields(LoraConfig):
        if field.name in _SERVED or field.name in {"bias", "layer_replication", "alora_invocation_tokens"}:
            continue  # served, or refused by rules that all adapters share
        config = LoraConfig(r=4, target_modules=["q_proj"])
        setattr(config, field.name, {"runtime_config": LoraRuntimeConfig(True)}.get(field.name, "something"))
        with pytest.raises(BadAdapter, match=field.name):
            model.multi_lora.acquire_lora("a", config)
    assert model.multi_lora.free == 2


def test_other_refusals(model):
    for config, word in (
        (LoraConfig(r=16), "r=16 is more than max_r=8"),
        (LoraConfig(r=2, rank_pattern={"q_proj": 9}), r"rank_pattern\['q_proj'\]=9"),
        (LoraConfig(r=2, target_modules=["q_proj"], rank_pattern={"q_proj": 0}), "whole number from 1 to 8"),
        (LoraConfig(r=2.0, target_modules=["q_proj"]), "whole number"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "slots hold LoRA"),
        ({"r": 8}, "peft config"),
        (LoraConfig(target_modules=["q_prj"]), "q_prj"),
        (LoraConfig(target_modules=["lm_head"]), "lm_head.*outside the slots"),
        (LoraConfig(target_modules=["embed_tokens"]), "embed_tokens.*linear layers alone; leave it out"),
        (LoraConfig(target_modules=["q_proj"], lora_dropout=1.5), "lora_dropout=1.5"),
        (LoraConfig(target_modules=["q_proj"], lora_dropout=1), "lora_dropout=1 must be at least 0 and below 1"),
        (LoraConfig(target_modules=["q_proj"], lora_dropout=-0.1), "lora_dropout=-0.1"),
        (LoraConfig(target_modules=["q_proj"], lora_dropout=float("nan")), "lora_dropout=nan"),
        (LoraConfig(target_modules=["q_proj"], lora_dropout="0.1"), "lora_dropout='0.1'"),
        (LoraConfig(target_modules=["q_proj"], lora_alpha=float("nan")), "lora_alpha=nan must be a finite number above 0"),
        (LoraConfig(target_modules=["q_proj"], lora_alpha=float("inf")), "lora_alpha=inf"),
        (LoraConfig(target_modules=["q_proj"], lora_alpha=-8), "lora_alpha=-8"),
        (LoraConfig(target_modules=["q_proj"], lora_alpha=0), "lora_alpha=0"),
        (LoraConfig(target_modules=["q_proj"], lora_alpha=True), "lora_alpha=True"),
        (LoraConfig(target_modules=["q_proj"], alpha_pattern={"q_proj": -1}), r"alpha_pattern\['q_proj'\]=-1"),
    ):
        state = torch.get_rng_state()
        with pytest.raises(BadAdapter, match=word):
            model.multi_lora.acquire_lora("a", config)
        assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RankTooLarge):
        model.multi_lora.acquire_lora("a", LoraConfig(r=9, target_modules=["q_proj"]))
    for name in ("", "a b", "a/b", None, 7):
        with pytest.raises(BadAdapter):
            model.multi_lora.acquire_lora(name, CONFIG)
    assert model.multi_lora.free == 2 and list(model.sessions) == [""]


def test_targets_outside_the_slots():
    model = build(target_modules=["q_proj", "v_proj"])
    model.multi_lora.acquire_lora("a", LoraConfig(r=4, target_modules=["v_proj"]))
    assert model.adapters.targets("a") == ["model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj"]
    with pytest.raises(BadAdapter, match=r"k_proj.*outside the slots(.|\n)*slots are beside: q_proj, v_proj"):
        model.multi_lora.acquire_lora("b", LoraConfig(r=4, target_modules=["q_proj", "k_proj"]))


def test_a_config_is_copied(model):
    config = LoraConfig(r=4, target_modules=["q_proj"])
    before = copy.deepcopy(vars(config))
    model.multi_lora.acquire_lora("a", config)
    assert vars(config) == before
    config.r = 7
    assert model.multi_lora.tenants()[0].tenant_config.r == 4


def test_a_slot_gives_back_what_failed_half_way(model, monkeypatch):
    """A device that is full in the middle of filling a slot: the slot is empty again, and others are untouched."""
    model.multi_lora.acquire_lora("a", CONFIG)
    before = weights(model, "a")
    layers = list(model.adapters.layers.values())
    real = type(layers[0]).fill

    def full(self, *args, **kwargs):
        real(self, *args, **kwargs)
        if self is layers[3] or self is layers[-1]:
            raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patched:
        patched.setattr(type(layers[0]), "fill", full)
        with pytest.raises(torch.OutOfMemoryError):
            model.multi_lora.acquire_lora("b", LoraConfig(r=8, target_modules="all-linear"))
    assert model.multi_lora.free == 1 and list(model.sessions) == ["", "a"]
    assert all(list(layer.parts) in ([0], []) and not layer.flat_A[1].any() and not layer.flat_B[1].any() for layer in layers)
    assert all(torch.equal(v, before[k]) for k, v in weights(model, "a").items())
    assert model.multi_lora.acquire_lora("b", CONFIG) == "lora_1"


def test_full_is_told_before_anything_is_tried(model):
    for name in "ab":
        model.multi_lora.acquire_lora(name, CONFIG)
    state = torch.get_rng_state()
    with pytest.raises(SlotsFull):
        model.multi_lora.acquire_lora("c", CONFIG)
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------------------------------------------- other models


def test_layers_that_keep_their_weights_transposed():
    """GPT-2's Conv1D."""
    torch.manual_seed(0)
    module = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2)).eval()
    plain = copy.deepcopy(module)
    store = SlotAdapters(module, max_loras=2, max_r=4)
    config = LoraConfig(r=3, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False)
    torch.manual_seed(1)
    store.acquire("a", config)
    torch.manual_seed(1)
    plain = get_peft_model(plain, config).eval()
    ids = torch.tensor([[1, 2, 3]])
    with store.activate("a"):
        assert torch.equal(module(ids).logits, plain(ids).logits)
    with plain.disable_adapter():
        assert torch.equal(module(ids).logits, plain(ids).logits)


def test_a_head_that_peft_would_train_is_refused():
    """peft trains the classification head of its SEQ_CLS tasks as a whole module; tenants can't."""
    store = SlotAdapters(LlamaForSequenceClassification(tiny_config()), max_loras=1, max_r=4, target_modules=["q_proj"])
    with pytest.raises(BadAdapter, match="modules_to_save"):
        store.acquire("a", LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS"))
    store.acquire("a", LoraConfig(r=4, target_modules=["q_proj"]))


def test_slots_beside_the_output_layer():
    model = build(target_modules=["q_proj", "lm_head"])
    model.multi_lora.acquire_lora("a", LoraConfig(r=4, target_modules=["lm_head"]))
    model.set_optimizer("sgd", lr=0.1, adapter_name="a")
    before = weights(model, "a")
    model.forward_backward(ROWS, adapter_name="a")
    model.clip_grad_and_step(adapter_name="a")
    assert any(not torch.equal(v, before[k]) for k, v in weights(model, "a").items())


def test_narrow_weights_are_narrowed_and_adapters_are_not():
    model = MultiLoraTransformersModel(config=tiny_config(), mixed_precision="bf16", max_loras=2, max_r=4)
    model.multi_lora.acquire_lora("a", LoraConfig(r=4, target_modules="all-linear"))
    model.set_optimizer("sgd", lr=0.1, adapter_name="a")
    model.forward_backward(ROWS, adapter_name="a")
    model.clip_grad_and_step(adapter_name="a")
    assert {p.dtype for p in model.adapters.parameters("a").values()} == {torch.float32}
    assert model.module.model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.bfloat16
    model.multi_lora.acquire_lora("b", LoraConfig(r=4, target_modules="all-linear"))
    assert model.forward_only(ROWS, adapter_name="b").logits.isfinite().all()


def test_a_tenant_begins_the_same_after_the_base_was_narrowed():
    """First weights are drawn in the type that the base is stored in, whatever forwards have made of it since."""
    found = []
    for forwards in (0, 1):
        torch.manual_seed(0)
        model = MultiLoraTransformersModel(config=tiny_config(), mixed_precision="bf16", max_loras=2, max_r=4)
        model.multi_lora.acquire_lora("first", LoraConfig(r=2, target_modules=["q_proj"]))
        for _ in range(forwards):
            model.forward_only(ROWS, adapter_name="first")
        torch.manual_seed(1)
        model.multi_lora.acquire_lora("a", LoraConfig(r=4, target_modules="all-linear"))
        found.append(weights(model, "a"))
    assert all(torch.equal(v, found[1][k]) for k, v in found[0].items())


def test_what_the_table_says(model):
    model.multi_lora.acquire_lora("a", CONFIG)
    table = model.get_train_configs(adapter_name="a")
    assert "lora_0 of 2" in table and "rank" in table
