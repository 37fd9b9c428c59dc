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
from twinkle_transformers.testing import tiny_config

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


CONFIGS = [
    {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.2},
    {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False},
    {"r": 1, "target_modules": ["down_proj"], "use_rslora": True, "lora_dropout": 0.5},
]
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


def uneven(seed):
    """One to three rows of different lengths, the first half of each masked."""
    draw, rows = random.Random(seed), []
    for _ in range(1 + seed % 3):
        ids = [draw.randrange(64) for _ in range(draw.randrange(3, 13))]
        rows.append({"input_ids": ids[:-1], "labels": [-100] * (len(ids) // 2) + ids[1 + len(ids) // 2 :]})
    return rows


def small(slots):
    torch.manual_seed(0)
    return MultiLoraTransformersModel(config=tiny_config(**SMALL), mixed_precision="no", max_loras=slots, max_r=4)


class Life:
    """What one tenant did from coming to going, and what it saw: each event has what is needed to do it again elsewhere."""

    def __init__(self, name):
        self.name, self.events, self.seen = name, [], []
        self.weights = None  # at the end

    def do(self, model, what, *args):
        self.events.append((what, *args))
        self.seen += getattr(self, what)(model, *args)

    def come(self, model, seed, config, folder):
        with model.turns:
            torch.manual_seed(seed)
            model.multi_lora.acquire_lora(self.name, folder or LoraConfig(**CONFIGS[config]))
            model.set_optimizer("adamw", lr=1e-2, adapter_name=self.name)
            if folder:
                model.resume_from_checkpoint(folder, adapter_name=self.name)
        return []

    def train(self, model, seed):
        return [float(model.forward_backward(uneven(seed), adapter_name=self.name))]

    def step(self, model):
        if not model.sessions[self.name].window.open:
            return []
        return [float(model.clip_grad_and_step(0.5, adapter_name=self.name))]

    def look(self, model, seed):
        return [float(model.forward_only(uneven(seed), adapter_name=self.name).logps.sum())]

    def fail(self, model, seed):
        model.set_loss(lambda inputs, outputs: 1 / 0, adapter_name=self.name)
        with pytest.raises(ZeroDivisionError):
            model.forward_backward(uneven(seed), adapter_name=self.name)
        model.set_loss("cross_entropy", adapter_name=self.name)
        return []

    def end(self, model):
        self.weights = [v.clone() for v in model.get_state_dict(adapter_name=self.name).values()]
        return []


class Crowd:
    """Fifty tenants who come and go over five slots; each is worked on by one thread at a time."""

    def __init__(self, folder):
        self.model = small(5)
        self.folder, self.done, self.shared = folder, {}, 0
        self.locks = {f"t{i}": threading.Lock() for i in range(50)}
        self.live: dict[str, Life] = {}
        self.past: list[Life] = []
        self.saved: dict[str, str] = {}
        run = self.model.engine.run_shared

        def counted(shares, **how):
            self.shared += len(shares) > 1
            return run(shares, **how)

        self.model.engine.run_shared = counted

    def count(self, what):
        self.done[what] = self.done.get(what, 0) + 1

    def one(self, draw):
        """One random operation of one random tenant; most of the draws are for tenants that are there."""
        there = list(self.live)
        name = draw.choice(there) if there and draw.random() < 0.8 else draw.choice(list(self.locks))
        with self.locks[name]:
            life = self.live.get(name)
            if life is None:
                self.come(name, draw)
                return
            what = draw.choice(["train"] * 5 + ["step"] * 4 + ["together"] * 2 + ["look", "fail", "save", "again", "go"])
            self.count(what)
            if what in ("train", "look", "fail"):
                life.do(self.model, what, draw.randrange(1000))
            elif what == "step":
                life.do(self.model, what)
            else:
                getattr(self, what)(name, life, draw)

    def come(self, name, draw):
        life = Life(name)
        folder = self.saved.get(name) if draw.random() < 0.5 else None
        try:
            life.do(self.model, "come", draw.randrange(1000), draw.randrange(len(CONFIGS)), folder)
        except SlotsFull:
            self.count("full")
            return
        self.live[name] = life
        self.count("came")

    def together(self, name, life, draw):
        """A call with another tenant, whom nobody else works on; none where there is none."""
        for other in list(self.live):
            if other == name or not self.locks[other].acquire(blocking=False):
                continue
            try:
                mate = self.live.get(other)
                if mate is None:
                    continue
                seeds = {name: draw.randrange(1000), other: draw.randrange(1000)}
                losses = self.model.forward_backward_many({who: uneven(seed) for who, seed in seeds.items()})
                for one in (life, mate):
                    one.events.append(("train", seeds[one.name]))
                    one.seen.append(float(losses[one.name]))
                return
            finally:
                self.locks[other].release()

    def save(self, name, life, draw):
        if life.events[-1][0] == "step" or not self.model.sessions[name].window.open:
            where = f"{name}-{self.done['save']}-{draw.randrange(10**9)}"
            self.saved[name] = self.model.save(where, self.folder, adapter_name=name, save_optimizer=True)

    def again(self, name, life, draw):
        with pytest.raises((DuplicateAdapter, SlotsFull)):
            self.model.multi_lora.acquire_lora(name, LoraConfig(r=1, target_modules=["q_proj"]))

    def go(self, name, life, draw):
        life.do(self.model, "end")
        self.past.append(self.live.pop(name))
        self.model.multi_lora.release_lora(name)
        with pytest.raises(UnknownAdapter):
            self.model.forward_only(uneven(0), adapter_name=name)


@pytest.mark.parametrize("operations", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_fifty_tenants_over_five_slots(tmp_path, operations):
    """Operations from four threads; then each tenant's again, alone. Nothing is lost, mixed or leaked, to the bit."""
    crowd = Crowd(tmp_path)
    assert crowd.model.engine.sharing.way == "shared"

    def run(seed):
        torch.set_num_threads(1)
        draw = random.Random(seed)
        for _ in range(operations // 4):
            crowd.one(draw)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(run, seed) for seed in range(4)]:
            done.result(timeout=600)
    model = crowd.model
    kinds = {"came", "full", "train", "step", "together", "look", "fail", "save", "again", "go"}
    assert crowd.done.keys() == kinds or operations < 2000, crowd.done
    assert crowd.shared > operations // 20, "tenants hardly ever shared a pass"
    assert sorted(model.sessions) == sorted(["", *crowd.live])
    assert model.multi_lora.free == 5 - len(crowd.live)
    for name, life in list(crowd.live.items()):
        crowd.go(name, life, None)
    assert model.multi_lora.free == 5 and not model.turns.waiting
    for layer in model.adapters.layers.values():
        assert not layer.parts and not layer.flat_A.any() and not layer.flat_B.any()
    alone = small(1)
    for life in crowd.past:
        again = Life(life.name)
        for event in life.events:
            again.do(alone, *event)
        alone.multi_lora.release_lora(life.name)
        assert again.seen == life.seen, life.name
        assert all(map(torch.equal, again.weights, life.weights)), life.name
