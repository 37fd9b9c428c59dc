"""Tenants call from threads of their own: nobody's call meets another's, and nothing is lost."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig

from twinkle_core.errors import DuplicateAdapter, SlotsFull, UnknownAdapter
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_transformers.testing import ToyL, ToyLConfig, tiny_config

CONFIG = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.1)


def build(**options):
    torch.manual_seed(0)
    return MultiLoraTransformersModel(config=tiny_config(), mixed_precision="no", **{"max_loras": 4, "max_r": 4, **options})


def join(model, name):
    with model.turns:
        torch.manual_seed(ord(name))
        model.add_adapter_to_model(name, CONFIG)
        model.set_optimizer("adamw", lr=1e-2, adapter_name=name)


def rows_of(name, i):
    start = 3 + (ord(name) * 7 + i * 13) % 200
    return [{"input_ids": [*range(start, start + 5)], "labels": [*range(start + 1, start + 6)]}]


def work(model, name, found):
    """Some steps of a tenant, whole and split, that name it by argument and by context."""
    for i in range(6):
        if i % 2:
            with model.multi_lora.adapter(name):
                model.forward(rows_of(name, i), return_logits=False)
                found.append(model.calculate_loss())
                model.backward()
                found.append(model.clip_grad_and_step())
        else:
            found.append(float(model.forward_backward(rows_of(name, i), adapter_name=name)))
            found.append(model.clip_grad_and_step(adapter_name=name))


def test_two_at_once_never_mix():
    """Losses, norms and weights of four threads are those of each tenant alone, to the bit."""
    shared = build()
    for name in "abcd":
        join(shared, name)
    found = {name: [] for name in "abcd"}
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, shared, name, found[name]) for name in "abcd"]:
            done.result(timeout=120)
    for name in "abcd":
        alone, expected = build(), []
        join(alone, name)
        work(alone, name, expected)
        assert found[name] == expected, name
        state = alone.get_state_dict(adapter_name=name)
        assert all(torch.equal(v, state[k]) for k, v in shared.get_state_dict(adapter_name=name).items())


def test_a_context_belongs_to_its_thread():
    model = build()
    for name in "ab":
        join(model, name)
    inside, seen = threading.Barrier(2, timeout=60), {}

    def enter(name):
        with model.multi_lora.adapter(name) as slot:
            inside.wait()
            seen[name] = (slot, model._session(None).name)
            inside.wait()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(enter, name) for name in "ab"]:
            done.result(timeout=60)
    assert seen == {"a": ("lora_0", "a"), "b": ("lora_1", "b")}


def test_one_slot_and_many_who_want_it():
    """Exactly one gets it; the others are told that it is taken."""
    model = build(max_loras=1)
    start, got = threading.Barrier(6, timeout=60), []

    def ask(i):
        start.wait()
        try:
            got.append(model.multi_lora.acquire_lora(f"t{i}", CONFIG))
        except SlotsFull:
            got.append(None)

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(ask, i) for i in range(6)]:
            done.result(timeout=120)
    assert sorted(map(str, got)) == ["None"] * 5 + ["lora_0"]
    assert len(model.sessions) == 2 and model.multi_lora.free == 0


def squared(inputs, outputs):
    return (outputs.logits.squeeze(-1) - inputs["labels"]).pow(2).mean()


class Mirror:
    """A tenant of ToyL in plain floats: B of rank 1 with A = 1, trained by SGD."""

    def __init__(self, target):
        self.target, self.b, self.saved = target, 0.0, None

    def step(self):
        self.b -= 0.1 * 2 * (2 + self.b - self.target)


class Crowd:
    """Fifty tenants who come and go over five slots; each is worked on by one thread at a time."""

    def __init__(self, folder):
        self.model = MultiLoraTransformersModel(ToyL, config=ToyLConfig(2.0), mixed_precision="no", max_loras=5, max_r=2)
        self.model.set_loss(squared, adapter_name="")
        self.folder, self.done = folder, {}
        self.locks = {f"t{i}": threading.Lock() for i in range(50)}
        self.live: dict[str, Mirror] = {}
        self.saved: dict[str, float] = {}

    def count(self, what):
        self.done[what] = self.done.get(what, 0) + 1

    def one(self, draw):
        """One random operation of one random tenant; half of the draws are for tenants that are there."""
        there = list(self.live)
        name = draw.choice(there) if there and draw.random() < 0.7 else draw.choice(list(self.locks))
        with self.locks[name]:
            mirror = self.live.get(name)
            if mirror is None:
                self.come(name, draw)
            else:
                draw.choice([self.train, self.train, self.train, self.look, self.fail, self.save, self.again, self.go])(
                    name, mirror, draw
                )

    def come(self, name, draw):
        saved = self.saved.get(name) if draw.random() < 0.5 else None
        folder = self.folder / name
        try:
            config = folder if saved is not None else LoraConfig(r=1, lora_alpha=1, target_modules=["lin"])
            self.model.multi_lora.acquire_lora(name, config)
        except SlotsFull:
            self.count("full")
            return
        if saved is None:
            state = self.model.get_state_dict(adapter_name=name)
            assert all(not v.any() for k, v in state.items() if "lora_B" in k), "a slot was not empty"
            self.model.adapters.load_state_dict(name, {k: torch.full_like(v, float("lora_A" in k)) for k, v in state.items()})
        self.model.set_optimizer("sgd", lr=0.1, weight_decay=0.0, adapter_name=name)
        mirror = Mirror(draw.uniform(-5, 5))
        mirror.b = saved or 0.0
        for p in [p for k, p in self.model.adapters.parameters(name).items() if "lora_A" in k]:
            p.requires_grad_(False)
        self.live[name] = mirror
        self.count("came")

    def rows(self, mirror):
        return [{"input_ids": [1], "labels": [mirror.target]}]

    def train(self, name, mirror, draw):
        self.model.forward_backward(self.rows(mirror), adapter_name=name)
        assert self.model.clip_grad_and_step(1e9, adapter_name=name) is not None
        mirror.step()
        self.count("trained")

    def look(self, name, mirror, draw):
        found = self.model.forward_only([{"input_ids": [1]}], adapter_name=name).logits.item()
        assert found == pytest.approx(2 + mirror.b, abs=1e-5), f"{name} is mixed with another"
        self.count("looked")

    def fail(self, name, mirror, draw):
        self.model.set_loss(lambda inputs, outputs: 1 / 0, adapter_name=name)
        with pytest.raises(ZeroDivisionError):
            self.model.forward_backward(self.rows(mirror), adapter_name=name)
        self.model.set_loss(squared, adapter_name=name)
        self.count("failed")

    def save(self, name, mirror, draw):
        self.model.save(name, self.folder, adapter_name=name)
        self.saved[name] = mirror.b
        self.count("saved")

    def again(self, name, mirror, draw):
        with pytest.raises((DuplicateAdapter, SlotsFull)):
            self.model.multi_lora.acquire_lora(name, LoraConfig(r=1, target_modules=["lin"]))
        self.count("refused")

    def go(self, name, mirror, draw):
        self.model.multi_lora.release_lora(name)
        del self.live[name]
        with pytest.raises(UnknownAdapter):
            self.model.forward_only([{"input_ids": [1]}], adapter_name=name)
        self.count("went")


@pytest.mark.slow
def test_fifty_tenants_over_five_slots(tmp_path):
    """2,000 operations from four threads, against each tenant in plain floats: nothing lost, mixed or leaked."""
    crowd = Crowd(tmp_path)

    def run(seed):
        torch.set_num_threads(1)
        draw = random.Random(seed)
        for _ in range(500):
            crowd.one(draw)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(run, seed) for seed in range(4)]:
            done.result(timeout=300)
    model = crowd.model
    assert set(crowd.done) == {"came", "full", "trained", "looked", "failed", "saved", "refused", "went"}, crowd.done
    for name, mirror in crowd.live.items():
        crowd.look(name, mirror, None)
    assert sorted(model.sessions) == sorted(["", *crowd.live])
    assert model.multi_lora.free == 5 - len(crowd.live)
    for name in list(crowd.live):
        model.multi_lora.release_lora(name)
    assert model.multi_lora.free == 5 and not model.module.lin.flat_A.any() and not model.module.lin.flat_B.any()
    assert not model.turns.waiting
