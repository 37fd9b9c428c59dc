"""set_*, optimizers, schedules, metrics, configuration."""

from __future__ import annotations

import json
import logging
import math

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import (
    AlreadyBuilt,
    BadArgument,
    BadMetricResult,
    BadNeeds,
    BadOptimizer,
    BadScheduler,
    NoOptimizer,
    NotA,
    NotInOptimizer,
    NoTrainableParameters,
    ReservedArgument,
    UnknownName,
    WindowNotStepped,
    WrongArgument,
)
from twinkle_core.losses.cross_entropy import CrossEntropyLoss
from twinkle_core.metrics.accuracy import AccuracyMetric
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM, random_rows
from twinkle_core.train import optim

ROWS = random_rows([3, 5])
OPTIMIZERS = [
    "adamw", "adam", "sgd", "adagrad", "adadelta", "adafactor", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop",
]  # fmt: skip


@pytest.fixture
def model():
    return session_model(TinyLM())


# ------------------------------------------------------------------------------------------------ names and keywords


@pytest.mark.parametrize("verb", ["set_loss", "set_optimizer", "set_template", "set_processor", "add_metric", "apply_patch"])
def test_unknown_names_are_told(model, verb):
    with pytest.raises(UnknownName, match=r"unknown .* 'nonsense'"):
        getattr(model, verb)("nonsense")


@pytest.mark.parametrize(
    ("verb", "name", "kwargs", "near"),
    [
        ("set_loss", "cross_entropy", {"label_smoothin": 0.1}, "label_smoothing"),
        ("set_optimizer", "adamw", {"learning_rte": 1.0}, None),
        ("set_optimizer", "adamw", {"weight_dekay": 0.1}, "weight_decay"),
        ("set_lr_scheduler", "linear_warmup", {"num_training_step": 3}, "num_training_steps"),
        ("set_processor", "input", {"padding_fre": True}, "padding_free"),
        ("add_metric", "loss", {"x": 1}, None),
    ],
)
def test_misspelt_keywords_are_told_at_once(model, verb, name, kwargs, near):
    model.set_optimizer()
    with pytest.raises(WrongArgument, match=f"Did you mean '{near}'" if near else "has no parameter"):
        getattr(model, verb)(name, **kwargs)


def test_what_twinkle_fills_in_is_not_given(model):
    with pytest.raises(ReservedArgument, match="params"):
        model.set_optimizer("sgd", params=[])
    model.set_optimizer()
    with pytest.raises(TypeError, match="num_training_steps"):
        model.set_lr_scheduler("linear_warmup")


def test_objects_classes_and_functions(model):
    loss = CrossEntropyLoss()
    model.set_loss(loss)
    assert model.sessions[""].loss is loss
    with pytest.raises(AlreadyBuilt):
        model.set_loss(loss, label_smoothing=0.1)
    with pytest.raises(NotA):
        model.set_loss(dict)
    model.set_loss(CrossEntropyLoss, label_smoothing=0.1)
    assert model.sessions[""].loss.needs == {"logits", "labels"} and CrossEntropyLoss.needs == {"logps"}

    class Callable_:
        needs = ("logps",)

        def __call__(self, inputs, outputs):
            return outputs.logps.sum()

    model.set_loss(Callable_())
    assert isinstance(model.sessions[""].loss, Loss) and model.sessions[""].loss.needs == {"logps"}
    model.forward_backward(ROWS)


# ------------------------------------------------------------------------------------------------ optimizers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_trains_and_its_state_goes_there_and_back(name):
    module = TinyLM()
    model = session_model(module)
    model.set_optimizer(name)
    first = model.sessions[""].optimizer.param_groups[0]
    assert first["lr"] == 1e-5
    assert first.get("weight_decay", 0.01) == 0.01
    before = {k: v.clone() for k, v in model.get_state_dict().items()}
    for _ in range(2):
        model.forward_backward(ROWS)
        model.clip_grad_and_step()
    moved = [k for k, v in model.get_state_dict().items() if not torch.equal(v, before[k])]
    assert moved == [k for k, _ in module.named_parameters() if "value_head" not in k]

    parameters = dict(module.named_parameters())
    live = model.sessions[""].optimizer
    tensors, data = optim.state_by_name(live, parameters)
    again = optim.build(type(live), parameters, {})
    again.load_state_dict(optim.prepare_state(again, parameters, tensors, json.loads(json.dumps(data)), "x"))
    for p in parameters.values():
        assert live.state[p].keys() == again.state[p].keys()
        for key, value in live.state[p].items():
            same = torch.equal(value, again.state[p][key]) if isinstance(value, torch.Tensor) else value == again.state[p][key]
            assert same, key
    for a, b in zip(live.param_groups, again.param_groups, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}


