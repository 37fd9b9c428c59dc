"""Tenants in one pass: what each gets is, to the bit, what it gets alone."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
from peft import LoraConfig
from transformers import MistralConfig, MixtralConfig, MixtralForCausalLM

from twinkle_core.errors import BadAdapter, BadArgument, BadLossResult, LabelsMissing, UnknownAdapter
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_multilora.packing import LEAST
from twinkle_multilora.probe import Sharing
from twinkle_multilora.scheduler import TenantScheduler
from twinkle_transformers.testing import tiny_config

#: config, optimizer, loss, rows of a step
TENANTS = {
    "a": (LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.2), "adamw", None, (7, 3, 12)),
    "b": (LoraConfig(r=8, target_modules=["q_proj", "down_proj"], use_rslora=True), "sgd", "entropy", (2,)),
    "c": (LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights="gaussian"), "adamw", "logits", (30, 5)),
    "d": (LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5), "adamw", "fused_linear_cross_entropy", (9, 9)),
}
STEPS = 5


def entropy(inputs, outputs):
    return -(outputs.logps + 0.1 * outputs.entropies).sum() / (inputs["labels"] != -100).sum()


entropy.needs = {"logps", "entropies"}


def from_logits(inputs, outputs):
    labels = inputs["labels"].flatten()
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels, ignore_index=-100)


LOSSES = {"entropy": entropy, "logits": from_logits}


def rows_of(name, i):
    """Rows whose lengths differ from step to step, their first third masked."""
    made = torch.Generator().manual_seed(ord(name) * 100 + i)
    rows = []
    for length in TENANTS[name][3]:
        ids = torch.randint(3, 250, (length + i + 1,), generator=made).tolist()
        rows.append({"input_ids": ids[:-1], "labels": [-100] * (length // 3) + ids[1 + length // 3 :]})
    return rows


def build(config=None, **options):
    torch.manual_seed(0)
    options = {"mixed_precision": "no", "max_loras": 4, "max_r": 8, **options}
    return MultiLoraTransformersModel(config=config or tiny_config(), **options)


def join(model, name):
    config, optimizer, loss, _ = TENANTS[name]
    torch.manual_seed(ord(name))
    model.add_adapter_to_model(name, config)
    model.set_optimizer(optimizer, lr=1e-2, adapter_name=name)
    if loss is not None:
        model.set_loss(LOSSES.get(loss, loss), adapter_name=name)


def state(model, name):
    return [v.clone() for v in model.get_state_dict(adapter_name=name).values()]


def trained(names, way, **options):
    """Losses, norms and weights of each tenant after some steps. ``way``: ``many``, ``one by one``, or ``threads``."""
    model = build(**options)
    for name in names:
        join(model, name)
    numbers = {name: [] for name in names}
    for i in range(STEPS):
        if way == "many":
            found = model.forward_backward_many({name: rows_of(name, i) for name in names})
        else:
            found = {name: model.forward_backward(rows_of(name, i), adapter_name=name) for name in names}
        for name in names:
            numbers[name] += [float(found[name]), float(model.clip_grad_and_step(0.5, adapter_name=name))]
    return {name: (numbers[name], state(model, name)) for name in names}


def same(a, b):
    return a[0] == b[0] and len(a[1]) == len(b[1]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.fixture(scope="module", params=["float32", "bf16", "odd vocabulary", "checkpointing", "wide"])
def kind(request):
    torch.set_num_threads(1)
    options = {
        "float32": {},
        "bf16": {"mixed_precision": "bf16"},
        "odd vocabulary": {"config": tiny_config(vocab_size=251)},
        "checkpointing": {"gradient_checkpointing": True},
        "wide": {"config": tiny_config(hidden_size=256, intermediate_size=512, vocab_size=300)},  # oneDNN's, where it is there
    }[request.param]
    return options, {name: trained([name], "one by one", **options)[name] for name in TENANTS}


@pytest.mark.parametrize("company", ["abcd", "dcba", "ac", "db"])
def test_company_and_order_change_no_bit(kind, company, monkeypatch):
    options, alone = kind
    passes = count_passes(monkeypatch)
    together = trained(list(company), "many", **options)
    assert all(same(together[name], alone[name]) for name in company)
    assert passes == [len(company)] * STEPS  # in one pass indeed


def count_passes(monkeypatch):
    """How many tenants each pass held."""
    from twinkle_multilora.engine import SlotEngine

    seen, original = [], SlotEngine.run_shared

    def counted(self, shares, **how):
        seen.append(len(shares))
        return original(self, shares, **how)

    monkeypatch.setattr(SlotEngine, "run_shared", counted)
    return seen


def test_apart_changes_no_bit_either(kind, monkeypatch):
    """Where a matmul's rows depend on one another, each tenant has its own."""
    from twinkle_multilora import probe

    options, _ = kind
    monkeypatch.setattr(probe, "rows_invariant", lambda *_: False)
    alone = {name: trained([name], "one by one", **options)[name] for name in "ac"}
    together = trained(list("ca"), "many", **options)
    assert all(same(together[name], alone[name]) for name in "ac")
    model = build(**options)
    assert model.engine.sharing.way == "apart" and "one matmul each" in model.get_train_configs(adapter_name="")


