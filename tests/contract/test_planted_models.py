"""A sound model passes its suite; one with a planted bug fails exactly the test that is meant for it."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from twinkle_core.contracts.adapters import BASE
from twinkle_core.contracts.engine import GENERATE
from twinkle_core.errors import BadAdapter, DuplicateAdapter, UnknownAdapter
from twinkle_core.testing import runner
from twinkle_core.testing.engines import CallbackEngine, ToyEngine
from twinkle_core.testing.suites.model import ModelSuite
from twinkle_core.testing.toys import TinyLM
from twinkle_core.train.single import SingleAdapter
from twinkle_core.train.verbs import SessionModel
from twinkle_core.types import LossOutput

# ---------------------------------------------------------------------------------------------------- a sound model


class ShiftedLM(TinyLM):
    """Hidden states are shifted by the vectors of the adapters that take part."""

    shifts = ()

    def forward(self, inputs):
        return super().forward(inputs) + sum(self.shifts)


class Shifts(SingleAdapter):
    """An adapter is one vector; its config is the value that the vector starts with."""

    def __init__(self, module):
        super().__init__(module)
        self.vectors = {}

    def names(self):
        return list(self.vectors)

    def check(self, name):
        if name != BASE and name not in self.vectors:
            raise UnknownAdapter(name, None, self.names())

    def acquire(self, name, config):
        if name in self.vectors:
            raise DuplicateAdapter(name)
        if not isinstance(config, float):
            raise BadAdapter(name, f"{config!r} is no number")
        self.vectors[name] = nn.Parameter(torch.full((8,), config))
        return name

    def release(self, name):
        self.check(name)
        del self.vectors[name]

    def taking_part(self, name):
        return (self.vectors[name],) if name else ()

    @contextlib.contextmanager
    def activate(self, name):
        self.check(name)
        found, self.module.shifts = self.module.shifts, self.taking_part(name)
        self.module.requires_grad_(not name)
        try:
            yield
        finally:
            self.module.shifts = found
            self.module.requires_grad_(True)

    def parameters(self, name):
        self.check(name)
        return {"shift": self.vectors[name]} if name else super().parameters(name)

    def state_dict(self, name):
        self.check(name)
        return {"shift": self.vectors[name].detach()} if name else super().state_dict(name)


class RanksEngine(ToyEngine):
    """Several data ranks, in a process group that is there."""

    def all_reduce(self, x, over="dp"):
        x = x.clone()
        if self.mesh.world_size > 1:
            dist.all_reduce(x)
        return x

    def gather_objects(self, obj, over="dp"):
        found = [obj] * self.mesh.world_size
        if self.mesh.world_size > 1:
            dist.all_gather_object(found, obj)
        return found

    def finish_grads(self, optimizer, scale):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        anyone = self.all_reduce(torch.tensor([float(p.grad is not None) for p in parameters]))
        for p in (p for p, some in zip(parameters, anyone, strict=True) if some):
            p.grad = self.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad)
        return super().finish_grads(optimizer, scale)


class PlantedNothing(ModelSuite):
    model_cls, engine, store = SessionModel, RanksEngine, Shifts
    ranks = False
    learning_rate = 0.1  # a vector has little say

    def build(self, **options):
        module = ShiftedLM()
        return self.model_cls(self.engine(module), self.store(module))

    def adapter_config(self, name):
        return 0.1


class PlantedNothingOverRanks(PlantedNothing):
    ranks = True


class PlantedNothingInASchedule(PlantedNothing):
    """forward and backward inside a schedule: no split step."""

    engine = CallbackEngine


class PlantedNothingWithoutAdapters(PlantedNothing):
    store, adapters = SingleAdapter, False


class Writes(RanksEngine):
    """Writes two tokens more, whatever the prompt."""

    capabilities = RanksEngine.capabilities | {GENERATE}

    def generate(self, rows, *, keep_end=False, max_new_tokens=2):
        return [[3, 4] for _ in rows]


class PlantedNothingThatWrites(PlantedNothing):
    engine = Writes


# ---------------------------------------------------------------------------------------------------- planted bugs


class AllTakePart(Shifts):
    def taking_part(self, name):
        return tuple(self.vectors.values()) if name else ()


class PlantedLeak(PlantedNothing):
    """The other adapters take part in a forward, and their gradients with them."""

    store = AllTakePart


class MeanOfMeans(RanksEngine):
    def run_schedule(self, batches, needs, loss_fn, **how):
        held = [int((batch.inputs["labels"] != -100).sum()) for batch in batches]

        def weighted_alike(batch, output):
            loss = loss_fn(batch, output)
            factor = sum(held) / (len(held) * held[batches.index(batch)])
            return LossOutput(loss.sum * factor, loss.weight)

        super().run_schedule(batches, needs, weighted_alike if how.get("train", True) else loss_fn, **how)


class PlantedMeanOfMeans(PlantedNothing):
    """Each micro-batch counts alike, whatever number of tokens it has."""

    engine = MeanOfMeans


class Forgetful(SessionModel):
    def resume_from_checkpoint(self, checkpoint_dir, *, adapter_name=None, resume_only_model=False):
        progress = super().resume_from_checkpoint(
            checkpoint_dir, adapter_name=adapter_name, resume_only_model=resume_only_model
        )
        self._session(adapter_name).optimizer.state.clear()
        return progress


class PlantedForgottenOptimizer(PlantedNothing):
    """Everything is resumed but the optimizer's moments."""

    model_cls = Forgetful