def test_weight_decay_spares_biases_and_norms(model):
    model.set_optimizer("adamw", weight_decay=0.1)
    parameters = dict(model.engine.module.named_parameters())
    decayed, spared = optim.names_of(model.sessions[""].optimizer, parameters)
    assert sorted(decayed) == ["embed.weight", "mix.weight", "output_layer.weight", "value_head.weight"]
    assert sorted(spared) == ["mix.bias", "norm.bias", "norm.weight", "output_layer.bias", "value_head.bias"]
    assert [g["weight_decay"] for g in model.sessions[""].optimizer.param_groups] == [0.1, 0.0]


def test_an_optimizer_of_ones_own(model):
    own = torch.optim.SGD(model.engine.module.output_layer.parameters(), lr=0.5)
    model.set_optimizer(own)
    assert model.sessions[""].optimizer is own
    with pytest.raises(BadOptimizer, match="1 of its parameters"):
        model.set_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0))
    with pytest.raises(BadOptimizer, match="closure"):
        model.set_optimizer(torch.optim.LBFGS(model.engine.module.parameters()))
    with pytest.raises(BadOptimizer, match=r"not a torch.optim.Optimizer"):
        model.set_optimizer(object())
    assert model.sessions[""].optimizer is own


def test_what_an_optimizer_leaves_out_is_told_and_never_enters_a_later_window(model, caplog):
    """Gradients of parameters that nothing trains are cleared with all others: a later optimizer starts from one window."""
    module = model.engine.module
    with caplog.at_level(logging.WARNING, logger="twinkle"):
        model.set_optimizer(torch.optim.SGD(module.output_layer.parameters(), lr=0.0))
    assert "7 trainable parameter(s) are not in the optimizer" in caplog.text and "embed.weight" in caplog.text
    for _ in range(3):
        model.forward_backward(ROWS)
        model.clip_grad_and_step()
    assert all(p.grad is None for p in module.parameters())
    model.forward_backward(ROWS, gradient_accumulation_steps=2)
    model.set_optimizer("sgd", lr=0.0)
    model.forward_backward(ROWS)
    norm = model.clip_grad_norm(math.inf)
    model.zero_grad()
    model.forward_backward(ROWS, gradient_accumulation_steps=1)
    assert model.clip_grad_norm(math.inf) == pytest.approx(norm)


def test_what_is_unfrozen_after_the_optimizer_was_set_is_told_before_gradients_are_made(model):
    embed = model.engine.module.embed.weight
    embed.requires_grad_(False)
    model.set_optimizer("sgd", lr=0.1)
    model.forward_backward(ROWS)
    model.clip_grad_and_step()
    embed.requires_grad_(True)
    for verb in (lambda: model.forward_backward(ROWS), lambda: (model.forward(ROWS), model.backward())):
        with pytest.raises(NotInOptimizer, match=r"^embed.weight of the base model became trainable"):
            verb()
        assert all(p.grad is None for p in model.engine.module.parameters()) and not model.sessions[""].window.open
    model.sessions[""].optimizer.add_param_group({"params": [embed]})
    model.forward_backward(ROWS)
    assert embed.grad is not None
    model.clip_grad_and_step()
    assert embed.grad is None