def test_a_pass_is_the_plain_model_to_rounding():
    """Packed rows, against padded ones in a model of the tenant's own."""
    from twinkle_transformers.model import TransformersModel

    torch.manual_seed(0)
    plain = TransformersModel(config=tiny_config(), mixed_precision="no")
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
    shared = build()
    for model in (plain, shared):
        torch.manual_seed(5)
        model.add_adapter_to_model("x", config)
        model.set_optimizer("sgd", lr=0.1)
    for i in range(3):
        a, b = (float(model.forward_backward(rows_of("a", i))) for model in (plain, shared))
        assert a == pytest.approx(b, rel=1e-5)
        a, b = (float(model.clip_grad_and_step(9.0)) for model in (plain, shared))
        assert a == pytest.approx(b, rel=1e-4)


def test_a_loss_that_raises_is_its_tenants_own():
    model, alone = build(), build()
    for name in "ac":
        join(model, name)
    join(alone, "a")

    def broken(inputs, outputs):
        raise ZeroDivisionError("mine")

    model.set_loss(broken, adapter_name="c")
    before = state(model, "c")
    with pytest.raises(ZeroDivisionError, match="mine"):
        model.forward_backward_many({"c": rows_of("c", 0), "a": rows_of("a", 0)})
    alone.forward_backward(rows_of("a", 0), adapter_name="a")
    norms = [m.clip_grad_and_step(adapter_name="a") for m in (model, alone)]
    assert norms[0] == norms[1] and all(torch.equal(x, y) for x, y in zip(state(model, "a"), state(alone, "a"), strict=True))
    assert model.sessions["c"].window.count == 0
    assert all(p.grad is None for p in model.adapters.parameters("c").values())
    assert all(torch.equal(x, y) for x, y in zip(before, state(model, "c"), strict=True))


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("on the way back")


def _raises_in_backward(inputs, outputs):
    return _Raises.apply(outputs.logps).sum()


def _exits(inputs, outputs):
    raise SystemExit(3)


def _goes_back_itself(inputs, outputs):
    outputs.logps.sum().backward()
    return outputs.logps.sum() * 0


def _switches_gradients_off(inputs, outputs):
    torch.set_grad_enabled(False)
    return outputs.logps.sum()


def _writes_into_outputs(inputs, outputs):
    inputs["labels"].fill_(3)
    outputs.hidden.mul_(0)
    return outputs.logps.mul_(2).sum() + outputs.hidden.sum()


def _draws(inputs, outputs):
    torch.manual_seed(1)
    return outputs.logps.sum() * torch.rand(())


MEAN = (_raises_in_backward, _exits, _goes_back_itself, _switches_gradients_off, _writes_into_outputs, _draws)


