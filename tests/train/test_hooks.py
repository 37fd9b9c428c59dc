"""The hooks of training, over the real verbs: each where its text says, once, and apart from the others."""

from __future__ import annotations

import inspect
import logging
import math

import pytest
import torch

from twinkle_core import hookimpl, plugins
from twinkle_core.errors import HookFailed, NonFiniteGradients
from twinkle_core.testing.adapters import ToyAdapters, ToyLinear
from twinkle_core.testing.engines import OneOfTwoRanks, ToyEngine, session_model
from twinkle_core.testing.toys import TinyLM, TwoWords, random_rows, row
from twinkle_core.train.verbs import SessionModel

ROWS = random_rows([4, 6, 3])
WEIGHT = sum(label != -100 for r in ROWS for label in r["labels"])
NOTHING = [row([-100, -100])]


class Recorder:
    """Notes each hook of training as a short tuple."""

    def __init__(self):
        self.heard = []

    def names(self):
        return [event[0] for event in self.heard]

    @hookimpl
    def twinkle_model_created(self, model):
        self.heard.append(("created", model.get_train_configs() != ""))

    @hookimpl
    def twinkle_before_step(self, session):
        self.heard.append(("before", session.cur_step))

    @hookimpl
    def twinkle_after_step(self, session, result):
        self.heard.append(("after", result.acted, result.cur_step, result.weight))

    @hookimpl
    def twinkle_metrics_logged(self, step, metrics, session, is_training):
        self.heard.append(("metrics", step, sorted(metrics), session.name, is_training))

    @hookimpl
    def twinkle_checkpoint_saved(self, path, session):
        self.heard.append(("saved", path, session.name))

    @hookimpl
    def twinkle_checkpoint_loaded(self, path, session):
        self.heard.append(("loaded", path, session.cur_step))


@pytest.fixture
def heard():
    recorder = Recorder()
    with plugins.listening(recorder):
        yield recorder.heard


def fresh(module=None, optimizer="adamw", **engine):
    torch.manual_seed(0)
    model = session_model(module or TinyLM(), **engine)
    model.set_optimizer(optimizer, lr=1e-2)
    return model


def test_the_order_of_a_run(heard, tmp_path):
    """Two windows of two, a read, a short one, a checkpoint, evaluation, and a second model that goes on from it."""
    model = fresh()
    model.add_metric("loss")
    for _ in range(4):
        model.forward_backward(ROWS, gradient_accumulation_steps=2)
        model.clip_grad_and_step()
    model.calculate_metric()
    model.forward_backward(ROWS)
    model.flush()
    assert model.flush() is None  # nothing is open
    path = model.save("x", tmp_path, save_optimizer=True)
    model.forward_only(ROWS)
    model.calculate_metric(is_training=False)
    other = fresh()
    other.resume_from_checkpoint(path)
    other.load("x", tmp_path)
    assert heard == [
        ("created", True),
        ("before", 0),
        ("after", True, 1, 2 * WEIGHT),
        ("before", 1),
        ("after", True, 2, 2 * WEIGHT),
        ("metrics", 2, ["loss"], "", True),
        ("before", 2),
        ("after", True, 3, WEIGHT),
        ("saved", path, ""),
        ("metrics", 3, ["loss"], "", False),
        ("created", True),
        ("loaded", path, 3),
        ("loaded", path, 3),
    ]


def test_verb_by_verb_is_told_of_once(heard):
    model = fresh()
    del heard[:]
    model.forward(ROWS)
    model.calculate_loss()
    model.backward()
    assert heard == []
    model.clip_grad_norm()
    assert heard == []
    for _ in range(2):
        model.step()
        model.zero_grad()
        model.lr_step()
    assert heard == [("before", 0), ("after", True, 1, WEIGHT)]
    model.forward_backward(ROWS)
    model.step()
    model.clip_grad_and_step()
    assert heard[2:] == [("before", 1), ("after", True, 2, WEIGHT)]


@pytest.mark.parametrize(
    "close", ["clip_grad_and_step", "step", "clip_grad_norm", "flush"], ids=lambda verb: f"closed by {verb}"
)
def test_a_window_without_labels_has_no_step_and_is_told_of_once(heard, close):
    model = fresh()
    del heard[:]
    model.forward_backward(NOTHING)
    getattr(model, close)()
    model.clip_grad_and_step()
    assert heard == [("after", False, 0, 0.0)]


