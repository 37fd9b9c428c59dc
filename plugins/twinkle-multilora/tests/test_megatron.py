"""Tenants of one Megatron model, in one process: who may come, what a release leaves, what a failure costs, what is saved."""

from __future__ import annotations

import copy
import errno
import gc
import json
import threading
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from twinkle_core import registry
from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.errors import (
    BadAdapter,
    BadArgument,
    BadInputs,
    BadRow,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointNotWritten,
    DuplicateAdapter,
    LabelsMissing,
    NonFiniteGradients,
    NoTrainableParameters,
    OnlyOwn,
    RankTooLarge,
    SlotsFull,
    UnknownAdapter,
    WrongArgument,
)
from twinkle_core.mesh import DeviceMesh
from twinkle_megatron.model import MegatronModel
from twinkle_megatron.testing import write_tiny
from twinkle_multilora.megatron import MultiLoraMegatronModel
from twinkle_multilora.megatron_testing import TENANTS, built, join, order, prepared, rows_of, same, state, turn
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_multilora.pool import LoraTenant

CONFIG = LoraConfig(r=4, lora_alpha=8, target_modules=["o_proj", "down_proj"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("llama"), num_hidden_layers=2))


@pytest.fixture(scope="module")
def shared(llama):
    """For tests that change nothing for good."""
    return built(llama, max_loras=2)


@pytest.fixture
def model(shared):
    yield shared
    for name in shared.adapters.names():
        shared.remove_adapter(name)


def logits(model, name=""):
    return model.forward_only(rows_of("ada", 0), adapter_name=name).logits


def lora_state(model):
    """All that is in the slots, held or free."""
    chunk = model.engine.chunks[0]
    return {key: p.detach().clone() for key, p in chunk.named_parameters() if ".lora_" in key}


# ---------------------------------------------------------------------------------------------------- coming and going


def test_it_is_a_megatron_model_found_by_its_names():
    from twinkle.model import MultiLoraMegatronModel as ByTheFacade

    for name in ("multi_lora_megatron", "MultiLoraMegatronModel", "multilora-megatron"):
        assert registry.resolve("model", name) is MultiLoraMegatronModel is ByTheFacade
    assert issubclass(MultiLoraMegatronModel, MegatronModel)
    assert not {name for name in vars(TwinkleModel) if not name.startswith("_")} & vars(MultiLoraMegatronModel).keys()


def test_tenants_and_slots(model):
    before = [p.shape for p in model.engine.chunks[0].parameters() if p.dim() == 2 and 8 in p.shape]
    assert len(before) == 2 * 2 * 4 * 2, "room for two slots of rank 8 beside four layers of each of two blocks"
    assert (model.multi_lora.max_loras, model.multi_lora.max_r, model.multi_lora.free) == (2, 8, 2)
    base = logits(model)
    assert model.multi_lora.acquire_lora("a", CONFIG) == "lora_0"
    model.add_adapter_to_model("b", LoraConfig(r=2))
    assert model.multi_lora.free == 0
    one, two = model.multi_lora.tenants()
    assert isinstance(one, LoraTenant) and (one.index, one.adapter_name, one.tenant_adapter_name) == (0, "lora_0", "a")
    assert (one.config.r, one.tenant_config.r, one.tenant_config.lora_alpha) == (8, 4, 8)
    assert sorted(one.tenant_config.target_modules) == ["down_proj", "o_proj"]
    assert (two.tenant_adapter_name, two.tenant_config.r) == ("b", 2)
    assert torch.equal(logits(model, "b"), base), "a new adapter changes nothing"
    ranks = {min(p.shape) for p in model.adapters.parameters("b").values()}
    assert ranks == {2}, "parameters have the tenant's own rank"
    model.set_optimizer("default", lr=1e-2, adapter_name="lora_1")
    assert model.sessions["b"].optimizer is not None, "verbs take the slot's name"
    assert "lora_1 of 2" in model.get_train_configs(adapter_name="b")
    assert "take turns" in model.get_train_configs(adapter_name="b")
    with model.multi_lora.adapter("a") as slot:
        assert slot == "lora_0" and model._session(None).name == "a"
    model.multi_lora.release_lora("lora_0")
    model.remove_adapter("b")
    assert [p.shape for p in model.engine.chunks[0].parameters() if p.dim() == 2 and 8 in p.shape] == before
    assert torch.equal(logits(model), base)