@pytest.mark.parametrize("loss", MEAN, ids=lambda f: f.__name__)
def test_whatever_a_loss_does_reaches_nobody_else(loss):
    """Its backward too is the tenant's own code: the others' windows go on, to the bit."""
    loss.needs = {"logps", "hidden"}
    model, alone = build(), build()
    for name in "ca":
        join(model, name)
    join(alone, "a")
    model.set_loss(loss, adapter_name="c")
    for i in range(2):
        with contextlib.suppress(ZeroDivisionError, SystemExit, RuntimeError, BadLossResult):
            model.forward_backward_many({"c": rows_of("c", i), "a": rows_of("a", i)}, gradient_accumulation_steps=2)
        alone.forward_backward(rows_of("a", i), adapter_name="a", gradient_accumulation_steps=2)
    norms = [m.clip_grad_and_step(adapter_name="a") for m in (model, alone)]
    assert norms[0] == norms[1] > 0
    assert all(torch.equal(x, y) for x, y in zip(state(model, "a"), state(alone, "a"), strict=True))


def test_a_backward_that_fails_costs_its_own_window_as_it_does_alone():
    _raises_in_backward.needs = {"logps"}
    for company in ("c", "ca"):
        model = build()
        for name in company:
            join(model, name)
        model.forward_backward(rows_of("c", 0), adapter_name="c", gradient_accumulation_steps=3)
        model.set_loss(_raises_in_backward, adapter_name="c")
        with pytest.raises(ZeroDivisionError) as raised:
            model.forward_backward_many({name: rows_of(name, 1) for name in company})
        assert "1 backward(s) before this one" in raised.value.__notes__[0]
        assert model.sessions["c"].window.count == 0
        assert all(p.grad is None for p in model.adapters.parameters("c").values())


def test_a_loss_may_call_the_model():
    """A reference by the base model, or by another tenant's adapter, in the middle of a pass of several."""
    model, alone = build(gradient_checkpointing=True), build(gradient_checkpointing=True)
    for name in "ca":
        join(model, name)
    join(alone, "a")

    def with_reference(inputs, outputs):
        reference = model.forward_only(rows_of("b", 0), adapter_name="a").logps
        return outputs.logps.sum() + reference.sum()

    with_reference.needs = {"logps"}
    model.set_loss(with_reference, adapter_name="c")
    found = model.forward_backward_many({"c": rows_of("c", 0), "a": rows_of("a", 0)})
    assert float(found["a"]) == float(alone.forward_backward(rows_of("a", 0), adapter_name="a"))
    assert model.clip_grad_and_step(adapter_name="a") == alone.clip_grad_and_step(adapter_name="a")


def test_fast_off_takes_turns_and_gives_the_same_to_rounding():
    found = []
    for fast in (True, False):
        model = build(fast=fast)
        join(model, "c")
        join(model, "b")
        losses = [model.forward_backward_many({n: rows_of(n, i) for n in "cb"})["c"] for i in range(2)]
        found.append((float(losses[1]), model.clip_grad_and_step(adapter_name="c"), model.get_train_configs(adapter_name="c")))
    (loss, norm, table), (plain_loss, plain_norm, plain_table) = found
    assert loss == pytest.approx(plain_loss, rel=1e-5) and norm == pytest.approx(plain_norm, rel=1e-4)
    assert "tenants take turns (fast=False)" in plain_table and "fast=False" not in table and "FastLora" not in table


def test_numbers_that_are_none_stay_with_their_tenant():
    model, alone = build(on_nonfinite="skip"), build()
    for name in "ac":
        join(model, name)
    join(alone, "a")
    with torch.no_grad():
        next(iter(model.adapters.parameters("c").values())).fill_(float("nan"))
    found = model.forward_backward_many({"c": rows_of("c", 0), "a": rows_of("a", 0)})
    assert not torch.isfinite(torch.as_tensor(found["c"]))
    assert float(found["a"]) == float(alone.forward_backward(rows_of("a", 0), adapter_name="a"))
    assert model.clip_grad_and_step(adapter_name="a") == alone.clip_grad_and_step(adapter_name="a")
    assert all(torch.equal(x, y) for x, y in zip(state(model, "a"), state(alone, "a"), strict=True))


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ({"a": rows_of("a", 0), "nobody": rows_of("c", 0)}, UnknownAdapter),
        ({"c": rows_of("c", 0), "a": [{"input_ids": [3, 4]}]}, LabelsMissing),
        ({"a": rows_of("a", 0), "lora_0": rows_of("a", 0)}, BadArgument),
        ({"a": rows_of("a", 0), "": rows_of("a", 0)}, BadArgument),
        ({None: rows_of("a", 0)}, BadArgument),
        ({7: rows_of("a", 0)}, BadArgument),
        ({}, BadArgument),
        (rows_of("a", 0), BadArgument),
    ],
)
def test_refused_before_anything_changes(inputs, error):
    model = build()
    for name in "ac":
        join(model, name)
    with pytest.raises(error):
        model.forward_backward_many(inputs, gradient_accumulation_steps=3)
    for name in "ac":
        window = model.sessions[name].window
        assert (window.size, window.count) == (None, 0)
        assert all(p.grad is None for p in model.adapters.parameters(name).values())