def test_what_is_unfrozen_inside_a_window_waits_for_the_next_one(model):
    """The window's gradients of it would lack the backwards before, and be divided by the weight of all."""
    embed = model.engine.module.embed.weight
    embed.requires_grad_(False)
    model.set_optimizer("sgd", lr=0.0)
    model.forward_backward(ROWS, gradient_accumulation_steps=2)
    embed.requires_grad_(True)
    before = model.sessions[""].optimizer
    with pytest.raises(NotInOptimizer, match=r"inside a window: its 1 backward"):
        model.set_optimizer("sgd", lr=0.0)
    assert model.sessions[""].optimizer is before
    model.zero_grad(drop=True)
    model.set_optimizer("sgd", lr=0.0)
    for _ in range(2):
        model.forward_backward(ROWS)
    norm = model.clip_grad_norm(math.inf)
    model.zero_grad()
    model.forward_backward(ROWS, gradient_accumulation_steps=1)
    assert model.clip_grad_norm(math.inf) == pytest.approx(norm)


def test_a_backward_for_nothing_is_told(model):
    model.engine.module.requires_grad_(False)
    with pytest.raises(NoTrainableParameters, match="nothing to train"):
        model.forward_backward(ROWS)
    model.forward(ROWS)
    with pytest.raises(NoTrainableParameters, match="nothing to train"):
        model.backward()


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "text"),
    [
        ("adamw", {"lr": "1e-4"}, BadArgument, "lr='1e-4'"),
        ("adamw", {"lr": "1e-4"}, BadArgument, "a number, and this is a text .YAML reads 1e-4 as one"),
        ("adamw", {"eps": "1e-8"}, BadArgument, "eps='1e-8': it must be a number"),
        ("adamw", {"betas": ["0.9", "0.99"]}, BadArgument, r"betas=.'0.9', '0.99'.: it must be a number"),
        ("sgd", {"momentum": "0.9"}, BadArgument, "momentum='0.9'"),
        (lambda parameters, **kwargs: torch.optim.SGD(parameters, **kwargs), {"lr": "1e-4"}, BadArgument, "lr='1e-4'"),
        ("adamw", {"lr": None}, BadArgument, "lr=None"),
        ("adamw", {"lr": math.inf}, BadArgument, "lr=inf"),
        ("adamw", {"lr": -1.0}, BadArgument, "lr=-1.0"),
        ("adamw", {"weight_decay": "0.1"}, BadArgument, "weight_decay='0.1'"),
        ("adamw", {"betas": 0.9}, BadOptimizer, "AdamW.*betas=0.9"),
        ("sgd", {"momentum": -1.0}, BadOptimizer, "SGD.*momentum=-1.0"),
        (torch.optim.SparseAdam, {}, BadOptimizer, "sparse gradients"),
    ],
)
def test_values_that_an_optimizer_cannot_use_are_told(model, name, kwargs, error, text):
    model.set_optimizer("sgd")
    live = model.sessions[""].optimizer
    with pytest.raises(error, match=text):
        model.set_optimizer(name, **kwargs)
    assert model.sessions[""].optimizer is live


@pytest.mark.parametrize(
    ("name", "kwargs", "text"),
    [
        ("cosine_warmup", {"num_training_steps": "10"}, "num_training_steps='10'"),
        ("cosine_warmup", {"num_training_steps": None}, "num_training_steps=None"),
        ("linear_warmup", {"num_training_steps": 9, "num_warmup_steps": 2.5}, "num_warmup_steps=2.5"),
        ("constant", {"num_warmup_steps": -1}, "num_warmup_steps=-1"),
        ("cosine_warmup", {"num_training_steps": 9, "min_lr_ratio": 5}, "min_lr_ratio=5"),
        ("step_lr", {"step_size": 0}, "StepLR.*step_size=0"),
        ("step_lr", {"step_size": "2"}, "StepLR.*step_size='2': it must be a number, and this is a text"),
        ("step_lr", {"step_size": 2, "gamma": "1e-1"}, "StepLR.*gamma='1e-1': it must be a number"),
        ("multi_step_lr", {"milestones": ["2", "4"]}, "MultiStepLR.*milestones=.*must be a number"),
        ("one_cycle_lr", {"max_lr": 1.0, "total_steps": "9"}, "OneCycleLR.*total_steps"),
        (lr_scheduler.ReduceLROnPlateau, {}, "ReduceLROnPlateau.*metrics"),
    ],
)
def test_values_that_a_scheduler_cannot_use_are_told_before_rates_change(model, name, kwargs, text):
    model.set_optimizer("sgd", lr=0.5)
    model.set_lr_scheduler("constant")
    session = model.sessions[""]
    live, before = session.scheduler, [dict(g, params=None) for g in session.optimizer.param_groups]
    with pytest.raises(BadScheduler, match=text):
        model.set_lr_scheduler(name, **kwargs)
    assert session.scheduler is live and [dict(g, params=None) for g in session.optimizer.param_groups] == before