class RestoresNothing(SessionModel):
    def resume_from_checkpoint(self, checkpoint_dir, *, adapter_name=None, resume_only_model=False):
        return super().resume_from_checkpoint(checkpoint_dir, adapter_name=adapter_name, resume_only_model=True)


class PlantedResumeOfWeightsAlone(PlantedNothing):
    """The right numbers come back, and of the training's state nothing does."""

    model_cls = RestoresNothing


class Silent(SessionModel):
    def backward(self, *, adapter_name=None):
        return None


class PlantedSilentVerb(PlantedNothing):
    """A backend that can't split a step takes ``backward`` for done."""

    model_cls, engine = Silent, CallbackEngine


class RefusesSplit(ToyEngine):
    capabilities = frozenset()


class PlantedUndeclaredVerb(PlantedNothing):
    """It declares no split step, and takes ``forward`` without a word."""

    engine = RefusesSplit

    class model_cls(SessionModel):
        def _must_split(self, verb):
            pass


class Averages(RanksEngine):
    """Each rank divides by its own tokens, and the ranks' means are averaged."""

    def gather_numbers(self, numbers):
        self.own = max(float(numbers[1]), 1.0)  # the last before gradients are finished: the weight of the window
        return super().gather_numbers(numbers)

    def finish_grads(self, optimizer, scale):
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            p.grad /= self.own * self.mesh.world_size
        return super().finish_grads(optimizer, 1.0)


class PlantedUnweightedRanks(PlantedNothing):
    engine, ranks = Averages, True


class KeepsGradients(SessionModel):
    """The next window's gradients are added to those that were used."""

    def _clear(self, session):
        """Nothing."""


class NoClip(RanksEngine):
    def clip(self, optimizer, max_norm, norm_type):
        return super().clip(optimizer, 1e30, norm_type)


class AlwaysTwoNorm(RanksEngine):
    def clip(self, optimizer, max_norm, norm_type):
        return super().clip(optimizer, max_norm, 2.0)


class NoScale(RanksEngine):
    def finish_grads(self, optimizer, scale):
        return super().finish_grads(optimizer, 1.0)


class Doubles(RanksEngine):
    def backward(self, loss_sum, *, sync=True):
        super().backward(loss_sum * 2, sync=sync)


class TurnsEval(RanksEngine):
    @contextlib.contextmanager
    def mode(self, train):
        if not train:
            self.module.eval()
        with torch.set_grad_enabled(train):
            yield


class KeepsDropout(RanksEngine):
    @contextlib.contextmanager
    def mode(self, train):
        with torch.set_grad_enabled(train):
            yield


class SaysFinite(RanksEngine):
    def finish_grads(self, optimizer, scale):
        super().finish_grads(optimizer, scale)
        self._windows[optimizer].finite = True
        return True


class OfEngine(RanksEngine):
    """Changes what a forward is asked for, or gives."""

    def asked(self, batch, needs, how):
        return batch, needs, how

    def given(self, output):
        return output

    def forward(self, batch, needs, **how):
        batch, needs, how = self.asked(batch, needs, how)
        return self.given(super().forward(batch, needs, **how))


class NoTemperature(OfEngine):
    def asked(self, batch, needs, how):
        return batch, needs, how | {"temperature": 1.0}


class AllFields(OfEngine):
    def asked(self, batch, needs, how):
        return batch, needs | {"logits", "entropies", "hidden"}, how


class WrongEntropies(OfEngine):
    def given(self, output):
        if "entropies" in output:
            output.entropies = output.entropies * 0
        return output


class WrongPredictions(OfEngine):
    def given(self, output):
        if "predictions" in output:
            output.predictions = output.predictions * 0
        return output


class OnePosition(OfEngine):
    def asked(self, batch, needs, how):
        ids = batch.inputs["input_ids"]
        batch.inputs["position_ids"] = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
        return batch, needs, how


class Lenient(Shifts):
    """Copies what fits."""

    def load_state_dict(self, name, state):
        with torch.no_grad():
            for key, tensor in self.state_dict(name).items():
                if key in state and state[key].shape == tensor.shape:
                    tensor.copy_(state[key])


