"""Random sequences of everything tenants do, against a plain peft model for each of them."""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from twinkle_core.errors import BadAdapter, CheckpointNotWritten, SlotsFull
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_transformers.testing import tiny_config

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
NAMES = ("a", "lora", "b", "base", "model")  # each is part of a key somewhere
CONFIGS = [
    {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {"r": 3, "target_modules": ["up_proj", "q_proj"], "rank_pattern": {"up_proj": 1}, "alpha_pattern": {"q_proj": 5}},
    {"r": 1, "target_modules": ["down_proj"], "init_lora_weights": False},
]
LR, MOMENTUM = 0.3, 0.5


@functools.cache
def weights():
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**SIZES)).state_dict()


def rows_of(seed):
    """One to three rows of different lengths, the first half of each masked."""
    made = torch.Generator().manual_seed(seed)
    rows = []
    for length in torch.randint(2, 12, (1 + seed % 3,), generator=made).tolist():
        ids = torch.randint(0, 40, (length + 1,), generator=made).tolist()
        rows.append({"input_ids": ids[:-1], "labels": [-100] * (length // 2) + ids[1 + length // 2 :]})
    return rows


class Plain:
    """One tenant in a plain peft model of its own, trained by plain SGD with momentum."""

    def __init__(self, source, seed=0):
        base = LlamaForCausalLM(tiny_config(**SIZES))
        base.load_state_dict(weights())
        folder = isinstance(source, Path)
        torch.manual_seed(seed)
        self.model = PeftModel.from_pretrained(base, source, is_trainable=True) if folder else get_peft_model(base, source)
        self.own = {k: p for k, p in self.model.named_parameters() if p.requires_grad}
        self.velocity: dict[str, torch.Tensor] = {}
        self.items = 0

    def gradients(self, rows):
        """Add those of the summed loss of one batch, row by row."""
        for row in rows:
            logits = self.model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
            torch.nn.functional.cross_entropy(logits, torch.tensor(row["labels"]), reduction="sum").backward()
            self.items += sum(label != -100 for label in row["labels"])

    def drop(self):
        for p in self.own.values():
            p.grad = None
        self.items = 0

    def step(self):
        """By the mean over all items of the window, clipped to 1 as the verbs do."""
        for p in self.own.values():
            p.grad /= self.items
        torch.nn.utils.clip_grad_norm_(self.own.values(), 1.0)
        with torch.no_grad():
            for k, p in self.own.items():
                self.velocity[k] = p.grad + MOMENTUM * self.velocity.get(k, 0)
                p -= LR * self.velocity[k]
        self.drop()

    def training(self):
        """What a checkpoint with the optimizer holds beside the weights."""
        gradients = {k: p.grad.clone() for k, p in self.own.items() if p.grad is not None}
        return dict(self.velocity), gradients, self.items

    def resume(self, training):
        self.velocity, gradients, self.items = dict(training[0]), training[1], training[2]
        for k, gradient in gradients.items():
            self.own[k].grad = gradient.clone()

    def state(self):
        found = {k: p for k, p in self.model.named_parameters() if "lora_" in k}
        return {k.replace(".default", ""): p.detach() for k, p in found.items()}


class Tenants(RuleBasedStateMachine):
    """Up to five tenants over four slots. ``shared``: how many passes several of them shared."""

    shared = 0

    def __init__(self):
        super().__init__()
        torch.set_num_threads(1)
        self.folder = Path(tempfile.mkdtemp())
        self.model = MultiLoraTransformersModel(config=tiny_config(**SIZES), mixed_precision="no", max_loras=4, max_r=4)
        self.model.adapters.load_state_dict("", weights())
        self.plain: dict[str, Plain] = {}
        self.saved: dict[str, tuple[Path, tuple]] = {}
        assert self.model.engine.sharing.way == "shared"
        run = self.model.engine.run_shared

        def counted(shares, **how):
            Tenants.shared += len(shares) > 1
            return run(shares, **how)

        self.model.engine.run_shared = counted
        self.before: dict[str, dict[str, torch.Tensor]] = {}
        self.touched: set[str] = set()

    def teardown(self):
        shutil.rmtree(self.folder)

    def live(self, number):
        name = sorted(self.plain)[number % len(self.plain)]
        self.touched = {name}
        return name

    @initialize(seed=st.integers(0, 99))
    def three_come(self, seed):
        for config, name in enumerate(NAMES[:3]):
            self.acquire(name, config, seed)

    @rule(name=st.sampled_from(NAMES), config=st.integers(0, len(CONFIGS) - 1), seed=st.integers(0, 99))
    def acquire(self, name, config, seed):
        self.touched = {name} - self.plain.keys()
        made = LoraConfig(**copy.deepcopy(CONFIGS[config]))
        torch.manual_seed(seed)
        if name in self.plain or not self.model.multi_lora.free:
            with pytest.raises((ValueError, SlotsFull)):
                self.model.multi_lora.acquire_lora(name, made)
            return
        self.model.multi_lora.acquire_lora(name, made)
        self.model.set_optimizer("sgd", lr=LR, momentum=MOMENTUM, weight_decay=0.0, adapter_name=name)
        self.plain[name] = Plain(LoraConfig(**copy.deepcopy(CONFIGS[config])), seed)

    @rule(name=st.sampled_from(NAMES), option=st.sampled_from([{"r": 5}, {"use_dora": True}, {"target_modules": ["nope"]}]))
    def fail_to_acquire(self, name, option):
        self.touched = set()
        with pytest.raises((BadAdapter, ValueError, RuntimeError)):
            self.model.multi_lora.acquire_lora(name, LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **option}))

    @precondition(lambda self: self.plain)
    @rule(number=st.integers(0, 9), seed=st.integers(0, 999), split=st.booleans(), step=st.booleans())
    def train(self, number, seed, split, step):
        name, rows = self.live(number), rows_of(seed)
        if split:
            self.model.forward(rows, adapter_name=name, return_logits=False)
            self.model.backward(adapter_name=name)
        else:
            self.model.forward_backward(rows, adapter_name=name)
        self.plain[name].gradients(rows)
        if step:
            self.step(name)

    def step(self, name):
        self.model.clip_grad_and_step(adapter_name=name)
        self.plain[name].step()

    @precondition(lambda self: len(self.plain) > 1)
    @rule(
        order=st.permutations(range(4)),
        count=st.integers(2, 4),
        seed=st.integers(0, 999),
        steps=st.sets(st.integers(0, 3)),
        broken=st.integers(0, 8),
    )
    def train_together(self, order, count, seed, steps, broken):
        """Some tenants in one call, in any order; the loss of one may raise. Some leave their window open."""
        names = [sorted(self.plain)[i] for i in order if i < len(self.plain)][:count]
        self.touched, rows = set(names), {name: rows_of(seed + i) for i, name in enumerate(names)}
        fails = names[broken] if broken < len(names) else None
        if fails is None:
            self.model.forward_backward_many(rows)
        else:
            self.touched.remove(fails)
            self.model.set_loss(_raises, adapter_name=fails)
            with pytest.raises(ZeroDivisionError):
                self.model.forward_backward_many(rows)
            self.model.set_loss("cross_entropy", adapter_name=fails)
        for i, name in enumerate(names):
            if name != fails:
                self.plain[name].gradients(rows[name])
                if i in steps:
                    self.step(name)

    @precondition(lambda self: self.plain)
    @rule(number=st.integers(0, 9), how=st.sampled_from(["loss", "nan", "rows", "disk"]))
    def fail(self, number, how):
        name = self.live(number)
        self.touched = set()
        if how == "rows":
            with pytest.raises(ValueError):
                self.model.forward_backward([{"input_ids": [99], "labels": [1]}], adapter_name=name)
            return
        if how == "disk":
            with pytest.raises(CheckpointNotWritten), pytest.MonkeyPatch.context() as patched:
                patched.setattr("twinkle_transformers.checkpoint.save_file", _full)
                self.model.save("one", self.folder, adapter_name=name, save_optimizer=True)
            return
        self.model.set_loss(_raises if how == "loss" else _nan, adapter_name=name)
        with pytest.raises(ArithmeticError):  # of the loss itself, or NonFiniteGradients
            self.model.forward_backward(rows_of(1), adapter_name=name)
            self.model.clip_grad_and_step(adapter_name=name)
        if how == "nan":  # it costs the window
            self.model.zero_grad(adapter_name=name)
            self.plain[name].drop()
        self.model.set_loss("cross_entropy", adapter_name=name)

    @precondition(lambda self: self.plain)
    @rule(number=st.integers(0, 9))
    def save(self, number):
        name = self.live(number)
        self.touched = set()
        where = f"{len(self.saved)}-{name}"
        folder = Path(self.model.save(where, self.folder, adapter_name=name, save_optimizer=True))
        self.saved[where] = folder, self.plain[name].training()

    @precondition(lambda self: self.saved)
    @rule(number=st.integers(0, 9), name=st.sampled_from(NAMES), resume=st.booleans())
    def load(self, number, name, resume):
        """A saved adapter as a new tenant, where there is room: weights alone, or the optimizer and the open window as well."""
        folder, training = self.saved[sorted(self.saved)[number % len(self.saved)]]
        self.touched = {name} - self.plain.keys()
        if name in self.plain or not self.model.multi_lora.free:
            return
        self.model.multi_lora.acquire_lora(name, folder)
        self.model.set_optimizer("sgd", lr=LR, momentum=MOMENTUM, weight_decay=0.0, adapter_name=name)
        self.plain[name] = Plain(folder)
        if resume:
            self.model.resume_from_checkpoint(folder, adapter_name=name)
            self.plain[name].resume(training)

    @precondition(lambda self: self.plain)
    @rule(number=st.integers(0, 9))
    def release(self, number):
        name = self.live(number)
        self.model.multi_lora.release_lora(name)
        del self.plain[name]

    @invariant()
    def untouched_ones_are_as_they_were(self):
        """To the bit."""
        states = {name: self.model.get_state_dict(adapter_name=name) for name in self.plain}
        for name in self.before.keys() & states.keys() - self.touched:
            assert all(torch.equal(v, states[name][k]) for k, v in self.before[name].items()), name
        self.before = {name: {k: v.clone() for k, v in state.items()} for name, state in states.items()}

    @invariant()
    def weights_are_those_of_plain_peft(self):
        assert set(self.model.sessions) - {""} == set(self.plain)
        assert self.model.multi_lora.free == 4 - len(self.plain)
        for name, plain in self.plain.items():
            found, expected = self.model.get_state_dict(adapter_name=name), plain.state()
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5)


def _full(*args, **kwargs):
    raise OSError(28, "No space left on device")


def _raises(inputs, outputs):
    return 1 / 0


def _nan(inputs, outputs):
    return outputs.logits.sum() * float("nan")


_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


class Shares(Tenants.TestCase):
    def runTest(self):
        Tenants.shared = 0
        super().runTest()
        assert Tenants.shared > self.settings.max_examples, "tenants hardly ever shared a pass"


class TestTenants(Shares):
    settings = settings(
        max_examples=8, stateful_step_count=12, deadline=None, derandomize=True, suppress_health_check=_CHECKS, database=None
    )


@pytest.mark.slow
class TestMoreTenants(Shares):
    settings = settings(
        max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=_CHECKS, database=None
    )


del Shares  # a base, not a test
