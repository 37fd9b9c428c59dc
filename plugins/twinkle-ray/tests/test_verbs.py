"""Every verb of a model and of its tenants' manager through a proxy: what it returns is what it returns in one process."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from twinkle_core import registry
from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.errors import NotRemote
from twinkle_core.runtime.dispatch import declared
from twinkle_core.testing.toys import random_rows
from twinkle_multilora.manager import MultiLora
from twinkle_transformers.testing import write_tiny_llama

MODELS = ("transformers", "megatron", "multi_lora_transformers", "multi_lora_megatron")
#: what a model has that no caller of a proxy needs: how a rank answers, and how a subclass is built
INSIDE = {"share", "make_adapters", "make_engine", "engine_cls"}
ROWS, MORE = random_rows([5, 5, 5], vocabulary=250), random_rows([4, 4], vocabulary=250)
TENANTS = {"ann": ROWS, "bob": MORE}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


def multi(tiny, **where):
    model = registry.resolve("model", "multi_lora_transformers")
    return model(model_id=str(tiny), mixed_precision="no", max_loras=3, max_r=4, **where)


@pytest.fixture(scope="module")
def lora(tmp_path_factory, tiny):
    """The folder of an adapter that is not zero."""
    model = multi(tiny)
    model.add_adapter_to_model("a", LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.save("a", tmp_path_factory.mktemp("lora"))


def inside(context):
    with context as given:
        return given


def told(model):
    """What a table says of loss, optimizer and schedule."""
    lines = [line.strip() for line in model.get_train_configs(adapter_name="ann").splitlines()]
    return [line for line in lines if line.startswith(("loss", "optimizer", "scheduler", "metrics", "template"))]


def slots(model):
    return [(slot.index, slot.adapter_name, slot.tenant_adapter_name) for slot in model.multi_lora.tenants()]


#: by name: a call, of a model and of folders; in an order in which each finds what it needs
CALLS = {
    "multi_lora.max_loras": lambda m, f: m.multi_lora.max_loras,
    "multi_lora.max_r": lambda m, f: m.multi_lora.max_r,
    "multi_lora.acquire_lora": lambda m, f: m.multi_lora.acquire_lora("ann", f.lora, gradient_accumulation_steps=1),
    "add_adapter_to_model": lambda m, f: m.add_adapter_to_model("bob", f.lora),
    "multi_lora.free": lambda m, f: m.multi_lora.free,
    "multi_lora.tenants": lambda m, f: slots(m),
    "adapter": lambda m, f: inside(m.adapter("ann")),
    "multi_lora.adapter": lambda m, f: inside(m.multi_lora.adapter("bob")),
    "grouping": lambda m, f: m.grouping(adapter_name="lora_0"),
    "groupings": lambda m, f: m.groupings(["ann", "lora_1", "nobody"]),
    "set_optimizer": lambda m, f: [m.set_optimizer("sgd", lr=0.1, adapter_name=n) for n in TENANTS],
    "set_lr_scheduler": lambda m, f: m.set_lr_scheduler("LinearLR", adapter_name="ann"),
    "set_loss": lambda m, f: m.set_loss("cross_entropy", adapter_name="ann"),
    "set_template": lambda m, f: m.set_template("chat", model_id=str(f.tiny), adapter_name="ann"),
    "set_processor": lambda m, f: m.set_processor("input", adapter_name="ann"),
    "add_metric": lambda m, f: m.add_metric("loss", adapter_name="ann"),
    "get_train_configs": lambda m, f: told(m),
    "forward_only": lambda m, f: m.forward_only(ROWS, adapter_name="ann").logps,
    "forward": lambda m, f: m.forward(ROWS, adapter_name="ann").logits,
    "calculate_loss": lambda m, f: m.calculate_loss(adapter_name="ann"),
    "backward": lambda m, f: m.backward(adapter_name="ann"),
    "clip_grad_norm": lambda m, f: m.clip_grad_norm(0.5, adapter_name="ann"),
    "step": lambda m, f: m.step(adapter_name="ann"),
    "lr_step": lambda m, f: m.lr_step(adapter_name="ann"),
    "zero_grad": lambda m, f: m.zero_grad(adapter_name="ann"),
    "forward_backward": lambda m, f: float(m.forward_backward(ROWS, adapter_name="ann", micro_batch_size=1)),
    "clip_grad_and_step": lambda m, f: m.clip_grad_and_step(0.5, adapter_name="ann"),
    "calculate_metric": lambda m, f: m.calculate_metric(adapter_name="ann"),
    "forward_backward_many": lambda m, f: {n: float(x) for n, x in m.forward_backward_many(TENANTS).items()},
    "flush": lambda m, f: [m.flush(adapter_name=n) for n in TENANTS],
    "generate": lambda m, f: m.generate(
        [{"input_ids": row["input_ids"]} for row in ROWS],
        adapter_name="ann",
        return_rows=True,
        max_new_tokens=2,
        do_sample=False,
    ),
    "get_state_dict": lambda m, f: {k: v.clone() for k, v in m.get_state_dict(adapter_name="ann").items()},
    "save": lambda m, f: os.path.relpath(m.save("ann", f.out, adapter_name="ann", save_optimizer=True), f.out),
    "load": lambda m, f: m.load("ann", f.out, adapter_name="bob"),
    "resume_from_checkpoint": lambda m, f: m.resume_from_checkpoint(f.out / "ann", adapter_name="ann"),
    "remove_adapter": lambda m, f: m.remove_adapter("bob"),
    "multi_lora.release_lora": lambda m, f: m.multi_lora.release_lora("lora_0"),
    "apply_patch": lambda m, f: m.apply_patch("embedding", pooling="mean"),
}


def assert_like(there, here):
    """The same, numbers but for rounding."""
    if isinstance(here, torch.Tensor):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
    elif isinstance(here, dict):
        assert list(there) == list(here)
        for key, value in here.items():
            assert_like(there[key], value)
    elif isinstance(here, list | tuple):
        assert len(there) == len(here)
        for pair in zip(there, here, strict=True):
            assert_like(*pair)
    else:
        assert there == (pytest.approx(here, rel=2e-5) if type(here) is float else here)


@pytest.fixture(scope="module")
def answers(tiny, lora, tmp_path_factory):
    """What each call gives in one process."""
    model, folders = multi(tiny), SimpleNamespace(tiny=tiny, lora=lora, out=tmp_path_factory.mktemp("here"))
    return {name: call(model, folders) for name, call in CALLS.items()}


@pytest.mark.parametrize("group", ["one", "actor"])
def test_every_verb_gives_on_workers_what_it_gives_here(cluster, tiny, lora, answers, group, tmp_path):
    model, folders = multi(tiny, remote_group=group), SimpleNamespace(tiny=tiny, lora=lora, out=tmp_path)
    for name, call in CALLS.items():
        found = call(model, folders)
        try:
            assert_like(found, answers[name])
        except AssertionError as error:
            error.add_note(f"in {name}")
            raise
    assert {name for name, given in answers.items() if given is None} == {
        *("add_adapter_to_model", "set_lr_scheduler", "set_loss", "set_template", "set_processor", "add_metric"),
        *("backward", "remove_adapter", "multi_lora.release_lora", "apply_patch"),
    }


def test_the_calls_above_are_all_that_are_declared():
    """A verb that is added has to say what it gives on workers."""
    model = registry.resolve("model", "multi_lora_transformers")
    assert set(CALLS) == set(declared(model)) | {f"multi_lora.{name}" for name in declared(MultiLora)}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_has_in_public_is_declared(name):
    """One that is not would be missing where the model lives on workers."""
    model = registry.resolve("model", name)
    public = {each for each in dir(model) if not each.startswith("_") and callable(getattr(model, each))}
    assert public - set(declared(model)) <= INSIDE
    assert issubclass(model, TwinkleModel) and model.__remote__.execute == "all"


def test_what_is_set_on_a_proxy_would_reach_nobody(cluster, tiny):
    model = multi(tiny, remote_group="one")
    for target in (model, model.multi_lora):
        with pytest.raises(NotRemote, match="'budget' is not declared"):
            target.budget = 3
    with pytest.raises(NotRemote, match="'scheduler' is not declared"):
        model.scheduler.budget = 3