@pytest.mark.parametrize(
    ("name", "config", "error", "words"),
    [
        ("a", CONFIG, DuplicateAdapter, "adapter 'a' is there already"),
        ("lora_7", CONFIG, BadAdapter, "what slots are called"),
        ("", CONFIG, BadAdapter, "at least one character"),
        ("x", LoraConfig(r=9), RankTooLarge, r"r=9 is more than max_r=8(.|\n)*max_r=9"),
        ("x", LoraConfig(r=0), BadAdapter, "r=0 must be a whole number from 1 to 8"),
        ("x", LoraConfig(r=2, lora_dropout=1.5), BadAdapter, r"lora_dropout=1.5"),
        ("x", LoraConfig(r=2, use_dora=True), BadAdapter, "use_dora=True"),
        ("x", LoraConfig(r=2, modules_to_save=["lm_head"]), BadAdapter, "modules_to_save="),
        ("x", LoraConfig(r=2, bias="lora_only"), BadAdapter, "bias='lora_only'"),
        ("x", LoraConfig(r=2, rank_pattern={"o_proj": 4}), BadAdapter, "rank_pattern="),
        ("x", LoraConfig(r=2, target_modules=["q_proj"]), BadAdapter, "k_proj, v_proj are one layer"),
        ("x", LoraConfig(r=2, target_modules=["o_prj"]), BadAdapter, "target 'o_prj' is not known"),
        ("x", "/nowhere/adapter", Exception, "/nowhere/adapter"),
        ("x", {"r": 2}, BadAdapter, "dict is no LoraConfig"),
    ],
)
def test_who_may_not_come_changes_nothing(model, name, config, error, words):
    model.multi_lora.acquire_lora("a", CONFIG)
    before, random, given = lora_state(model), torch.get_rng_state(), copy.deepcopy(config)
    with pytest.raises(error, match=words):
        model.multi_lora.acquire_lora(name, config)
    after = lora_state(model)
    assert before.keys() == after.keys() and all(torch.equal(v, after[k]) for k, v in before.items())
    assert model.multi_lora.free == 1 and list(model.sessions) == ["", "a"]
    assert torch.equal(torch.get_rng_state(), random)
    assert not isinstance(config, LoraConfig) or vars(config) == vars(given)


def test_a_full_pool_and_unknown_names(model):
    for name in "ab":
        model.multi_lora.acquire_lora(name, CONFIG)
    random = torch.get_rng_state()
    with pytest.raises(SlotsFull, match=r"pool of 2 is full\. It holds a, b") as full:
        model.multi_lora.acquire_lora("c", CONFIG)
    assert isinstance(full.value, RuntimeError) and torch.equal(torch.get_rng_state(), random)
    with pytest.raises(UnknownAdapter, match="unknown adapter 'alic'"):
        model.multi_lora.release_lora("alic")
    with pytest.raises(UnknownAdapter, match="unknown adapter 'c'"):
        model.forward_backward(rows_of("ada", 0), adapter_name="c")
    with pytest.raises(OnlyOwn, match="MultiLoraMegatronModel"):
        model.set_optimizer("adamw", adapter_name="a")
    with pytest.raises(NoTrainableParameters):
        model.set_optimizer("default", adapter_name="")
    with pytest.raises(BadRow, match=r"has 65 tokens; this model takes at most 64 \(max_length\)"):
        model.forward_only([{"input_ids": [1] * 65}], adapter_name="a")
    model.multi_lora.release_lora("a")
    with pytest.raises(UnknownAdapter):
        model.multi_lora.adapter("lora_0").__enter__()
    assert model.multi_lora.acquire_lora("c", CONFIG) == "lora_0"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_loras": 0}, BadArgument, "max_loras"),
        ({"max_r": 2.5}, BadArgument, r"max_r.*2\.5"),
        ({"max_length": -1}, BadArgument, "max_length"),
        ({"max_lora": 3}, WrongArgument, "max_loras"),
        ({"on_nonfinit": "skip"}, WrongArgument, "on_nonfinite"),
        ({"target_modules": ["q_proj"]}, BadAdapter, "k_proj, v_proj are one layer"),
        ({"target_modules": ["lm_head"]}, BadAdapter, "target 'lm_head' is not known"),
    ],
)
def test_a_model_that_cannot_be(llama, options, error, words):
    with pytest.raises(error, match=words):
        built(llama, **options)