class StaysActive(Shifts):
    @contextlib.contextmanager
    def activate(self, name):
        self.check(name)
        self.module.shifts = self.taking_part(name)
        self.module.requires_grad_(not name)
        yield


class ForgetsOnError(Shifts):
    @contextlib.contextmanager
    def activate(self, name):
        self.check(name)
        found, self.module.shifts = self.module.shifts, self.taking_part(name)
        self.module.requires_grad_(not name)
        yield
        self.module.shifts = found
        self.module.requires_grad_(True)


class Revives(Shifts):
    def release(self, name):
        self.check(name)
        self.dead = self.vectors.pop(name)

    def acquire(self, name, config):
        super().acquire(name, config)
        self.vectors[name] = getattr(self, "dead", self.vectors[name])
        return name


class Names(Shifts):
    def _named(self, name, found):
        return {f"{name}.{key}" if name else key: value for key, value in found.items()}

    def parameters(self, name):
        return self._named(name, super().parameters(name))

    def state_dict(self, name):
        return self._named(name, super().state_dict(name))


class TrainsPrompts(SessionModel):
    """Rows of completions have labels on the prompt, too."""

    def generate(self, inputs, *, return_rows=False, **kwargs):
        made = super().generate(inputs, return_rows=return_rows, **kwargs)
        if return_rows:
            for row in made:
                row["labels"] = [*row["input_ids"][1:], -100]
        return made


class NoRestore(SessionModel):
    def resume_from_checkpoint(self, *args, **kwargs):
        state = torch.get_rng_state()
        found = super().resume_from_checkpoint(*args, **kwargs)
        torch.set_rng_state(state)
        return found


class NoPythonRestore(SessionModel):
    def resume_from_checkpoint(self, *args, **kwargs):
        state = random.getstate()
        found = super().resume_from_checkpoint(*args, **kwargs)
        random.setstate(state)
        return found


class TrainsInEval(OfEngine):
    """As a model from a library that gives it in evaluation mode: nothing is ever dropped."""

    def forward(self, batch, needs, *, train, **kwargs):
        found = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            return super().forward(batch, needs, train=train, **kwargs)
        finally:
            for module, mode in found.items():
                module.training = mode


class SeedsEvaluations(OfEngine):
    def forward(self, batch, needs, *, train, **kwargs):
        if not train:
            torch.manual_seed(0)
        return super().forward(batch, needs, train=train, **kwargs)


class OfTraining(SessionModel):
    """Whatever metric is asked for."""

    def calculate_metric(self, is_training=True, **kwargs):
        return super().calculate_metric(True, **kwargs)


class NoBiases(Shifts):
    """Of the whole model, all but biases are trained."""

    def parameters(self, name):
        return {key: p for key, p in super().parameters(name).items() if not key.endswith("bias")}


def ignoring(verb):
    """A model whose verb does nothing."""
    return type(f"Ignores_{verb}", (SessionModel,), {verb: lambda self, *args, **kwargs: None})


# ---------------------------------------------------------------------------------------------------- the suite finds them


def outcomes(suite):
    """Names of tests without their parameters, by what became of them."""
    found = {outcome: set() for outcome in (runner.PASSED, runner.FAILED, runner.LEFT_OUT)}
    for one in runner.run(suite):
        found[one.outcome].add(one.test.partition("[")[0])
    return found


@pytest.mark.parametrize(
    "suite", [PlantedNothing, PlantedNothingThatWrites, PlantedNothingInASchedule, PlantedNothingWithoutAdapters]
)
def test_a_sound_model_passes(suite):
    found = outcomes(suite)
    assert found["failed"] == set()
    assert len(found["passed"]) >= 8


def test_what_a_model_has_not_is_left_out():
    assert "test_a_split_step_is_a_whole_one" in outcomes(PlantedNothingInASchedule)["left out"]
    without = outcomes(PlantedNothingWithoutAdapters)
    assert "test_training_one_adapter_leaves_the_others" in without["left out"]
    assert "test_adapters_are_refused_where_there_are_none" in without["passed"]


@pytest.mark.parametrize(
    ("suite", "tests"),
    [
        (PlantedLeak, {"test_training_one_adapter_leaves_the_others", "test_adapters_side_by_side_train_as_if_alone"}),
        (PlantedMeanOfMeans, {"test_micro_batches_are_one_batch"}),
        (PlantedForgottenOptimizer, {"test_resuming_is_as_if_unbroken"}),
        (PlantedResumeOfWeightsAlone, {"test_resuming_is_as_if_unbroken"}),
        (PlantedSilentVerb, {"test_verbs_beyond_its_capabilities_raise"}),
        (PlantedUndeclaredVerb, {"test_verbs_beyond_its_capabilities_raise"}),
    ],
)
def test_a_planted_bug_is_caught(suite, tests):
    assert outcomes(suite)["failed"] == tests