@pytest.mark.parametrize("drop", ["zero_grad", "drop", "load"])
def test_a_dropped_window_is_not_told_of(heard, drop, tmp_path):
    model = fresh()
    model.save("x", tmp_path)
    del heard[:]
    model.forward_backward(ROWS, gradient_accumulation_steps=2 if drop == "drop" else 1)
    if drop == "load":
        model.load("x", tmp_path)
    else:
        model.zero_grad(drop=drop == "drop")
    model.step()
    assert [event[0] for event in heard] == (["loaded"] if drop == "load" else [])


def test_an_update_that_is_skipped_is_a_step_that_did_not_act(heard):
    model = fresh(TwoWords(), "sgd", on_nonfinite="skip")
    del heard[:]
    model.forward_backward([row([1])])
    model.engine.module.w.grad.fill_(math.inf)
    model.clip_grad_and_step()
    assert heard == [("before", 0), ("after", False, 0, 1.0)]


def test_gradients_that_raise_are_not_a_step(heard):
    model = fresh(TwoWords(), "sgd")
    del heard[:]
    model.forward_backward([row([1])])
    model.engine.module.w.grad.fill_(math.inf)
    with pytest.raises(NonFiniteGradients):
        model.clip_grad_and_step()
    assert heard == []


def test_a_rank_with_an_empty_window_is_told_of_the_step_it_takes_part_in(heard):
    model = session_model(TwoWords(), lambda m: OneOfTwoRanks(m, [1.0, 3.0], [torch.tensor([[1.5], [-1.5]])]))
    model.set_optimizer("sgd", lr=1.0, weight_decay=0.0)
    del heard[:]
    model.flush()
    assert heard == [("before", 0), ("after", True, 1, 3.0)]


def test_the_session_is_that_of_the_adapter(heard, tmp_path):
    module = ToyLinear()
    model = SessionModel(ToyEngine(module), ToyAdapters(module))
    for name in "ab":
        model.add_adapter_to_model(name, 1)
        model.add_metric("loss", adapter_name=name)
    del heard[:]
    model.calculate_metric(adapter_name="b")
    path = model.save("x", tmp_path, adapter_name="a")
    assert heard == [("metrics", 0, [], "b", True), ("saved", path, "a")]


def test_before_a_step_gradients_are_complete_and_weights_as_they_were():
    seen = []

    class Looks:
        @hookimpl
        def twinkle_before_step(self, session):
            seen.append((w.detach().clone(), w.grad.clone(), session.window.grad_norm))

        @hookimpl
        def twinkle_after_step(self):
            seen.append((w.detach().clone(), w.grad, None))

    model = fresh(TwoWords(), "sgd")
    w = model.engine.module.w
    with plugins.listening(Looks()):
        model.forward_backward([row([1] * 4)], gradient_accumulation_steps=2)
        model.forward_backward([row([1] * 12)])
        model.clip_grad_and_step(max_grad_norm=0.1)
    (before, grad, norm), (after, cleared, _) = seen
    assert before.tolist() == [[0.0], [0.0]] and cleared is None
    assert norm == pytest.approx(math.sqrt(0.5)) and float(grad.norm()) == pytest.approx(0.1, rel=1e-4)
    assert torch.equal(after, w) and not torch.equal(after, before)


def test_the_optimizer_sees_what_a_listener_makes_of_the_gradients():
    class Doubles:
        @hookimpl
        def twinkle_before_step(self, session):
            for group in session.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(2)

    def weights(*listeners, lr):
        model = session_model(TwoWords())
        model.set_optimizer("sgd", lr=lr, weight_decay=0.0)
        with plugins.listening(*listeners):
            model.forward_backward([row([1])])
            model.step()
        return model.engine.module.w.flatten().tolist()

    assert weights(Doubles(), lr=0.5) == weights(lr=1.0) == pytest.approx([-0.5, 0.5])