def test_values_of_the_other_verbs_are_told(model):
    for call in (
        lambda: model.add_metric("loss", "x"),
        lambda: model.calculate_metric("x"),
        lambda: model.forward_only(ROWS, adapter_name=5),
        lambda: model.set_optimizer(adapter_name=["a"]),
        lambda: model.remove_adapter(5),
    ):
        with pytest.raises(BadArgument):
            call()


def test_nothing_to_train_is_told():
    module = TinyLM().requires_grad_(False)
    with pytest.raises(NoTrainableParameters, match="base model"):
        session_model(module).set_optimizer()


def test_an_optimizer_does_not_change_between_clip_and_step(model):
    model.set_optimizer()
    model.forward_backward(ROWS)
    model.clip_grad_norm()
    with pytest.raises(WindowNotStepped):
        model.set_optimizer("sgd")
    model.step()
    model.set_optimizer("sgd")


# ------------------------------------------------------------------------------------------------ schedules

SCHEDULES = [
    ("cosine_warmup", {"num_warmup_steps": 2, "num_training_steps": 8}),
    ("linear_warmup", {"num_warmup_steps": 2, "num_training_steps": 8}),
    ("constant", {"num_warmup_steps": 2}),
    ("lambda_lr", {"lr_lambda": lambda step: 0.9**step}),
    ("multiplicative_lr", {"lr_lambda": lambda step: 0.9}),
    ("step_lr", {"step_size": 2}),
    ("multi_step_lr", {"milestones": [2, 4]}),
    ("constant_lr", {}),
    ("linear_lr", {}),
    ("exponential_lr", {"gamma": 0.9}),
    ("polynomial_lr", {}),
    ("cosine_annealing_lr", {"T_max": 8}),
    ("cosine_annealing_warm_restarts", {"T_0": 3}),
    ("cyclic_lr", {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 2, "cycle_momentum": False}),
    ("one_cycle_lr", {"max_lr": 1.0, "total_steps": 9, "cycle_momentum": False}),
]


def rates(model, count):
    found = []
    for _ in range(count):
        model.forward_backward(ROWS)
        model.clip_grad_and_step()
        found.append(model.sessions[""].optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize(("name", "kwargs"), SCHEDULES)
def test_every_schedule_resumes_with_the_same_rates(name, kwargs, tmp_path):
    def fresh():
        torch.manual_seed(0)
        made = session_model(TinyLM())
        made.set_optimizer("sgd", lr=0.5, momentum=0.1)
        made.set_lr_scheduler(name, **kwargs)
        return made

    unbroken = rates(fresh(), 6)
    first = fresh()
    head = rates(first, 3)
    path = first.save("c", tmp_path, save_optimizer=True)
    second = fresh()
    for _ in range(2):
        second.resume_from_checkpoint(path)
        assert second.sessions[""].optimizer.param_groups[0]["lr"] == head[-1]
    assert head + rates(second, 3) == unbroken


def test_formulas_of_the_schedules():
    def curve(name, **kwargs):
        made = session_model(TinyLM())
        made.set_optimizer("sgd", lr=2.0)
        made.set_lr_scheduler(name, **kwargs)
        return [made.sessions[""].optimizer.param_groups[0]["lr"], *rates(made, 6)]

    assert curve("linear_warmup", num_warmup_steps=2, num_training_steps=6) == pytest.approx([0, 1, 2, 1.5, 1, 0.5, 0])
    assert curve("constant", num_warmup_steps=2) == pytest.approx([0, 1, 2, 2, 2, 2, 2])
    cosine = [0, 1, *(2 * (0.1 + 0.9 * (1 + math.cos(math.pi * i / 4)) / 2) for i in range(5))]
    assert curve("cosine_warmup", num_warmup_steps=2, num_training_steps=6, min_lr_ratio=0.1) == pytest.approx(cosine)


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "ReduceLROnPlateau", lr_scheduler.ReduceLROnPlateau])
def test_a_schedule_that_measures_is_told(model, name):
    model.set_optimizer("sgd", lr=0.1)
    with pytest.raises(BadScheduler, match=r"ReduceLROnPlateau can't be used: its step\(\) needs 'metrics'.*yourself"):
        model.set_lr_scheduler(name)
    with pytest.raises(BadScheduler, match="its step"):
        model.set_lr_scheduler(lr_scheduler.ReduceLROnPlateau(model.sessions[""].optimizer))
    assert model.sessions[""].scheduler is None