def test_loss_arguments_of_each_and_of_all():
    model, seen = build(), {}

    def noted(inputs, outputs, *, weight, shared):
        seen[weight] = shared
        return -outputs.logps.mean() * weight

    noted.needs = {"logps"}
    for name in "ac":
        join(model, name)
        model.set_loss(noted, adapter_name=name)
    found = model.forward_backward_many(
        {name: rows_of("a", 0) for name in "ac"}, weight={"a": 1.0, "c": 2.0}, shared={"some": "dict"}
    )
    assert seen == {1.0: {"some": "dict"}, 2.0: {"some": "dict"}}
    assert float(found["c"]) == pytest.approx(2 * float(found["a"]), rel=1e-2)  # adapters begin at B = 0
    model.set_loss("cross_entropy", adapter_name="c")  # it takes no arguments
    model.forward_backward_many({name: rows_of("a", 0) for name in "ac"}, weight={"a": 3.0}, shared={"a": 4})
    assert seen[3.0] == 4
    model.set_loss(noted, adapter_name="c")
    model.forward_backward_many({"a": rows_of("a", 0), "lora_1": rows_of("a", 0)}, weight={"lora_0": 5.0, "c": 6.0}, shared=1)
    assert seen[5.0] == seen[6.0] == 1  # by names of slots as well


@pytest.mark.parametrize(
    ("weight", "strange"),
    [({"a": 3.0, "nobody": 1}, "'nobody'"), ({"d": 3.0}, "'d'"), ({"a": 1, "lora_0": 2}, "'lora_0'"), ({"a": 1, 7: 2}, "7")],
)
def test_loss_arguments_that_name_tenants_and_something_else(weight, strange):
    """A key beside them that is nobody, a tenant without rows, one tenant twice: nothing runs."""
    model = build()
    for name in "acd":
        join(model, name)
        model.set_loss(lambda inputs, outputs, weight: 1 / 0, adapter_name=name)
    with pytest.raises(BadArgument, match=f"weight={strange}.*a, c"):
        model.forward_backward_many({name: rows_of("a", 0) for name in "ac"}, weight=weight)


def test_nobody_is_meant_by_no_name():
    model = build()
    join(model, "a")
    with pytest.raises(BadArgument, match=r"inputs=None.*by its name"):
        model.forward_backward_many({None: rows_of("a", 0)})
    assert model.sessions["a"].window.count == 0


def test_groups_keep_to_the_budget(monkeypatch):
    passes = count_passes(monkeypatch)
    model = build()
    for name in "abcd":
        join(model, name)
    model.scheduler.budget, model.scheduler.alone = 40, 30
    # a 22 tokens, b 2, c 35 (alone), d 18
    model.forward_backward_many({name: rows_of(name, 0) for name in "abcd"})
    assert sorted(passes) == [1, 1, 2]


@pytest.mark.parametrize("name", ["budget", "alone", "patience"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 1e12, True, "9", None, 0, 1.5])
def test_limits_of_the_scheduler_are_numbers(name, value):
    model = build()
    if name == "patience" and value in (0, 1.5):  # seconds
        model.scheduler.patience = value
        return
    before = getattr(model.scheduler, name)
    for ask in (lambda: setattr(model.scheduler, name, value), lambda: TenantScheduler(model, **{name: value})):
        with pytest.raises(BadArgument, match=f"{name}={value!r}"):
            ask()
    assert getattr(model.scheduler, name) == before
    join(model, "b")
    model.forward_backward(rows_of("b", 0), adapter_name="b")