def test_a_family_without_adapters_has_no_slots(tmp_path):
    with pytest.raises(BadAdapter, match="deepseek_v3"):
        built(str(write_tiny(tmp_path, "deepseek_v3", num_hidden_layers=2)))


def test_a_family_that_has_gate_and_up_in_one(tmp_path):
    """Slots, tenants' targets and files have its own names."""
    model = built(str(write_tiny(tmp_path / "model", "glm4", num_hidden_layers=2)), max_loras=2)
    for name, targets in (("a", ["gate_up_proj"]), ("b", "all-linear")):
        model.multi_lora.acquire_lora(name, LoraConfig(r=4, target_modules=targets))
        model.set_optimizer("default", lr=1e-2, adapter_name=name)
    assert model.multi_lora.tenants()[0].tenant_config.target_modules == ["gate_up_proj"]
    for step in range(2):
        for name in "ab":
            model.forward_backward(rows_of("ada", step), adapter_name=name)
            assert model.clip_grad_and_step(adapter_name=name) > 0
    found = {name: logits(model, name) for name in "ab"}
    assert not torch.allclose(found["a"], logits(model, "b"), atol=1e-4)
    for name in "ab":
        folder = model.save(name, tmp_path, adapter_name=name)
        model.multi_lora.release_lora(name)
        model.multi_lora.acquire_lora(name, folder)
        assert torch.equal(logits(model, name), found[name])


def test_targets_outside_of_the_slots(llama):
    model = built(llama, target_modules=["o_proj", "q_proj", "k_proj", "v_proj"])
    assert model.multi_lora.acquire_lora("a", LoraConfig(r=2, target_modules=["o_proj"])) == "lora_0"
    with pytest.raises(BadAdapter, match=r"mean down_proj(.|\n)*outside the slots(.|\n)*slots are beside:.*o_proj"):
        model.multi_lora.acquire_lora("b", CONFIG)