GRADIENT, CLIPPED, BY_VERB = (
    "test_the_gradient_is_that_of_the_loss",
    "test_gradients_are_clipped",
    "test_the_verbs_of_an_update_one_by_one",
)
MODE, FLAGS, FIT = (
    "test_an_evaluation_is_in_evaluation_mode",
    "test_an_error_leaves_the_flags_alone",
    "test_what_does_not_fit_is_not_loaded",
)
FINITE = "test_gradients_that_are_not_finite_train_nothing"
BEGINS, GIVEN_UP = "test_a_window_begins_with_no_gradient", "test_a_window_can_be_given_up_or_closed_early"
GIVEN, USED, RESUMED = "test_losses_get_what_they_need", "test_what_is_set_is_used", "test_resuming_is_as_if_unbroken"


@pytest.mark.slow  # a whole suite each
@pytest.mark.parametrize(
    ("planted", "tests"),
    [
        ({"model_cls": KeepsGradients}, {BEGINS, GIVEN_UP, RESUMED}),
        ({"engine": NoClip}, {CLIPPED}),
        ({"engine": AlwaysTwoNorm}, {CLIPPED}),
        ({"engine": NoScale}, {GRADIENT}),
        ({"engine": Doubles}, {GRADIENT}),
        ({"engine": TurnsEval}, {MODE, FLAGS}),
        ({"engine": KeepsDropout}, {MODE}),
        ({"engine": TrainsInEval}, {"test_training_is_in_training_mode"}),
        ({"engine": SeedsEvaluations}, {"test_random_numbers_go_on"}),
        ({"model_cls": OfTraining}, {USED}),
        ({"store": NoBiases, "full_parameters": True, "adapters": False}, {"test_all_that_can_be_trained_is"}),
        ({"engine": SaysFinite}, {FINITE}),
        ({"engine": NoTemperature}, {"test_a_temperature_divides_the_logits"}),
        ({"engine": AllFields}, {GIVEN}),
        ({"engine": WrongEntropies}, {GIVEN}),
        ({"engine": WrongPredictions}, {GIVEN}),
        ({"engine": OnePosition}, {"test_packed_rows_do_not_see_each_other"}),
        ({"store": Lenient}, {FIT}),
        ({"store": StaysActive}, {FLAGS}),
        ({"store": ForgetsOnError}, {FLAGS}),
        ({"store": Revives}, {"test_an_adapter_that_comes_again_is_new"}),
        ({"store": Names}, {"test_an_adapters_checkpoint_fits_one_of_another_name"}),
        ({"engine": Writes, "model_cls": TrainsPrompts}, {"test_completions_as_rows_are_prompt_and_completion"}),
        ({"model_cls": NoRestore}, {RESUMED}),
        ({"model_cls": NoPythonRestore}, {RESUMED}),
        ({"model_cls": ignoring("flush")}, {"test_a_window_can_be_given_up_or_closed_early"}),
        ({"model_cls": ignoring("zero_grad")}, {"test_a_window_can_be_given_up_or_closed_early", BY_VERB}),
        ({"model_cls": ignoring("set_loss")}, {USED, GIVEN, FLAGS, FINITE}),
        ({"model_cls": ignoring("set_processor")}, {USED}),
        ({"model_cls": ignoring("add_metric")}, {USED}),
        ({"model_cls": ignoring("apply_patch")}, {USED}),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_small_planted_bug_is_caught(planted, tests):
    assert outcomes(type("Planted", (PlantedNothing,), {"full_parameters": False, **planted}))["failed"] == tests


class PlantedNoConfig(PlantedNothing):
    adapter_config = ModelSuite.adapter_config


def test_a_suite_without_an_adapter_says_what_it_lacks():
    texts = {one.test: one.text for one in runner.run(PlantedNoConfig) if one.outcome == runner.FAILED}
    assert "test_the_loss_falls[adapter]" in texts and "test_the_loss_falls[whole]" not in texts
    assert all("write one, or say adapters = False" in text for text in texts.values()), texts


@pytest.mark.slow  # two processes that import torch
def test_ranks_that_average_without_weights_are_caught():
    (failed,) = [one for one in runner.run(PlantedUnweightedRanks) if one.outcome == runner.FAILED]
    assert failed.test == "test_two_ranks_are_one" and "two ranks ('" in failed.text  # by what they trained, not by a crash


@pytest.mark.slow
def test_a_sound_model_over_ranks_passes():
    found = outcomes(PlantedNothingOverRanks)
    assert found["failed"] == set()
    assert "test_two_ranks_are_one" in found["passed"]