def test_a_window_hides_what_it_hides_alone(monkeypatch):
    """Rows longer than a sliding window, and longer than those that the model is tried with."""
    from twinkle_transformers.model import TransformersModel

    config = MistralConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=24, pad_token_id=0,
    )  # fmt: skip
    rows = {name: [row for i in (20, 40) for row in rows_of(name, i)] for name in "ac"}
    passes = count_passes(monkeypatch)
    models = {"both": build(config=config), "alone": build(config=config)}
    torch.manual_seed(0)
    models["plain"] = TransformersModel(config=config, mixed_precision="no")
    for which, model in models.items():
        for name in "ca" if which == "both" else "c":
            join(model, name)
    losses = [float(models["both"].forward_backward_many(rows)["c"])]
    losses += [float(models[which].forward_backward(rows["c"], adapter_name="c")) for which in ("alone", "plain")]
    norms = [model.clip_grad_and_step(adapter_name="c") for model in models.values()]
    assert passes[0] == 2 and losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)
    assert norms[0] == norms[1] == pytest.approx(norms[2], rel=1e-4)


def test_positions_do_not_join_rows_nor_cut_them():
    """A row that goes on where another tenant's ends, and one whose positions leave some out."""
    model, losses = build(), []
    for name in "ab":
        join(model, name)
    after = [{"input_ids": [3] * 12, "labels": [4] * 12, "position_ids": list(range(20, 32))}]
    for token in (5, 6):
        many = {"a": [{"input_ids": [token] * 20, "labels": [9] * 20}], "b": after}
        losses.append(float(model.forward_backward_many(many)["b"]))
    assert losses[0] == losses[1] == float(model.forward_backward(after, adapter_name="b"))
    gap = [{"input_ids": list(range(3, 19)), "labels": list(range(4, 20)), "position_ids": [*range(8), *range(20, 28)]}]
    plain = build(fast=False)
    join(plain, "b")
    found = [float(m.forward_only(gap, adapter_name="b").logps.sum()) for m in (model, plain)]
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_labels_on_padding_count_as_in_the_plain_model():
    ids, found = torch.arange(3, 23).view(2, 10), []
    batch = {"input_ids": ids, "labels": ids + 1, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][0, 6:] = 0
    for model in (build(), build(fast=False)):
        join(model, "b")
        found.append(float(model.forward_backward(batch, adapter_name="b")))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_turn_that_is_held_serves_nobody_else():
    model = build()
    for name in "bc":
        join(model, name)
    with model.turns:
        other = threading.Thread(target=lambda: model.forward_backward(rows_of("b", 0), adapter_name="b"))
        other.start()
        while not model.scheduler._waiting:
            time.sleep(0.001)
        model.forward_backward(rows_of("c", 0), adapter_name="c")
        assert (model.sessions["b"].window.count, model.sessions["c"].window.count) == (0, 1)
    other.join(30)
    assert model.sessions["b"].window.count == 1


def test_passes_are_shared_whoever_calls_first():
    """The trial is of the base model, also where an adapter is on that changes what it computes."""
    model = build()
    join(model, "c")
    with torch.no_grad():
        for p in model.adapters.parameters("c").values():
            p.fill_(0.1)
    model.forward_only(rows_of("c", 0), adapter_name="c")
    assert model.engine.sharing.way == "shared"


def test_few_tokens_are_filled_up():
    model = build()
    join(model, "b")
    seen = []
    assert model.engine.sharing.way == "shared"
    model.module.base_model.register_forward_pre_hook(lambda _, __, k: seen.append(k["input_ids"].shape[1]), with_kwargs=True)
    model.forward_backward([{"input_ids": [5, 6], "labels": [6, 7]}], adapter_name="b")
    assert seen[-1] == LEAST