def test_a_slot_gives_back_what_failed_half_way(model, monkeypatch):
    """Memory that ends in the middle: the slot is room again, others are untouched, and the next tenant gets it."""
    model.multi_lora.acquire_lora("a", CONFIG)
    before, base = lora_state(model), logits(model)
    layer = model.adapters._layers()[3]
    real = type(layer).update_layer

    def full(self, name, r, **kwargs):
        if self is layer and r == 3:
            raise torch.OutOfMemoryError("full")
        real(self, name, r, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(type(layer), "update_layer", full)
        with pytest.raises(torch.OutOfMemoryError):
            model.multi_lora.acquire_lora("b", LoraConfig(r=3))
    after = lora_state(model)
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
    assert all(torch.equal(v, after[k]) for k, v in before.items() if ".lora_0." in k)
    assert model.multi_lora.free == 1 and list(model.sessions) == ["", "a"]
    assert model.multi_lora.acquire_lora("b", LoraConfig(r=3)) == "lora_1"
    assert torch.equal(logits(model, "b"), base)


@pytest.mark.slow
def test_one_slot_alone_and_more_than_ten(llama):
    """The last tenant of all leaves the model as it was; slots whose names begin alike are told apart."""
    one = built(llama, max_loras=1)
    base = logits(one)
    for _ in range(2):
        join(one, "ada")
        first = [turn(one, "ada", step) for step in range(4)]
        one.multi_lora.release_lora("ada")
        assert torch.equal(logits(one), base)
    many = built(llama, max_loras=12, max_r=4)
    for i in range(12):
        many.multi_lora.acquire_lora(f"t{i}", LoraConfig(r=1 + i % 4))
    many.multi_lora.release_lora("t1")
    join(many, "ada")
    assert many.multi_lora.tenants()[1].tenant_adapter_name == "ada"
    assert [turn(many, "ada", step) for step in range(4)] == first
    assert len(many.get_state_dict(adapter_name="ada")) == 2 * 2 * 7
    assert {min(v.shape) for v in many.get_state_dict(adapter_name="t11").values()} == {4}


# ---------------------------------------------------------------------------------------------------- apart


def test_tenants_in_turns_are_plain_adapters_of_megatron_models(llama):
    """Bit for bit, those without dropout (which a plain adapter draws from the process's numbers); the base is untouched."""
    model = built(llama)
    base = {key: tensor.clone() for key, tensor in model.get_state_dict(adapter_name="").items()}
    for name in TENANTS:
        join(model, name)
    found = {name: [] for name in TENANTS}
    for step in range(6):
        for name in order(step):
            found[name].append(turn(model, name, step))
    left = model.get_state_dict(adapter_name="")
    assert base.keys() == left.keys() and all(torch.equal(v, left[k]) for k, v in base.items())
    for name in ("ada", "bob", "dan"):
        plain = MegatronModel(llama, device_mesh=DeviceMesh.from_sizes(device_type="cpu"), mixed_precision="no")
        join(plain, name)
        assert [turn(plain, name, step) for step in range(6)] == found[name]
        assert same(state(model, name), state(plain, name))
        assert float(next(v for k, v in model.get_state_dict(adapter_name=name).items() if "lora_B" in k).abs().max()) > 0


@pytest.mark.slow
def test_half_precision(llama):
    """bf16: the optimizer's fp32 copies are each tenant's own, and follow when weights are set from outside."""
    model, alone = (built(llama, mixed_precision="bf16") for _ in range(2))
    for name in ("ada", "eve"):
        join(model, name)
    for step in range(4):
        for name in ("eve", "ada"):
            turn(model, name, step)
    join(alone, "ada")
    for step in range(4):
        turn(alone, "ada", step)
    assert same(state(model, "ada"), state(alone, "ada"))
    other = {k: torch.zeros_like(v) for k, v in model.get_state_dict(adapter_name="ada").items()}
    model.adapters.load_state_dict("ada", other)
    turn(model, "ada", 0)
    turn(model, "ada", 1)
    moved = max(float(v.float().abs().max()) for v in model.get_state_dict(adapter_name="ada").values())
    assert moved < 0.05, "it went on from the weights before"


@pytest.mark.slow
def test_split_verbs_that_overlap(llama):
    """forward of all, then backward of all, with another tenant's update in between."""
    whole, split = built(llama, max_loras=2), built(llama, max_loras=2)
    for model in (whole, split):
        for name in ("ada", "bob"):
            join(model, name)
    for step in range(4):
        for name in ("ada", "bob"):
            whole.forward_backward(rows_of(name, step), adapter_name=name)
            split.forward(rows_of(name, step), adapter_name=name, return_logits=False)
        for name in ("bob", "ada"):
            split.backward(adapter_name=name)
            assert split.clip_grad_and_step(0.5, adapter_name=name) == whole.clip_grad_and_step(0.5, adapter_name=name)
    for name in ("ada", "bob"):
        a, b = (m.get_state_dict(adapter_name=name) for m in (whole, split))
        assert all(torch.equal(v, b[k]) for k, v in a.items())


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"granularity": "full", "method": "uniform", "num_layers": 1}, {"granularity": "selective"}])
def test_activations_are_computed_anew_with_the_same_adapter_and_dropout(llama, how):
    """Also where another tenant has run in between."""
    kept, anew = built(llama, max_loras=2), built(llama, max_loras=2, **{f"recompute_{key}": v for key, v in how.items()})
    norms = []
    for model in (kept, anew):
        for name in ("cyd", "eve"):
            join(model, name)
        for step in range(3):
            for name in ("cyd", "eve"):
                model.forward(rows_of(name, step), adapter_name=name, return_logits=False)
            for name in ("eve", "cyd"):
                model.backward(adapter_name=name)
                norms.append(model.clip_grad_and_step(0.5, adapter_name=name))
    assert norms[:6] == norms[6:] and all(norms)