def test_metrics_are_a_copy_that_cannot_be_changed(caplog):
    kept = []

    class Keeps:
        @hookimpl
        def twinkle_metrics_logged(self, metrics):
            kept.append(metrics)
            metrics["loss"] = 0.0

    model = fresh()
    model.add_metric("loss")
    model.forward_backward(ROWS)
    with plugins.listening(Keeps()):
        numbers = model.calculate_metric()
    loss = numbers.pop("loss")
    assert loss > 1 and kept[0]["loss"] == loss
    assert "does not support item assignment" in caplog.text


# ------------------------------------------------------------------------------------------------ failing listeners


def test_a_model_is_complete_when_it_is_announced():
    """Also one whose class does more after its base's constructor."""
    seen = []

    class Later(SessionModel):
        def __init__(self, size=3):
            module = ToyLinear()
            super().__init__(ToyEngine(module), ToyAdapters(module))
            self.manager = "there"

    class Hook:
        @hookimpl
        def twinkle_model_created(self, model):
            seen.append((type(model).__name__, model.manager))

    with plugins.listening(Hook()):
        Later()
    assert seen == [("Later", "there")]
    assert list(inspect.signature(Later).parameters) == ["size"]
    theirs = list(inspect.signature(SessionModel).parameters)
    assert theirs == ["engine", "adapters", "remote_group"]  # the last by remote_class


HOOKS = ["model_created", "before_step", "after_step", "metrics_logged", "checkpoint_saved", "checkpoint_loaded"]


def failing(hook):
    def fail(self):
        raise ValueError(f"in {hook}")

    return type("Fails", (), {f"twinkle_{hook}": hookimpl(fail, specname=f"twinkle_{hook}")})()


def train(folder, *listeners):
    """Every verb that calls a hook; the weights, what was heard by a recorder beside, and whether the run came to its end."""
    recorder = Recorder()
    with plugins.listening(recorder, *listeners):
        model = fresh()
        model.add_metric("loss")
        for _ in range(2):
            model.forward_backward(ROWS)
            model.clip_grad_and_step()
            model.calculate_metric()
        model.save("x", folder)
        model.load("x", folder)
    return model.get_state_dict(), recorder.heard


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("first", [True, False], ids=["called first", "called last"])
def test_a_listener_that_raises_is_one_warning_and_nothing_else(hook, first, tmp_path, caplog):
    weights, heard = train(tmp_path)
    caplog.clear()
    caplog.set_level(logging.WARNING, logger="twinkle")
    recorder, fails = Recorder(), failing(hook)
    same, beside = train(tmp_path, *((recorder, fails) if first else (fails, recorder)))
    assert [r.getMessage() for r in caplog.records] == [
        f"listener 'Fails' of this process failed in twinkle_{hook}: ValueError: in {hook}"
    ]
    assert beside == recorder.heard == heard and {name for name, *_ in heard} == {
        "created", "before", "after", "metrics", "saved", "loaded",
    }  # fmt: skip
    assert all(torch.equal(weights[key], same[key]) for key in weights)


@pytest.mark.parametrize("hook", HOOKS)
def test_strictly_it_raises_out_of_the_verb(hook, tmp_path, monkeypatch):
    monkeypatch.setenv("TWINKLE_STRICT_PLUGINS", "1")
    with pytest.raises(HookFailed, match=f"failed in twinkle_{hook}: ValueError: in {hook}"):
        train(tmp_path, failing(hook))


@pytest.mark.parametrize("hook", ["before_step", "after_step"])
def test_training_can_go_on_after_a_strict_failure(hook, tmp_path, monkeypatch):
    """Before a step: the same window can be stepped again. After it: the window is closed, and counts once."""
    plain, model = fresh(), fresh()
    for m in (plain, model):
        m.set_lr_scheduler("linear_warmup", num_training_steps=10)
        m.forward_backward(ROWS)
    plain.clip_grad_and_step()
    monkeypatch.setenv("TWINKLE_STRICT_PLUGINS", "1")
    with pytest.raises(HookFailed), plugins.listening(failing(hook)):
        model.clip_grad_and_step()
    model.clip_grad_and_step()
    assert model.sessions[""].cur_step == 1
    assert model.sessions[""].scheduler.get_last_lr() == plain.sessions[""].scheduler.get_last_lr()
    for key, value in plain.get_state_dict().items():
        assert torch.equal(value, model.get_state_dict()[key])
