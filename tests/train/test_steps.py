"""Training steps over toy models whose gradients are known."""

from __future__ import annotations

import copy
import logging
import math

import numpy as np
import pytest
import torch

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import (
    BadArgument,
    BadLossResult,
    BadLossWeight,
    NonFiniteGradients,
    NoOptimizer,
    NotDeclared,
    WindowNotStepped,
    WindowSizeChanged,
    WrongArgument,
)
from twinkle_core.metrics.loss import LossMetric
from twinkle_core.testing.adapters import ToyAdapters, ToyLinear
from twinkle_core.testing.engines import CallbackEngine, OneOfTwoRanks, ToyEngine, session_model
from twinkle_core.testing.toys import TinyLM, TwoWords, random_rows, row
from twinkle_core.train import losses
from twinkle_core.train.verbs import SessionModel
from twinkle_core.types import LossOutput, ModelOutput

ENGINES = [ToyEngine, CallbackEngine]
LOSSES = [
    ("cross_entropy", {}),
    ("cross_entropy", {"label_smoothing": 0.1}),
    ("chunked_cross_entropy", {"chunk_size": 3}),
    ("mse", {}),
]
M1, M2 = [row([0])], [row([1, 1, 1])]


def two_words(engine=ToyEngine, lr=1.0, optimizer="sgd", **kwargs):
    module = TwoWords()
    model = session_model(module, engine, **kwargs)
    model.set_optimizer(optimizer, lr=lr, **({"weight_decay": 0.0} if optimizer == "sgd" else {}))
    return model, module.w


def seen(model, w):
    """The gradient that the optimizer sees, without clipping."""
    assert model.clip_grad_norm(math.inf) is not None
    return w.grad.flatten().tolist()


# ------------------------------------------------------------------------------------------------ normalisation


@pytest.mark.parametrize("engine", ENGINES)
def test_B01_a_token_weighs_the_same_in_every_micro_batch(engine):
    """Micro-batches of one and three tokens: averaging their means would cancel exactly."""
    model, w = two_words(engine)
    losses = [float(model.forward_backward(m, gradient_accumulation_steps=2)) for m in (M1, M2)]
    assert losses == pytest.approx([math.log(2)] * 2)
    assert seen(model, w) == pytest.approx([0.25, -0.25])

    model, w = two_words(engine)
    assert float(model.forward_backward(M1 + M2)) == pytest.approx(math.log(2))
    assert seen(model, w) == pytest.approx([0.25, -0.25])

    model, w = two_words(engine)
    model.forward_backward(M1 + M2, micro_batch_size=1)
    assert seen(model, w) == pytest.approx([0.25, -0.25])


@pytest.mark.parametrize("engine", ENGINES)
def test_B01_the_norm_does_not_grow_with_the_tokens(engine):
    """A sum over 8 tokens has norm 0.707 after normalisation, so a threshold of 1 does not clip."""
    model, w = two_words(engine)
    model.forward_backward([row([1] * 8)])
    assert model.clip_grad_norm(max_grad_norm=1.0) == pytest.approx(0.707107, abs=1e-6)
    assert w.grad.flatten().tolist() == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize("engine", ENGINES)
def test_B03_a_short_window_is_divided_by_what_it_held(engine):
    """Two of four backwards, then the end of the data: as one batch of the two, and nothing is left for the next window."""
    model, w = two_words(engine)
    for _ in range(2):
        model.forward_backward([row([1])], gradient_accumulation_steps=4)
        assert model.clip_grad_and_step() is None
    assert model.flush(max_grad_norm=10.0) == pytest.approx(0.707107, abs=1e-6)
    assert w.flatten().tolist() == pytest.approx([-0.5, 0.5])
    assert w.grad is None
    assert model.flush() is None and w.flatten().tolist() == pytest.approx([-0.5, 0.5])
    before = w.detach().clone()
    for _ in range(4):
        model.forward_backward([row([1])])
    assert model.sessions[""].window.weight == 4
    assert model.clip_grad_and_step(10.0) is not None
    p = torch.softmax(before, 0).flatten()
    assert (before - w.detach()).flatten().tolist() == pytest.approx([float(p[0]), float(p[1]) - 1])