def test_a_reused_slot_starts_clean(llama):
    """After a release nothing of the tenant is left: not in memory, and not in what the next one trains."""
    model, fresh = built(llama, max_loras=2), built(llama, max_loras=2)
    for one in (model, fresh):
        join(one, "bob")
    join(model, "dan")
    turn(model, "dan", 0)  # an open window, with gradients, a metric and a count
    for step in range(1, 4):
        turn(model, "dan", step)
    session = model.sessions["dan"]
    held = [weakref.ref(p) for p in session.named.values()]
    held += [weakref.ref(session.optimizer), *(weakref.ref(ddp) for ddp in session.optimizer.ddps)]
    del session
    model.multi_lora.release_lora("lora_1")
    gc.collect()
    assert not [ref for ref in held if ref() is not None], "the tenant's weights or buffers are still held"
    assert all(float(v.abs().max()) == 0 for k, v in lora_state(model).items() if ".lora_B.lora_1." in k)
    for one in (model, fresh):
        join(one, "ada")
    for step in range(5):
        assert turn(model, "ada", step) == turn(fresh, "ada", step)
        assert turn(model, "bob", step) == turn(fresh, "bob", step)
    assert same(state(model, "ada"), state(fresh, "ada")) and same(state(model, "bob"), state(fresh, "bob"))
    assert model.calculate_metric(adapter_name="ada") == fresh.calculate_metric(adapter_name="ada")


def test_dropout_is_a_tenants_own(llama):
    """Masks differ between passes and tenants, an evaluation draws none, and the process's numbers are not moved."""
    model = built(llama, max_loras=2)
    for name in ("cyd", "eve"):
        join(model, name)
        for key, p in model.adapters.parameters(name).items():
            if "lora_B" in key:
                p.data.fill_(0.05)
    random, rows = torch.get_rng_state(), rows_of("cyd", 0)
    seen = [model.forward(rows, adapter_name=name).logits.detach() for name in ("cyd", "cyd", "eve", "eve")]
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[2], seen[3])
    assert torch.equal(*(model.forward_only(rows, adapter_name="cyd").logits for _ in range(2)))
    assert torch.equal(torch.get_rng_state(), random)
    passes = model.adapters.training_state("cyd")["passes"]
    model.set_loss(lambda inputs, outputs: 1 / 0, adapter_name="cyd")
    with pytest.raises(ZeroDivisionError):
        model.forward_backward(rows, adapter_name="cyd")
    assert model.adapters.training_state("cyd")["passes"] == passes, "a pass that failed is none"


# ---------------------------------------------------------------------------------------------------- failures


def _nan(model):
    model.set_loss(lambda inputs, outputs: outputs.logits.sum() * float("nan"), adapter_name="bob")
    model.forward_backward(rows_of("bob", 0), adapter_name="bob")
    with pytest.raises(NonFiniteGradients):
        model.clip_grad_and_step(adapter_name="bob")


def _raises(model):
    model.set_loss(lambda inputs, outputs: 1 / 0, adapter_name="bob")
    with pytest.raises(ZeroDivisionError):
        model.forward_backward(rows_of("bob", 0), adapter_name="bob")


class _Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, g):
        raise ZeroDivisionError


def _backward_raises(model):
    model.set_loss(lambda inputs, outputs: _Bad.apply(outputs.logits), adapter_name="bob")
    with pytest.raises(ZeroDivisionError):
        model.forward_backward(rows_of("bob", 0), adapter_name="bob")


def _diverges(model):
    for p in model.adapters.parameters("bob").values():
        p.data.fill_(float("inf"))
    model.forward_only(rows_of("bob", 0), adapter_name="bob")