def serve_in_threads(model, names, steps, barrier=True):
    gate, failures = threading.Barrier(len(names)), []
    numbers = {name: [] for name in names}

    def tenant(name):
        try:
            for i in range(steps):
                if barrier:
                    gate.wait(60)
                loss = model.forward_backward(rows_of(name, i), adapter_name=name)
                numbers[name] += [float(loss), float(model.clip_grad_and_step(0.5, adapter_name=name))]
        except BaseException as error:
            failures.append(error)
            gate.abort()

    threads = [threading.Thread(target=tenant, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures
    return numbers


def test_threads_share_passes_and_feel_nothing(monkeypatch):
    expected = {name: trained([name], "one by one")[name] for name in TENANTS}
    passes = count_passes(monkeypatch)
    model = build()
    for name in TENANTS:
        join(model, name)
    model.engine.sharing  # noqa: B018  tried now, not in the first pass
    with model.turns:  # the model is busy until all have called
        threads = threading.Thread(target=lambda: results.update(serve_in_threads(model, list(TENANTS), STEPS)))
        results = {}
        threads.start()
        while len(model.scheduler._waiting) < len(TENANTS):
            threads.join(0.01)
            assert threads.is_alive()
    threads.join(120)
    assert passes[0] == len(TENANTS) and sum(passes) == STEPS * len(TENANTS) and len(passes) < sum(passes)
    for name, (numbers, weights) in expected.items():
        assert results[name] == numbers
        assert all(torch.equal(x, y) for x, y in zip(state(model, name), weights, strict=True))


def test_a_call_that_fails_in_a_gathered_pass_is_its_callers():
    model = build()
    for name in "ac":
        join(model, name)
    outcomes = {}

    def call(name, rows):
        try:
            outcomes[name] = model.forward_backward(rows, adapter_name=name)
        except Exception as error:
            outcomes[name] = error

    with model.turns:
        rows = {"c": rows_of("c", 0), "a": [{"input_ids": [3, 4]}]}
        threads = [threading.Thread(target=call, args=item) for item in rows.items()]
        for thread in threads:
            thread.start()
        while len(model.scheduler._waiting) < 2:
            threads[0].join(0.01)
    for thread in threads:
        thread.join(60)
    assert isinstance(outcomes["a"], LabelsMissing) and float(outcomes["c"]) > 0


TURNS = {
    "eager attention": {"attn_implementation": "eager"},
    "dropout in attention": {"config": tiny_config(attention_dropout=0.1)},
}


@pytest.mark.parametrize("case", TURNS)
def test_what_cannot_be_shared_takes_turns(case, monkeypatch):
    passes = count_passes(monkeypatch)
    model = build(**TURNS[case])
    for name in "ac":
        join(model, name)
    found = model.forward_backward_many({name: rows_of(name, 0) for name in "ac"})
    assert model.engine.sharing.way == "turns" and not passes and len(found) == 2
    assert "tenants take turns" in model.get_train_configs(adapter_name="")


def test_other_kernels_are_tried_anew(monkeypatch):
    """What one kernel keeps apart another may not: oneDNN may be switched off after the first pass."""
    tried = []
    monkeypatch.setattr("twinkle_multilora.engine.sharing_of", lambda *_, **__: tried.append(1) or Sharing("turns", "a trial"))
    kernels = ["oneDNN", "oneDNN", "what PyTorch chooses", "oneDNN"]
    model = build()
    for name in kernels:
        monkeypatch.setattr("twinkle_multilora.engine.kernel", lambda name=name: name)
        assert model.engine.sharing.way == "turns"
    assert len(tried) == 2


def test_a_model_of_experts_is_told_where_slots_can_be():
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=264, num_key_value_heads=2, num_local_experts=4, **shape)
    with pytest.raises(BadAdapter, match=r"linear layers alone.*target_modules=\['k_proj', 'o_proj', 'q_proj', 'v_proj'\]\)"):
        build(config)


def test_experts_are_asked_like_any_model():
    """A mixture of experts shares passes only if its rows were seen to keep apart; either way tenants feel nothing."""
    config = MixtralConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    found = []
    for names in (["a"], ["a", "c"]):
        torch.manual_seed(0)
        model = MultiLoraTransformersModel(
            MixtralForCausalLM, config=config, mixed_precision="no", max_loras=2, max_r=8,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        )  # fmt: skip
        for name in names:
            torch.manual_seed(ord(name))
            model.add_adapter_to_model(name, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
            model.set_optimizer("sgd", lr=0.1, adapter_name=name)
        losses = []
        for i in range(2):
            losses.append(float(model.forward_backward_many({name: rows_of(name, i) for name in names})["a"]))
            losses += [model.clip_grad_and_step(adapter_name=name) for name in names if name == "a"]
        found.append((losses, state(model, "a")))
    assert same(*found)