def test_B04_ranks_share_one_divisor():
    """This rank has one token, its peer three: the update is that of all four tokens in one process."""
    module = TwoWords()
    peer = torch.tensor([[1.5], [-1.5]])
    model = session_model(module, lambda m: OneOfTwoRanks(m, [3.0], [peer]))
    model.set_optimizer("sgd", lr=1.0, weight_decay=0.0)
    model.forward_backward(M1)
    assert model.step()
    assert module.w.flatten().tolist() == pytest.approx([-0.25, 0.25])


def test_a_backend_that_averages_is_made_good_for():
    """DDP hands out the mean over ranks: multiplied by the ranks, divided by the weight."""
    module = TwoWords()
    engine = OneOfTwoRanks(module, [3.0])
    engine.grad_divisor = 2
    model = session_model(module, lambda m: engine)
    model.set_optimizer("sgd", lr=1.0, weight_decay=0.0)
    model.forward_backward(M1)
    module.w.grad = (module.w.grad + torch.tensor([[1.5], [-1.5]])) / 2
    assert model.step()
    assert module.w.flatten().tolist() == pytest.approx([-0.25, 0.25])


def test_flush_takes_part_with_an_empty_window_while_a_peer_has_one():
    module = TwoWords()
    model = session_model(module, lambda m: OneOfTwoRanks(m, [1.0, 3.0], [torch.tensor([[1.5], [-1.5]])]))
    model.set_optimizer("sgd", lr=1.0, weight_decay=0.0)
    assert model.flush(10.0) == pytest.approx(0.707107, abs=1e-6)
    assert module.w.flatten().tolist() == pytest.approx([-0.5, 0.5])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("loss", "kwargs"), LOSSES)
def test_many_micro_batches_equal_one(loss, kwargs, engine):
    """Unequal rows and token counts, cut anywhere: the gradients of the window are those of one batch."""
    rows = random_rows([5, 2, 9, 1, 4, 7], masked=0.4)

    def gradients(*calls, size=None):
        torch.manual_seed(3)
        module = TinyLM()
        model = session_model(module, engine)
        model.set_loss(loss, **kwargs)
        model.set_optimizer("sgd", lr=0.0)
        for part in calls:
            model.forward_backward(part, micro_batch_size=size, gradient_accumulation_steps=len(calls))
        model.clip_grad_norm(math.inf)
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    whole = gradients(rows)
    assert whole.norm() > 0
    for split in (gradients(rows, size=1), gradients(rows, size=4), gradients(rows[:1], rows[1:4], rows[4:], size=2)):
        assert (split - whole).norm() / whole.norm() < 1e-6