def _out_of_vocabulary(model):
    with pytest.raises(BadInputs, match="250"):
        model.forward_backward([{"input_ids": [250], "labels": [1]}], adapter_name="bob")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [_nan, _raises, _backward_raises, _diverges, _out_of_vocabulary])
def test_a_failure_is_nobody_elses(fault, llama):
    model, plain = built(llama, max_loras=3), built(llama, max_loras=3)
    for name in ("ada", "bob", "cyd"):
        join(model, name)
    for name in ("ada", "cyd"):
        join(plain, name)
    for step in range(4):
        assert turn(model, "ada", step) == turn(plain, "ada", step)
        fault(model)
        model.set_loss("cross_entropy", adapter_name="bob")
        assert turn(model, "cyd", step) == turn(plain, "cyd", step)
    for name in ("ada", "cyd"):
        assert same(state(model, name), state(plain, name))


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["twinkle_megatron.files.save_file", "pathlib.Path.write_text"])
def test_a_full_disk_leaves_all_tenants(failing, llama, tmp_path, monkeypatch):
    """Nothing half-written, the older checkpoint whole, and training as if nobody had saved."""
    model, plain = built(llama, max_loras=2), built(llama, max_loras=2)
    for one in (model, plain):
        for name in ("bob", "eve"):
            join(one, name)
            turn(one, name, 0)
    model.save("one", tmp_path, adapter_name="bob", save_optimizer=True)
    files = sorted(p for p in (tmp_path / "one").rglob("*") if p.is_file())
    older = [p.read_bytes() for p in files]
    for one in (model, plain):
        turn(one, "bob", 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(failing, full)
        with pytest.raises(CheckpointNotWritten, match="No space left"):
            model.save("one", tmp_path, adapter_name="bob", save_optimizer=True)
    assert sorted(p for p in (tmp_path / "one").rglob("*") if p.is_file()) == files
    assert [p.read_bytes() for p in files] == older and [p.name for p in tmp_path.iterdir()] == ["one"]
    for name in ("bob", "eve"):
        assert turn(model, name, 2) == turn(plain, name, 2)
        assert same(state(model, name), state(plain, name))


# ---------------------------------------------------------------------------------------------------- many, threads


@pytest.mark.slow
def test_many_in_one_call_take_turns(llama):
    model, plain = built(llama), built(llama)
    for one in (model, plain):
        for name in TENANTS:
            join(one, name)
    for step in range(4):
        found = model.forward_backward_many({name: rows_of(name, step) for name in TENANTS})
        for name in reversed(TENANTS):
            expected = plain.forward_backward(rows_of(name, step), adapter_name=name)
            assert torch.equal(found[name], expected)
            assert model.clip_grad_and_step(adapter_name=name) == plain.clip_grad_and_step(adapter_name=name)
    model.set_loss(lambda inputs, outputs: 1 / 0, adapter_name="ada")
    windows = {name: model.sessions[name].window.count for name in TENANTS}
    with pytest.raises(LabelsMissing):
        model.forward_backward_many({"eve": rows_of("eve", 0), "bob": [{"input_ids": [1, 2]}]})
    assert windows == {name: model.sessions[name].window.count for name in TENANTS}, "nobody's has begun"
    with pytest.raises(ZeroDivisionError):
        model.forward_backward_many({name: rows_of(name, 4) for name in ("ada", "bob")})
    plain.forward_backward(rows_of("bob", 4), adapter_name="bob")
    assert model.clip_grad_and_step(adapter_name="bob") == plain.clip_grad_and_step(adapter_name="bob") is not None


@pytest.mark.slow
def test_threads_take_turns(llama):
    model, found = built(llama), {}
    for name in TENANTS:
        join(model, name)

    def train(name):
        with model.multi_lora.adapter(name):
            for step in range(4):
                model.forward_backward(rows_of(name, step), micro_batch_size=2)
                found.setdefault(name, []).append(model.clip_grad_and_step(0.5))

    threads = [threading.Thread(target=train, args=(name,)) for name in TENANTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for name in TENANTS:
        plain = built(llama, max_loras=1)
        join(plain, name)
        assert found[name] == [turn(plain, name, step)[1] or None for step in range(4)], name
        assert same(state(model, name), state(plain, name))


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.slow
def test_a_checkpoint_is_that_of_a_plain_adapter(llama, tmp_path):
    """PEFT and MegatronModel read it; with its own rank and alpha, and no word of slots or tenants."""
    model = built(llama)
    for name in TENANTS:
        join(model, name)
        for step in range(3):
            turn(model, name, step)
    for name, tenant in TENANTS.items():
        folder = Path(model.save(name[::-1], tmp_path, adapter_name=name, save_optimizer=True))
        config = LoraConfig.from_pretrained(folder)
        assert (config.r, config.lora_alpha, config.use_rslora, config.lora_dropout) == (
            *(tenant.config.r, tenant.config.lora_alpha, tenant.config.use_rslora, tenant.config.lora_dropout),
        )
        keys = list(load_file(folder / "adapter_model.safetensors"))
        text = json.dumps([*keys, json.loads((folder / "adapter_config.json").read_text())])
        assert not [word for word in (name, "lora_0", "lora_4", "base_layer") if word in text]
        fresh = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
        plain = PeftModel.from_pretrained(fresh, folder).eval()
        found = model.forward_only(rows_of(name, 0), adapter_name=name).logits
        for row, own in zip(rows_of(name, 0), found, strict=True):
            expected = plain(torch.tensor([row["input_ids"]])).logits[0]
            torch.testing.assert_close(own[: len(expected)], expected, rtol=0, atol=1e-5)
    plain = MegatronModel(llama, device_mesh=DeviceMesh.from_sizes(device_type="cpu"), mixed_precision="no")
    plain.add_adapter_to_model("x", str(tmp_path / "ada"[::-1]), gradient_accumulation_steps=2)
    assert torch.equal(logits(plain, "x"), logits(model, "ada"))


def test_a_tenant_goes_on_in_another_slot(llama, tmp_path):
    """Bit for bit, in the middle of a window and with dropout; and nobody else feels that it was loaded."""
    model, plain = built(llama, max_loras=3), built(llama, max_loras=3)
    for one in (model, plain):
        for name in ("cyd", "dan", "bob"):
            join(one, name)
        for step in range(4):
            for name in ("cyd", "dan", "bob"):
                turn(one, name, step)
    assert model.sessions["dan"].window.count == 1
    for name in ("cyd", "dan"):
        model.save(name, tmp_path, adapter_name=name, save_optimizer=True)
        model.multi_lora.release_lora(name)
    for name in ("dan", "cyd"):
        join(model, name, str(tmp_path / name))
    for name in ("dan", "cyd"):
        turn(model, name, 0)
        assert model.resume_from_checkpoint(tmp_path / name, adapter_name=name)["cur_step"] == plain.sessions[name].cur_step
    assert [slot.tenant_adapter_name for slot in model.multi_lora.tenants()] == ["dan", "cyd", "bob"]
    for step in range(4, 8):
        for name in ("cyd", "dan", "bob"):
            assert turn(model, name, step) == turn(plain, name, step), name


def test_a_checkpoint_that_does_not_fit_changes_nothing(llama, tmp_path):
    model = built(llama, max_loras=2)
    for name in ("ada", "bob"):
        join(model, name)
        turn(model, name, 0)
        model.save(name, tmp_path, adapter_name=name, save_optimizer=True)
    before = state(model, "ada")
    for folder, error in (("bob", CheckpointMismatch), ("nobody", CheckpointNotFound)):
        with pytest.raises(error):
            model.resume_from_checkpoint(tmp_path / folder, adapter_name="ada")
        with pytest.raises(error):
            model.load(folder, tmp_path, adapter_name="ada")
    assert same(state(model, "ada"), before)
    small = built(llama, max_r=2)
    with pytest.raises(RankTooLarge, match="r=4 is more than max_r=2"):
        small.multi_lora.acquire_lora("ada", str(tmp_path / "ada"))
    assert small.multi_lora.free == 5


# ---------------------------------------------------------------------------------------------------- another backend


@pytest.mark.slow
def test_tenants_train_as_those_of_multi_lora_transformers_model(llama, tmp_path):
    """Ten updates of two tenants beside layers that are one in both backends, from the same weights: to 1e-4."""
    model = built(llama, max_loras=2)
    other = MultiLoraTransformersModel(model_id=llama, mixed_precision="no", max_loras=2, max_r=8)
    configs = {"one": CONFIG, "two": LoraConfig(r=8, lora_alpha=4, use_rslora=True, target_modules=["down_proj"])}
    kwargs = {"lr": 1e-2, "weight_decay": 0.05}
    for name, config in configs.items():
        model.multi_lora.acquire_lora(name, config)
        other.multi_lora.acquire_lora(name, model.save(name, tmp_path, adapter_name=name))
        model.set_optimizer("default", adapter_name=name, **kwargs)
        other.set_optimizer("adamw", adapter_name=name, **kwargs)
    for step in range(10):
        for name, whose in (("one", "ada"), ("two", "eve")):
            rows = rows_of(whose, step)
            found = [float(m.forward_backward(rows, adapter_name=name)) for m in (model, other)]
            assert found[0] == pytest.approx(found[1], rel=1e-4)
            norms = [m.clip_grad_and_step(0.5, adapter_name=name) for m in (model, other)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for name in configs:
        a, b = (m.get_state_dict(adapter_name=name) for m in (model, other))
        assert a.keys() == b.keys()
        for key, tensor in a.items():
            torch.testing.assert_close(tensor, b[key], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_tenant_trains_as_plain_peft_whose_parts_share_one_a(llama, tmp_path):
    """All linear layers: Megatron has one lora_A for q, k and v, and one for gate and up; torch's AdamW, plain autograd."""
    model = built(llama, max_loras=2)
    for name in ("bob", "one"):
        model.multi_lora.acquire_lora(name, LoraConfig(r=4, lora_alpha=8))
        model.set_optimizer("default", lr=1e-2, weight_decay=0.05, adapter_name=name)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    plain = PeftModel.from_pretrained(fresh, model.save("one", tmp_path, adapter_name="one"), is_trainable=True)
    for layer in plain.base_model.model.model.layers:
        for first, *rest in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            home = layer.self_attn if first == "q_proj" else layer.mlp
            for part in rest:
                getattr(home, part).lora_A["default"].weight = getattr(home, first).lora_A["default"].weight
    parameters = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05)
    for step in range(10):
        turn_of_bob = model.forward_backward(rows_of("bob", step), adapter_name="bob")
        assert float(turn_of_bob) > 0 and model.clip_grad_and_step(adapter_name="bob") is not None
        rows, total, count = rows_of("ada", step), 0.0, 0
        for row in rows:
            labels = torch.tensor(row["labels"])
            loss = torch.nn.functional.cross_entropy(plain(torch.tensor([row["input_ids"]])).logits[0], labels, reduction="sum")
            total, count = total + loss, count + int((labels != -100).sum())
        optimizer.zero_grad()
        (total / count).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, 0.5))
        optimizer.step()
        assert float(model.forward_backward(rows, adapter_name="one")) == pytest.approx(float(total / count), rel=1e-4)
        assert model.clip_grad_and_step(0.5, adapter_name="one") == pytest.approx(norm, rel=1e-4)
    tuned = model.forward_only(rows_of("ada", 0), adapter_name="one").logits
    for row, own in zip(rows_of("ada", 0), tuned, strict=True):
        expected = plain(torch.tensor([row["input_ids"]])).logits[0]
        torch.testing.assert_close(own[: len(expected)], expected, rtol=0, atol=1e-3)


def test_prepared_is_what_join_does(llama):
    """The helper that tests stand on sets what it says."""
    model = built(llama, max_loras=1)
    model.multi_lora.acquire_lora("ada", TENANTS["ada"].config)
    prepared(model, "ada")
    assert model.sessions["ada"].optimizer.param_groups[0]["weight_decay"] == 0.1