@pytest.mark.parametrize("name", ["SequentialLR", "ChainedScheduler"])
def test_a_schedule_made_of_others_is_given_as_an_object(model, name, tmp_path):
    model.set_optimizer("sgd", lr=0.1)
    with pytest.raises(BadScheduler, match=rf"it is made of other schedulers.*set_lr_scheduler\({name}\("):
        model.set_lr_scheduler(name)

    def fresh():
        made = session_model(TinyLM())
        optimizer = torch.optim.SGD(made.engine.module.parameters(), lr=0.1)
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        made.set_optimizer(optimizer)
        more = {"optimizer": optimizer, "milestones": [2]} if name == "SequentialLR" else {}
        made.set_lr_scheduler(getattr(lr_scheduler, name)(schedulers=parts, **more))
        return made

    whole, first, second = fresh(), fresh(), fresh()
    expected = rates(whole, 6)
    found = rates(first, 3)
    first.save("c", tmp_path, save_optimizer=True)
    second.resume_from_checkpoint(tmp_path / "c")
    assert [*found, *rates(second, 3)] == pytest.approx(expected)


def test_a_schedule_needs_an_optimizer_and_its_own(model):
    with pytest.raises(NoOptimizer, match="set_lr_scheduler"):
        model.set_lr_scheduler("constant")
    model.set_optimizer("sgd")
    other = torch.optim.SGD(TinyLM().parameters(), lr=1.0)
    with pytest.raises(BadScheduler, match="another optimizer"):
        model.set_lr_scheduler(lr_scheduler.StepLR(other, 2))
    with pytest.raises(BadScheduler, match="less than num_warmup_steps"):
        model.set_lr_scheduler("cosine_warmup", num_warmup_steps=5, num_training_steps=3)
    own = lr_scheduler.StepLR(model.sessions[""].optimizer, 2)
    model.set_lr_scheduler(own)
    assert model.sessions[""].scheduler is own
    model.set_optimizer("sgd")
    assert model.sessions[""].scheduler is None


# ------------------------------------------------------------------------------------------------ metrics and the table


def test_a_call_that_failed_is_in_no_metric(model):
    """The second micro-batch fails, so the window that holds the first is dropped."""
    model.add_metric("loss", True)
    model.add_metric("accuracy", True)
    calls = []

    def fails(inputs, outputs):
        calls.append(outputs)
        if len(calls) == 2:
            raise ZeroDivisionError
        return outputs.logits.square().mean() * 1000

    model.set_loss(fails)
    with pytest.raises(ZeroDivisionError):
        model.forward_backward(ROWS, micro_batch_size=1)
    assert model.calculate_metric() == {}
    model.set_loss("cross_entropy")
    loss = float(model.forward_backward(ROWS, micro_batch_size=1))
    numbers = model.calculate_metric()
    assert numbers["loss"] == pytest.approx(loss) and "accuracy" in numbers


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        (["logits"], r"needs of Mine is \['logits'\] \(list\); it must be a set of names: frozenset\(\{'logits'\}\)"),
        ("logps", r"needs of Mine is 'logps' \(str\); .*frozenset\(\{'logps'\}\)"),
        ({"logprobs"}, "Mine needs 'logprobs', which is no output of a model. Did you mean 'logps'"),
    ],
)
def test_needs_that_are_none_are_told_when_they_are_given(model, needs, text):
    declared = needs

    class Mine(CrossEntropyLoss):
        needs = declared

    with pytest.raises(BadNeeds, match=text):
        model.set_loss(Mine)

    class Mine(AccuracyMetric):
        needs = declared

    with pytest.raises(BadNeeds, match=text):
        model.add_metric(Mine)
    assert model.sessions[""].loss is None and model.sessions[""].metrics == {True: [], False: []}
    if isinstance(needs, list):
        return  # a function may give a list

    def mine(inputs, outputs):
        return outputs.logits.sum()

    mine.needs, mine.__name__ = needs, "Mine"
    with pytest.raises(BadNeeds, match=text):
        model.set_loss(mine)