def test_both_shapes_of_schedule_give_the_same_weights():
    """A loop that splits a step, and a schedule that calls back: the same training to 1e-12 in float64."""
    batches = [random_rows([4, 6, 3, 8], seed=s) for s in range(6)]

    def train(engine):
        torch.manual_seed(5)
        module = TinyLM().double()
        model = session_model(module, engine)
        model.set_optimizer("adamw", lr=1e-2)
        model.set_lr_scheduler("cosine_warmup", num_warmup_steps=1, num_training_steps=5)
        model.add_metric("loss")
        model.add_metric("accuracy")
        for batch in batches:
            model.forward_backward(batch, micro_batch_size=1)
            model.clip_grad_and_step(0.5, gradient_accumulation_steps=2)
        return model.get_state_dict(), model.calculate_metric(), model.forward_only(batches[0], micro_batch_size=3)

    (a, metrics_a, out_a), (b, metrics_b, out_b) = train(ToyEngine), train(CallbackEngine)
    torch.manual_seed(5)
    assert not torch.equal(a["embed.weight"], TinyLM().double().embed.weight)
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-12)
    assert metrics_a == pytest.approx(metrics_b)
    torch.testing.assert_close(out_a.logits, out_b.logits, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------ verbs on windows


def test_verbs_do_nothing_inside_a_window_and_act_once_at_its_end():
    model, w = two_words()
    model.set_lr_scheduler("constant")
    model.forward_backward([row([1])], gradient_accumulation_steps=2)
    assert (model.clip_grad_norm(), model.step(), model.lr_step(), model.zero_grad()) == (None, False, False, False)
    assert w.grad is not None and w.flatten().tolist() == [0, 0]
    model.forward_backward([row([1])])
    assert model.lr_step() is False, "before an update"
    assert model.clip_grad_norm(10.0) == pytest.approx(0.707107, abs=1e-6)
    assert (model.clip_grad_norm(), model.step(), model.step()) == (None, True, False)
    assert (model.zero_grad(), model.zero_grad(), model.lr_step(), model.lr_step()) == (True, False, True, False)
    assert w.flatten().tolist() == pytest.approx([-0.5, 0.5])
    assert model.sessions[""].cur_step == 1


def test_step_without_clipping_normalises_too():
    model, w = two_words()
    model.forward_backward([row([1] * 8)])
    assert model.step()
    assert w.flatten().tolist() == pytest.approx([-0.5, 0.5])


def test_gradients_are_cleared_for_the_next_window_when_zero_grad_was_left_out():
    model, w = two_words(lr=0.0)
    for _ in range(3):
        model.forward_backward([row([1])])
        assert w.grad.flatten().tolist() == pytest.approx([0.5, -0.5])
        assert model.step()


def test_a_window_that_nobody_touched_is_divided_by_all_it_held():
    model, w = two_words()
    for _ in range(3):
        model.forward_backward([row([1])], gradient_accumulation_steps=2)
    assert seen(model, w) == pytest.approx([0.5, -0.5])


def test_backward_between_clip_and_step_is_refused_before_anything_changes():
    model, w = two_words()
    model.forward_backward(M1)
    model.clip_grad_norm()
    before = w.grad.clone()
    with pytest.raises(WindowNotStepped, match=r"step\(\).*zero_grad\(\)"):
        model.forward_backward(M2)
    assert torch.equal(w.grad, before)
    model.forward(M2)
    with pytest.raises(WindowNotStepped):
        model.backward()
    assert torch.equal(w.grad, before)
    assert model.step()


def test_another_size_while_a_window_is_open_shows_both_and_changes_nothing():
    model, w = two_words()
    model.forward_backward(M1, gradient_accumulation_steps=4)
    before = w.grad.clone()
    for verb in (model.step, model.lr_step, model.zero_grad, lambda **size: model.forward_backward(M2, **size)):
        with pytest.raises(WindowSizeChanged, match=r"=2 .* of 4"):
            verb(gradient_accumulation_steps=2)
    assert torch.equal(w.grad, before) and model.sessions[""].window.count == 1


def test_drop_gives_up_an_open_window():
    model, w = two_words()
    assert model.zero_grad(drop=True) is False
    model.forward_backward(M1, gradient_accumulation_steps=2)
    assert model.zero_grad(drop=True) is True
    assert w.grad is None
    for _ in range(2):
        model.forward_backward(M2)
    assert seen(model, w) == pytest.approx([0.5, -0.5])


def test_verbs_that_update_need_an_optimizer():
    model = session_model(TwoWords())
    model.forward_backward(M1)
    for verb in (model.step, model.clip_grad_norm, model.clip_grad_and_step, model.flush):
        with pytest.raises(NoOptimizer, match="set_optimizer"):
            verb()
    assert model.zero_grad() is True


def test_gradients_synchronise_only_where_a_window_may_close():
    model, _ = two_words()
    syncs = []
    real = model.engine.backward
    model.engine.backward = lambda loss, sync=True: (syncs.append(sync), real(loss))
    model.forward_backward(M1 + M2, micro_batch_size=1)  # size not known yet: at each call's end
    assert syncs == [False, True]
    model.zero_grad(drop=True)
    syncs.clear()
    for _ in range(3):
        model.forward_backward(M1, gradient_accumulation_steps=3)
    assert syncs == [False, False, True]


# ------------------------------------------------------------------------------------------------ numbers that are none


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_B32_a_window_without_a_label_makes_no_update(engine, optimizer, caplog):
    """Loss 0, a backward that works, weights bit for bit as before, no step of the schedule, one warning."""
    model, w = two_words(engine, optimizer=optimizer)
    model.set_lr_scheduler("linear_warmup", num_training_steps=10)
    w.data.fill_(0.3)
    logging.getLogger("twinkle").propagate = True
    with caplog.at_level(logging.WARNING, "twinkle"):
        assert float(model.forward_backward([row([-100, -100])])) == 0.0
        assert model.clip_grad_and_step() is None
    assert len(caplog.records) == 1 and "-100" in caplog.text
    assert torch.equal(w, torch.full_like(w, 0.3)) and w.grad is None
    session = model.sessions[""]
    assert (session.cur_step, session.skipped_steps, session.scheduler.last_epoch) == (0, 1, 0)
    model.forward_backward(M1)
    assert model.clip_grad_and_step() is not None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", [0, 1])
def test_B32_a_micro_batch_without_a_label_does_not_dilute(engine, order):
    """Beside two tokens of target 1 the masked row counts nothing, before them or after."""
    rows = [row([-100, -100]), row([1, 1])][:: -1 if order else 1]
    model, w = two_words(engine)
    for one in rows:
        model.forward_backward([one], gradient_accumulation_steps=2)
    assert seen(model, w) == pytest.approx([0.5, -0.5])
    model, w = two_words(engine)
    model.forward_backward(rows, micro_batch_size=1)
    assert seen(model, w) == pytest.approx([0.5, -0.5])


def two_numbers(inputs, outputs):
    """A loss with the gradients 3 and 4."""
    w = outputs.logits
    return 3 * w[0, 0, 0] + 4 * w[0, 0, 1]


@pytest.mark.parametrize("verbs", ["apart", "together", "twice"])
def test_B30_clipping_acts_on_unscaled_gradients(verbs):
    """Gradients (3, 4) under a loss scale of 1024: the norm is 5, and a second clip changes nothing."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, w = two_words(scaler=scaler)
    model.set_loss(two_numbers)
    model.forward_backward(M1)
    assert w.grad.flatten().tolist() == pytest.approx([3072, 4096])
    if verbs == "together":
        assert model.clip_grad_and_step(1.0) == pytest.approx(5.0)
    else:
        assert model.clip_grad_norm(1.0) == pytest.approx(5.0)
        if verbs == "twice":
            assert model.clip_grad_norm(1.0) is None
        assert model.step()
    assert w.flatten().tolist() == pytest.approx([-0.6, -0.8], abs=1e-4)


def test_an_overflow_skips_the_update_lowers_the_scale_and_holds_the_schedule():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, w = two_words(scaler=scaler)
    model.set_lr_scheduler("linear_warmup", num_training_steps=10)
    model.add_metric("train", True)
    model.set_loss(lambda inputs, outputs: outputs.logits.sum() * torch.inf)
    model.forward_backward(M1)
    assert model.clip_grad_and_step() == math.inf
    session = model.sessions[""]
    assert w.flatten().tolist() == [0, 0] and w.grad is None
    assert (session.cur_step, session.skipped_steps, session.scheduler.last_epoch) == (0, 1, 0)
    assert scaler.get_scale() == 512.0
    model.set_loss(two_numbers)
    model.forward_backward(M1)
    assert model.clip_grad_and_step(1.0) == pytest.approx(5.0)
    assert session.cur_step == 1 and model.calculate_metric()["skipped"] == 1


def test_an_open_window_of_another_adapter_follows_the_loss_scale():
    """One scaler, two adapters: when the scale changes between a window's backwards, what it holds is brought along."""

    def run(interrupted):
        module = ToyLinear()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model = SessionModel(ToyEngine(module, scaler=scaler), ToyAdapters(module))
        for name in ("a", "b"):
            model.add_adapter_to_model(name, 1.0)
            model.set_optimizer("sgd", lr=1.0, adapter_name=name)
        model.set_loss("mse", adapter_name="")
        model.set_loss(lambda inputs, outputs: outputs["values"].sum() * torch.inf, adapter_name="b")
        model.sessions["b"].loss.needs = frozenset({"values"})
        for y in (4, 5):
            model.forward_backward([row([y], [1])], adapter_name="a", gradient_accumulation_steps=2)
            if interrupted and y == 4:
                model.forward_backward([row([y], [1])], adapter_name="b")
                assert model.clip_grad_and_step(adapter_name="b") == math.inf
        assert scaler.get_scale() == (512.0 if interrupted else 1024.0)
        return model.clip_grad_norm(math.inf, adapter_name="a")

    assert run(True) == run(False) > 0


def test_a_window_given_up_after_clipping_leaves_the_scaler_usable():
    model, w = two_words(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    model.set_loss(two_numbers)
    model.forward_backward(M1)
    model.clip_grad_norm(1.0)
    assert model.zero_grad()
    model.forward_backward(M1)
    assert model.clip_grad_and_step(1.0) == pytest.approx(5.0)
    assert w.flatten().tolist() == pytest.approx([-0.6, -0.8], abs=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_gradients_raise_and_leave_the_weights(engine):
    model, w = two_words(engine, optimizer="adamw")
    model.forward_backward(M1)
    model.clip_grad_and_step()
    before, state = w.detach().clone(), {k: v.clone() for k, v in model.sessions[""].optimizer.state[w].items()}
    model.set_loss(lambda inputs, outputs: outputs.logits.sum() * torch.nan)
    loss = model.forward_backward(M1)
    assert torch.isnan(loss), "a loss that is NaN is not hidden"
    with pytest.raises(NonFiniteGradients, match=r"output_layer.weight.*last loss: nan"):
        model.clip_grad_and_step()
    assert torch.equal(w, before) and w.grad is None and model.sessions[""].window.count == 0
    assert all(torch.equal(v, state[k]) for k, v in model.sessions[""].optimizer.state[w].items())
    model.set_loss("cross_entropy")
    model.forward_backward(M1)
    assert model.clip_grad_and_step() is not None


def test_skip_counts_and_goes_on():
    model, w = two_words(on_nonfinite="skip")
    model.set_lr_scheduler("linear_warmup", num_training_steps=10)
    model.set_loss(lambda inputs, outputs: outputs.logits.sum() * torch.nan)
    model.forward_backward(M1)
    assert model.step() is False and model.lr_step() is False and model.zero_grad() is True
    assert w.flatten().tolist() == [0, 0] and model.sessions[""].skipped_steps == 1


def test_a_norm_that_overflows_is_no_gradient_that_does():
    model, w = two_words()
    model.set_loss(lambda inputs, outputs: outputs.logits.sum() * 1e30)
    model.forward_backward(M1)
    assert model.step(), "finite gradients of 1e30, whose squares are not"
    assert w.flatten().tolist() == pytest.approx([-1e30, -1e30])


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_weight_on_a_device_that_is_no_count_is_refused_when_its_window_closes(monkeypatch, bad):
    """Looking at it earlier would wait for the device. The other calls' weights must not outweigh it, and the next window
    starts with nothing of this one."""
    monkeypatch.setattr(losses, "_checked_weight", lambda name, weight: losses.marked(weight))  # as of any device but the CPU
    model, w = two_words()
    weights = iter([torch.tensor(5), torch.tensor(bad), torch.tensor(7)])
    model.set_loss(lambda inputs, outputs: LossOutput(outputs.logits.sum(), next(weights)))
    for _ in range(3):
        model.forward_backward(M1, gradient_accumulation_steps=3)
    with pytest.raises(BadLossWeight, match="negative"):
        model.step()
    assert w.grad is None and model.sessions[""].window.count == 0
    model.set_loss("cross_entropy")
    for _ in range(3):
        model.forward_backward(M1)
    assert seen(model, w) == pytest.approx([-0.5, 0.5])


def test_marking_a_weight_keeps_counts_exact():
    for count in (0, 2**24 + 1, 2.5):
        assert losses.marked(torch.tensor(count)).item() == count
    assert losses.marked(torch.tensor(-3)).isnan()


NO_COUNTS = [
    None, "3", -1.0, math.nan, math.inf, torch.ones(3), torch.tensor(-1), torch.tensor(math.nan), torch.tensor(math.inf),
]  # fmt: skip


@pytest.mark.parametrize("weight", NO_COUNTS, ids=str)
@pytest.mark.parametrize("split", [False, True])
def test_a_weight_that_cannot_be_counted_is_told_before_the_backward(weight, split):
    model, w = two_words()
    model.set_loss(lambda inputs, outputs, *, k=weight: LossOutput(outputs.logits.sum(), k))
    with pytest.raises(BadLossResult, match="weight"):
        if split:
            model.forward(M1)
            model.backward()
        else:
            model.forward_backward(M1)
    assert w.grad is None and model.sessions[""].window.count == 0
    model.set_loss("cross_entropy")
    model.forward_backward(M1)
    assert seen(model, w) == pytest.approx([-0.5, 0.5])


def test_a_loss_without_a_graph_is_told():
    model, _ = two_words()
    model.set_loss(lambda inputs, outputs: outputs.logits.detach().sum())
    with pytest.raises(BadLossResult, match="no graph"):
        model.forward_backward(M1)
    model.forward(M1)
    with pytest.raises(BadLossResult, match="no graph"):
        model.backward()


@pytest.mark.parametrize("bound", [-1.0, 0, math.nan, None, "1", True], ids=str)
@pytest.mark.parametrize("verb", ["clip_grad_norm", "clip_grad_and_step", "flush"])
def test_a_bound_that_is_none_is_told_before_gradients_are_touched(bound, verb):
    model, w = two_words()
    model.forward_backward([row([1, 1])])
    before = w.grad.clone()
    with pytest.raises(BadArgument, match="max_grad_norm"):
        getattr(model, verb)(bound)
    with pytest.raises(BadArgument, match="norm_type"):
        getattr(model, verb)(1.0, bound)
    assert torch.equal(w.grad, before) and not model.sessions[""].window.normalised
    assert getattr(model, verb)(math.inf) == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf, None, "1"], ids=str)
def test_a_temperature_that_divides_nothing_is_told(temperature):
    model, _ = two_words()
    for verb in (model.forward, model.forward_only, model.forward_backward):
        with pytest.raises(BadArgument, match="temperature"):
            verb(M1, temperature=temperature)
    assert not model.engine.calls


def two_tenants_fp16():
    module = ToyLinear()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = SessionModel(ToyEngine(module, scaler=scaler), ToyAdapters(module))
    for name in ("a", "b"):
        model.add_adapter_to_model(name, 1.0)
        model.set_optimizer("sgd", lr=1.0, weight_decay=0.0, adapter_name=name)
    model.set_loss("mse", adapter_name="")
    return model, module


@pytest.mark.parametrize("overflow", [False, True])
def test_two_adapters_of_one_scaler_take_their_verbs_apart(overflow):
    """Clip a, clip b, step a, step b: b is divided by the scale once, whatever became of a."""
    model, module = two_tenants_fp16()
    model.forward_backward([row([4], [1])], adapter_name="b")  # (3 - 4)^2: gradients -2
    if overflow:
        model.set_loss(lambda inputs, outputs: outputs["values"].sum() * torch.inf, adapter_name="a")
        model.sessions["a"].loss.needs = frozenset({"values"})
    model.forward_backward([row([4], [1])], adapter_name="a")
    model.clip_grad_norm(math.inf, adapter_name="a")
    assert model.clip_grad_norm(math.inf, adapter_name="b") == pytest.approx(math.sqrt(8))
    assert model.step(adapter_name="a") is not overflow
    assert model.step(adapter_name="b")
    assert module.lora["b"]["B"].item() == pytest.approx(3.0)
    assert module.lora["a"]["B"].item() == pytest.approx(1.0 if overflow else 3.0)
    assert model.engine.scaler.get_scale() == (512.0 if overflow else 1024.0)


def test_gradients_that_overflow_by_normalising_are_not_stepped_with():
    """The scaler saw them finite; the weights must still be left alone."""
    model, w = two_words(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    model.set_loss(lambda inputs, outputs: LossOutput(outputs.logits.sum(), 1e-40))
    model.forward_backward(M1)
    assert model.clip_grad_norm(math.inf) == math.inf and not model.step()
    assert w.flatten().tolist() == [0, 0]


def test_what_a_metric_raises_costs_the_schedule_no_step():
    class Bad(LossMetric):
        def on_step(self, result):
            raise ValueError("metric")

    model, _ = two_words()
    model.set_lr_scheduler("step_lr", step_size=1, gamma=0.1)
    model.add_metric(Bad, True)
    for lr in (0.1, 0.01):
        model.forward_backward(M1)
        with pytest.raises(ValueError, match="metric"):
            model.clip_grad_and_step()
        assert model.sessions[""].optimizer.param_groups[0]["lr"] == pytest.approx(lr)
    assert model.sessions[""].cur_step == 2


# ------------------------------------------------------------------------------------------------ losses that fail


def test_the_returned_loss_is_detached_and_a_mean_over_all_rows():
    model, _ = two_words()
    loss = model.forward_backward(M1 + M2, micro_batch_size=1)
    assert loss.shape == () and not loss.requires_grad
    assert float(loss) == pytest.approx(math.log(2))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_fails_at_once_leaves_the_window(engine):
    model, w = two_words(engine)
    model.forward_backward(M1, gradient_accumulation_steps=2)
    before = w.grad.clone()

    def broken(inputs, outputs):
        raise ZeroDivisionError("mine")

    model.set_loss(broken)
    with pytest.raises(ZeroDivisionError) as caught:
        model.forward_backward(M2)
    assert not hasattr(caught.value, "__notes__")
    assert torch.equal(w.grad, before) and model.sessions[""].window.count == 1
    model.set_loss("cross_entropy")
    model.forward_backward(M2)
    assert seen(model, w) == pytest.approx([0.25, -0.25])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_fails_after_a_backward_drops_the_window_and_says_so(engine):
    """Half of a call's gradients are no batch's gradients: nothing of them may be counted silently."""
    model, w = two_words(engine)
    model.forward_backward(M1, gradient_accumulation_steps=2)
    calls = []

    def broken(inputs, outputs):
        calls.append(1)
        if len(calls) == 4:
            raise ZeroDivisionError("mine")
        return outputs.logits.sum()

    model.set_loss(broken)
    with pytest.raises(ZeroDivisionError) as caught:
        model.forward_backward([row([1])] * 4, micro_batch_size=1)
    assert any("dropped" in note for note in caught.value.__notes__)
    assert w.grad is None and model.sessions[""].window.count == 0
    model.set_loss("cross_entropy")
    for call in (M1, M2):
        model.forward_backward(call)
    assert seen(model, w) == pytest.approx([0.25, -0.25])


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda o: 1.0, "float"),
        (lambda o: o.logits, r"a tensor \[1, 1, 2\]"),
        (lambda o: LossOutput(o.logits, 1), "whose sum is a tensor"),
        (lambda o: None, "NoneType"),
    ],
)
def test_what_a_loss_returns_is_checked(result, text):
    model, w = two_words()
    model.set_loss(lambda inputs, outputs: result(outputs))
    with pytest.raises(BadLossResult, match=text):
        model.forward_backward(M1)
    assert w.grad is None and model.sessions[""].window.count == 0