@pytest.mark.parametrize(("result", "what"), [(None, "NoneType"), ({"a": "3"}, "'a': '3'"), ({3: 1.0}, "3: 1.0")])
def test_a_metric_that_gives_no_numbers_is_told(model, result, what):
    class Mine(AccuracyMetric):
        def calculate(self):
            return result

    model.add_metric(Mine)
    with pytest.raises(BadMetricResult, match=rf"Mine.calculate\(\) returned {what}"):
        model.calculate_metric()


def test_a_metric_may_give_tensors_of_one_number(model):
    class Mine(AccuracyMetric):
        def calculate(self):
            return {"a": torch.tensor(0.5), "b": numpy.float32(2)}

    model.add_metric(Mine)
    assert model.calculate_metric() == {"a": 0.5, "b": 2.0}


def test_a_metric_added_after_the_forward_leaves_it_out(model, caplog):
    model.forward(ROWS)
    model.add_metric("accuracy", True)
    with caplog.at_level(logging.WARNING, logger="twinkle"):
        model.backward()
    assert "AccuracyMetric leaves out a batch: its forward did not compute predictions" in caplog.text
    assert model.calculate_metric() == {}


def test_metrics_of_both_modes_are_apart(model):
    model.set_optimizer("sgd", lr=0.0)
    model.add_metric("loss")
    model.add_metric("accuracy", False)
    trained = float(model.forward_backward(ROWS))
    model.forward_only(ROWS[:1])
    assert model.calculate_metric(True) == {"loss": pytest.approx(trained)}
    evaluated = model.calculate_metric(False)
    assert set(evaluated) == {"loss", "accuracy"} and evaluated["loss"] != pytest.approx(trained)
    assert model.calculate_metric(True) == {} and model.calculate_metric(False) == {}


def test_a_metric_instance_is_copied_for_the_second_mode(model):
    from twinkle_core.metrics.loss import LossMetric

    model.add_metric(LossMetric())
    model.forward_backward(ROWS)
    assert model.calculate_metric(True) and model.calculate_metric(False) == {}


def test_the_loss_metric_is_no_mean_of_means(model):
    model.set_optimizer("sgd", lr=0.0)
    model.add_metric("loss", True)
    rows = random_rows([2, 9, 1, 6])
    whole = float(model.forward_backward(rows))
    model.calculate_metric()
    for part in (rows[:1], rows[1:]):
        model.forward_backward(part, micro_batch_size=1)
    assert model.calculate_metric()["loss"] == pytest.approx(whole)


def test_numbers_of_the_loss_itself_are_reported(model):
    from twinkle_core.types import LossOutput

    def with_numbers(inputs, outputs):
        return LossOutput(outputs.logits.sum() * 0, 1.0, {"share": (outputs.logits.shape[0], 2.0)})

    model.set_loss(with_numbers)
    model.add_metric("loss", True)
    model.forward_backward(random_rows([1, 1, 1]), micro_batch_size=2)
    assert model.calculate_metric() == {"loss": 0.0, "share": 3 / 4}


def test_configuration_is_a_table(model):
    model.set_optimizer("adamw", lr=0.25)
    model.add_metric("loss")
    text = model.get_train_configs()
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "348 trainable" in lines["parameters"] and "lr 0.25" in lines["optimizer"]
    assert "CrossEntropyLoss" in lines["loss"] and "scope token" in lines["loss"]
    assert "optimizer adamw: twinkle-core" in text