@pytest.mark.parametrize(
    ("read", "declared"),
    [
        (lambda outputs: -outputs.logps.sum(), {"logps"}),
        (lambda outputs: -outputs["logps"].sum(), {"logps"}),
        (lambda outputs: -outputs.get("logps").sum(), {"logps"}),
        (lambda outputs: (outputs.logits.sum(-1) - outputs.logps).sum(), {"logits", "logps"}),
    ],
    ids=["attribute", "key", "get", "operand"],
)
def test_a_function_that_reads_what_it_does_not_declare_is_told_how_to(read, declared):
    model, w = two_words()

    def nll(inputs, outputs):
        return read(outputs)

    model.set_loss(nll)
    with pytest.raises(NotDeclared, match=r"nll read outputs.logps.*its needs are logits \(all that a function") as caught:
        model.forward_backward(M1)
    wanted = ", ".join(repr(field) for field in sorted(declared))
    assert f"nll.needs = {{{wanted}}}" in str(caught.value) and caught.value.__cause__ is not None
    assert w.grad is None and model.sessions[""].window.count == 0
    nll.needs = declared
    model.set_loss(nll)
    model.forward_backward(M1)


def test_a_class_that_reads_what_it_does_not_declare_is_told_so():
    class Nll(Loss):
        def __call__(self, inputs, outputs):
            return LossOutput(outputs.logps.sum() + outputs.entropies.sum(), 1)

    model, _ = two_words()
    model.set_loss(Nll())
    with pytest.raises(NotDeclared, match=r"Nll read outputs.entropies") as caught:
        model.forward_backward(M1)
    assert "class: needs = frozenset({'entropies', 'logps'})" in str(caught.value)
    model.forward(M1)
    with pytest.raises(NotDeclared):
        model.calculate_loss()


def test_a_loss_may_ask_whether_a_field_is_there_and_fail_for_reasons_of_its_own():
    model, _ = two_words()

    def curious(inputs, outputs, *, fail=False):
        assert isinstance(outputs, ModelOutput) and copy.copy(outputs).keys() == outputs.keys() == {"logits"}
        if outputs.logps is None and outputs.get("hidden") is None and fail:
            raise ZeroDivisionError("mine")
        with pytest.raises(AttributeError, match="has no 'logit'"):
            _ = outputs.logit
        outputs["mine"] = 1
        return outputs.logits.sum()

    model.set_loss(curious)
    model.forward_backward(M1)
    with pytest.raises(ZeroDivisionError, match="mine"):
        model.forward_backward(M1, fail=True)

    def odd(inputs, outputs):
        return [][outputs.logits.dim()]

    model.set_loss(odd)
    with pytest.raises(IndexError):
        model.forward_backward(M1)


def test_loss_arguments_are_checked_before_anything_runs():
    model, _ = two_words()

    def scaled(inputs, outputs, *, factor):
        return outputs.logits.sum() * factor

    model.set_loss(scaled)
    with pytest.raises(WrongArgument, match=r"no parameter 'factr'. Did you mean 'factor'"):
        model.forward_backward(M1, factr=2)
    with pytest.raises(TypeError, match="factor"):
        model.forward_backward(M1)
    assert model.engine.calls == []
    model.forward_backward(M1, factor=2.0)


@pytest.mark.parametrize("form", [torch.tensor, np.array, list, lambda x: [torch.tensor([1.0, v]) for v in x]])
def test_loss_arguments_that_are_no_numbers(form):
    """A NaN would reach every weight that the loss reaches."""
    model, _ = two_words()

    def scaled(inputs, outputs, *, weights):
        return outputs.logits.sum() * weights[0]

    model.set_loss(scaled)
    with pytest.raises(BadArgument, match="weights=nan: it must be numbers, and entry 2 is none"):
        model.forward_backward([row([0]), row([1]), row([1])], weights=form([1.0, 2.0, math.nan]))
    assert model.engine.calls == []


@pytest.mark.parametrize("form", [torch.tensor, np.array, list, lambda x: [torch.tensor([1.0, v]) for v in x]])
@pytest.mark.parametrize("masked", [False, True])
def test_loss_arguments_that_are_not_finite(form, masked):
    """An infinite one makes NaN of a difference. -inf is right where a loss says so: of words that are ruled out."""
    model, _ = two_words()

    def scaled(inputs, outputs, *, weights, factor=1.0):
        return outputs.logits.sum() * 1.0

    if masked:
        scaled.masked_args = {"weights"}
    model.set_loss(scaled)
    rows = [row([0]), row([1]), row([1])]
    with pytest.raises(BadArgument, match="weights=inf: it must be finite numbers, and entry 1 is not"):
        model.forward_backward(rows, weights=form([-math.inf if masked else 1.0, math.inf, 2.0]))
    with pytest.raises(BadArgument, match="weights=nan: it must be numbers, and entry 2 is none"):
        model.forward_backward(rows, weights=form([1.0, -math.inf if masked else 1.0, math.nan]))
    given = form([1.0, -math.inf, 2.0])
    if not masked:
        with pytest.raises(
            BadArgument, match=r"weights=-inf.*entry 1 is not; a loss that takes -inf names the argument in its"
        ):
            model.forward_backward(rows, weights=given)
    assert model.engine.calls == []
    model.forward_backward(rows, weights=given if masked else form([1.0, 2.0, 3.0]), factor=math.inf)  # a bound, not data
    assert len(model.engine.calls) == 1


def test_loss_arguments_of_the_rows_length_are_cut_with_the_rows():
    model, _ = two_words()
    got = []

    def weighted(inputs, outputs, *, weights, names, whole, factor):
        got.append((weights.tolist(), names, whole, factor))
        return outputs.logits.sum()

    model.set_loss(weighted)
    rows = [row([0]), row([1]), row([1])]
    model.forward_backward(
        rows, micro_batch_size=2, weights=torch.tensor([1.0, 2.0, 3.0]), names=["a", "b", "c"], whole=[7, 8], factor="abc"
    )
    assert got == [([1.0, 2.0], ["a", "b"], [7, 8], "abc"), ([3.0], ["c"], [7, 8], "abc")]


def test_a_function_that_returns_a_mean_weighs_one_for_each_micro_batch():
    model, _ = two_words()
    model.set_loss(two_numbers)
    for _ in range(2):
        model.forward_backward(M1, gradient_accumulation_steps=2)
    assert model.clip_grad_norm(math.inf) == pytest.approx(5.0)
    assert "not exact under splitting" in model.get_train_configs()
