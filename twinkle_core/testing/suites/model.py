"""What a model must keep, whatever computes it (L2)."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle_core.contracts.adapters import BASE
from twinkle_core.contracts.engine import GENERATE, SPLIT_STEP
from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.contracts.template import Template
from twinkle_core.data.sampler import share
from twinkle_core.errors import BadAdapter, DuplicateAdapter, NoOptimizer, UnknownAdapter, Unsupported
from twinkle_core.testing.ranks import run as run_ranks
from twinkle_core.testing.suites.base import capability
from twinkle_core.testing.suites.model_numbers import ModelNumbers
from twinkle_core.testing.suites.model_state import ModelState
from twinkle_core.testing.suites.training import (
    Rows,
    Weights,
    assert_close,
    assert_same,
    is_refused,
    train,
    weights,
)
from twinkle_core.types import IGNORE_INDEX, InputFeature, Message, Trajectory


class Numbers(Template):
    """Ids as text, for prompts that are encoded already."""

    def encode(self, trajectory: Trajectory, *, add_generation_prompt: bool = False) -> None:
        return None

    def check(self, trajectory: Trajectory) -> str | None:
        return "it only decodes"

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        return " ".join(str(int(i)) for i in ids)

    def parse(self, text: str) -> Message:
        return {"role": "assistant", "content": text}


class ModelSuite(ModelNumbers, ModelState):
    """Checks of a model on a CPU. Make it tiny (two layers): it is built anew many times, and trained for a few steps.

    ::

        class TestAcme(ModelSuite):
            component = AcmeModel
            arguments = {"layers": 2}

            def adapter_config(self, name):
                return AcmeLora(rank=2)

    A model that takes more than arguments to build overrides ``build``. It is called with torch's seed set, and what it gives
    must be the same each time, in fp32 and without dropout: ways to do the same work are compared, most of them bit for bit.

    Capabilities:

    * ``adapters``: several adapters at once; then ``adapter_config`` is needed.
    * ``full_parameters``: trains without any adapter, as a whole.
    * ``packing``: rows in one sequence, told apart by ``position_ids``, compute what they do apart.
    * ``ranks``: data ranks. Two processes (gloo) build the model each; ``RANK``, ``WORLD_SIZE`` and the process group are set.

    Verbs that need a capability the engine lacks (``split_step``, ``generate``) must raise Unsupported; those it has must work.

    Other class attributes: ``vocabulary`` (token ids of the rows are below it), ``learning_rate`` (of AdamW),
    ``sgd_learning_rate`` (of plain SGD, with updates about as large as they may be), ``tolerance`` (of sums in another order,
    relative to what the training has changed), ``generate_arguments``.
    """

    # ------------------------------------------------------------------------------------------------ training

    def test_the_loss_falls(self, name: str, rows: Rows) -> None:
        """20 updates on the same rows: below 90 % of what it was, and the weights are finite."""
        model = self.ready(name, optimizer="adamw")
        losses = [loss for loss, _ in train(model, name, [rows] * 20)]
        assert losses[-1] < 0.9 * losses[0], f"the loss was {losses[0]:.4g} and is {losses[-1]:.4g} after 20 updates"
        assert all(bool(torch.isfinite(w).all()) for w in weights(model, name).values())

    def test_the_loss_is_the_mean_over_labelled_tokens(self, name: str, rows: Rows) -> None:
        """Cross entropy of the logits of each row alone, by the plain formula in float64: no padding, no masked token in it."""
        model = self.ready(name)
        train(model, name, [rows] * 2)
        total, count = 0.0, 0
        for row in rows:
            logits = model.forward_only([row], adapter_name=name).logits[0].double()
            labels = torch.as_tensor(row["labels"], device=logits.device)
            logps = logits.log_softmax(-1)[labels != IGNORE_INDEX, labels[labels != IGNORE_INDEX]]
            total, count = total - float(logps.sum()), count + logps.numel()
        loss = float(model.forward_backward(rows, adapter_name=name))
        assert loss == pytest.approx(total / count, rel=10 * self.tolerance)

    def test_micro_batches_are_one_batch(self, name: str, rows: Rows) -> None:
        """However rows are cut, by ``micro_batch_size`` or into the backwards of a window: the same updates."""
        start = weights(self.ready(name), name)
        whole, one = self.updates(name, [[rows]] * 3)
        ways: dict[str, tuple[list[list[Rows]], dict[str, Any]]] = {
            "micro_batch_size=1": ([[rows]] * 3, {"micro_batch_size": 1}),
            "micro_batch_size=2": ([[rows]] * 3, {"micro_batch_size": 2}),
            "gradient_accumulation_steps=2": ([[rows[:1], rows[1:]]] * 3, {}),
        }
        for way, (windows, how) in ways.items():
            norms, cut = self.updates(name, windows, **how)
            assert norms == pytest.approx(whole, rel=10 * self.tolerance), (
                f"{way}: gradient norms {norms}, and {whole} in one piece"
            )
            assert_close(cut, one, start, self.tolerance, way)

    def updates(self, name: str, windows: Sequence[Sequence[Rows]], **how: Any) -> tuple[list[float], Weights]:
        """Gradient norms of each window, and the weights after the last, of a new model."""
        model, norms = self.ready(name), []
        for window in windows:
            norms += train(model, name, window, steps=len(window), **how)[-1:]
        return [float(norm or 0.0) for _, norm in norms], weights(model, name)

    def test_an_evaluation_leaves_training_alone(self, name: str, rows: Rows) -> None:
        """``forward_only`` within a window, in pieces: training goes on bit for bit as without, and no graph comes out."""
        plain, asked = self.ready(name), self.ready(name)
        for model in (plain, asked):
            train(model, name, [rows[:2]], steps=2)
        whole = asked.forward_only(rows, adapter_name=name).logits
        pieces = asked.forward_only(rows, adapter_name=name, micro_batch_size=2).logits
        assert not whole.requires_grad, "forward_only returns a graph"
        real = torch.stack([torch.arange(whole.shape[1]) < len(row["input_ids"]) for row in rows]).to(whole.device)
        torch.testing.assert_close(pieces[real], whole[real], rtol=10 * self.tolerance, atol=10 * self.tolerance)
        assert train(asked, name, [rows[2:]] * 3, steps=2) == train(plain, name, [rows[2:]] * 3, steps=2)
        assert_same(weights(asked, name), weights(plain, name))

    # ------------------------------------------------------------------------------------------------ capabilities

    def test_a_split_step_is_a_whole_one(self, name: str, rows: Rows) -> None:
        """forward, calculate_loss and backward do what forward_backward does."""
        whole, split = self.ready(name), self.ready(name)
        if SPLIT_STEP not in self.capabilities(split):
            pytest.skip("split_step is not among its capabilities")
        for _ in range(2):
            loss = float(whole.forward_backward(rows, adapter_name=name))
            split.forward(rows, adapter_name=name, return_logits=False)
            assert split.calculate_loss(adapter_name=name) == pytest.approx(loss, rel=10 * self.tolerance)
            split.backward(adapter_name=name)
            norms = [model.clip_grad_and_step(adapter_name=name) for model in (split, whole)]
            assert norms[0] == pytest.approx(norms[1], rel=10 * self.tolerance)
        assert_close(weights(split, name), weights(whole, name), weights(self.ready(name), name), self.tolerance, "split")

    def test_completions_are_one_text_for_each_row(self, name: str, rows: Rows) -> None:
        """``generate`` within a window: texts, and training goes on bit for bit as without."""
        plain, asked = self.ready(name), self.ready(name)
        if GENERATE not in self.capabilities(asked):
            pytest.skip("generate is not among its capabilities")
        for model in (plain, asked):
            train(model, name, [rows[:2]], steps=2)
        asked.set_template(Numbers(), adapter_name=name)
        prompts: list[InputFeature] = [{"input_ids": row["input_ids"]} for row in rows]
        texts = asked.generate(prompts, adapter_name=name, **self.generate_arguments)
        assert len(texts) == len(rows) and all(isinstance(text, str) for text in texts)
        assert train(asked, name, [rows[2:]] * 3, steps=2) == train(plain, name, [rows[2:]] * 3, steps=2)
        assert_same(weights(asked, name), weights(plain, name))

    def test_completions_as_rows_are_prompt_and_completion(self, name: str, rows: Rows) -> None:
        """``generate(..., return_rows=True)``: the prompt and what follows it, with aligned labels on that alone; trainable."""
        model = self.ready(name)
        if GENERATE not in self.capabilities(model):
            pytest.skip("generate is not among its capabilities")
        prompts: list[InputFeature] = [{"input_ids": row["input_ids"]} for row in rows]
        made = model.generate(prompts, adapter_name=name, return_rows=True, **self.generate_arguments)
        assert len(made) == len(prompts)
        for prompt, row in zip(prompts, made, strict=True):
            before, ids = list(prompt["input_ids"]), list(row["input_ids"])
            written = ids[len(before) :]
            assert ids[: len(before)] == before and row["length"] == len(ids)
            assert list(row["labels"]) == [*[IGNORE_INDEX] * (len(before) - 1), *written, IGNORE_INDEX]
        assert any(len(row["input_ids"]) > len(prompt["input_ids"]) for row, prompt in zip(made, prompts, strict=True))
        assert math.isfinite(float(model.forward_backward(made, adapter_name=name)))

    def test_verbs_beyond_its_capabilities_raise(self, name: str, rows: Rows) -> None:
        """Unsupported, before anything changes: within a window, training goes on bit for bit as without."""
        plain, asked = self.ready(name), self.ready(name)
        for model in (plain, asked):
            train(model, name, [rows[:2]], steps=2)
        asked.set_template(Numbers(), adapter_name=name)
        calls: dict[str, tuple[str, Callable[[], Any]]] = {
            "forward": (SPLIT_STEP, lambda: asked.forward(rows, adapter_name=name)),
            "backward": (SPLIT_STEP, lambda: asked.backward(adapter_name=name)),
            "generate": (GENERATE, lambda: asked.generate(rows, adapter_name=name, **self.generate_arguments)),
        }
        declared = self.capabilities(asked)
        for verb, (needed, call) in calls.items():
            if needed not in declared:
                assert is_refused(call), f"{verb}() raises no Unsupported, and '{needed}' is not among the capabilities"
        assert train(asked, name, [rows[2:]] * 3, steps=2) == train(plain, name, [rows[2:]] * 3, steps=2)
        assert_same(weights(asked, name), weights(plain, name))

    # ------------------------------------------------------------------------------------------------ checkpoints

    def test_a_checkpoint_holds_the_weights(self, name: str, rows: Rows, tmp_path: Path) -> None:
        """Saved and loaded into another model that was trained otherwise: the same weights and logits, bit for bit."""
        first, second = self.ready(name), self.ready(name)
        train(first, name, [rows] * 3)
        train(second, name, [rows[:2]] * 2)
        first.save("one", tmp_path, adapter_name=name)
        second.load("one", tmp_path, adapter_name=name)
        assert_same(weights(second, name), weights(first, name))
        logits = [model.forward_only(rows, adapter_name=name).logits for model in (first, second)]
        assert torch.equal(*logits), "the weights are the same, and the logits differ"

    @pytest.mark.parametrize("within", [False, True], ids=["between_windows", "within_a_window"])
    def test_resuming_is_as_if_unbroken(self, name: str, within: bool, rows: Rows, tmp_path: Path) -> None:
        """AdamW under a schedule, saved, resumed in another model that was trained before: losses, norms, weights and random
        state go on bit for bit."""
        unbroken, resumed = self.scheduled(name), self.scheduled(name)
        backwards = [rows[:2], rows[2:]] * 4
        cut = 5 if within else 4
        train(unbroken, name, backwards[:cut], steps=2)
        _draw()
        unbroken.save("half", tmp_path, adapter_name=name, save_optimizer=True, consumed_train_samples=12)
        state = _random_state()
        expected = train(unbroken, name, backwards[cut:], steps=2)

        train(resumed, name, [rows[1:3]] * 2, steps=2)
        _draw()
        progress = resumed.resume_from_checkpoint(tmp_path / "half", adapter_name=name)
        assert progress == {"cur_step": 2, "consumed_train_samples": 12, "gradient_accumulation_steps": 2}
        other = [library for library, found in _random_state().items() if found != state[library]]
        assert not other, f"the random state of {', '.join(other)} was not restored"
        assert train(resumed, name, backwards[cut:], steps=2) == expected, "other losses or gradient norms (None: no update)"
        assert_same(weights(resumed, name), weights(unbroken, name))

    def scheduled(self, name: str) -> TwinkleModel:
        """A new model with AdamW under a schedule whose every step has another learning rate."""
        model = self.ready(name, optimizer="adamw")
        model.set_lr_scheduler("cosine_warmup", num_warmup_steps=1, num_training_steps=6, adapter_name=name)
        return model

    # ------------------------------------------------------------------------------------------------ adapters

    @capability("adapters")
    def test_training_one_adapter_leaves_the_others(self, rows: Rows) -> None:
        """Training A: weights and logits of B, and of the model without adapters, are bit for bit what they were."""
        model = self.ready("a", "b", optimizer="adamw")
        for name in ("a", "b"):
            train(model, name, [rows[:3]] * 2)
        before = {name: weights(model, name) for name in ("a", "b", BASE)}
        logits = {name: model.forward_only(rows, adapter_name=name).logits for name in ("b", BASE)}
        train(model, "a", [rows] * 2)
        moved = max(float((weights(model, "a")[k] - w).abs().max()) for k, w in before["a"].items())
        assert moved > 0, "training A changed nothing"
        for name in ("b", BASE):
            assert_same(weights(model, name), before[name])
            assert torch.equal(model.forward_only(rows, adapter_name=name).logits, logits[name]), f"other logits of '{name}'"
        without = model.forward_only(rows, adapter_name="b", disable_lora=True).logits
        assert torch.equal(without, logits[BASE]), "disable_lora is not the model without adapters"

    @capability("adapters")
    def test_adapters_side_by_side_train_as_if_alone(self, rows: Rows) -> None:
        """Two windows of different sizes interleave; each adapter gets what it would get in a model of its own."""
        both, alone = self.ready("a", "b", optimizer="adamw"), {n: self.ready("a", "b", optimizer="adamw") for n in "ab"}
        batches = {"a": [rows[:2], rows[2:]] * 3, "b": [rows[1:4]] * 6}
        found: dict[str, list[Any]] = {"a": [], "b": []}
        for a, b in zip(batches["a"], batches["b"], strict=True):
            found["a"] += train(both, "a", [a], steps=2)
            found["b"] += train(both, "b", [b], steps=3)
        for name, steps in (("a", 2), ("b", 3)):
            assert train(alone[name], name, batches[name], steps=steps) == found[name], f"adapter '{name}' trains otherwise"
            assert_same(weights(both, name), weights(alone[name], name))

    @capability("adapters")
    def test_adapters_come_and_go(self, rows: Rows) -> None:
        """A second of one name and an unknown one are refused; one that was removed leaves nothing behind."""
        model = self.ready("a", "b", optimizer="adamw")
        train(model, "a", [rows] * 2)
        before = weights(model, "a")
        with pytest.raises(DuplicateAdapter):
            model.add_adapter_to_model("a", self.adapter_config("a"))
        with pytest.raises(UnknownAdapter):
            model.forward_backward(rows, adapter_name="aa")
        model.remove_adapter("b")
        with pytest.raises(UnknownAdapter):
            model.forward_backward(rows, adapter_name="b")
        model.add_adapter_to_model("b", self.adapter_config("b"))
        model.forward_backward(rows, adapter_name="b")
        with pytest.raises(NoOptimizer):
            model.clip_grad_and_step(adapter_name="b")
        assert_same(weights(model, "a"), before)

    def test_adapters_are_refused_where_there_are_none(self, rows: Rows) -> None:
        """A model without adapters says so; training goes on."""
        if self.adapters:
            pytest.skip("it has adapters")
        model = self.ready(BASE)
        with pytest.raises((BadAdapter, Unsupported)):
            model.add_adapter_to_model("a", {})
        with pytest.raises(UnknownAdapter):
            model.forward_backward(rows, adapter_name="a")
        assert train(model, BASE, [rows] * 2) == train(self.ready(BASE), BASE, [rows] * 2)

    # ------------------------------------------------------------------------------------------------ ranks

    @capability("ranks")
    def test_two_ranks_are_one(self, rows: Rows, tmp_path: Path) -> None:
        """Uneven shares, a rank without rows, a window of two backwards, a short one: both ranks update as one process does.
        They write one checkpoint, from which one process resumes."""
        one = self.as_rank(0, 1, rows, str(tmp_path / "one"))
        first, second = run_ranks(type(self), "as_rank", 2, {"rows": list(rows), "folder": str(tmp_path / "two")})
        for name in self.trained():
            alone, mine, theirs = (each[name] for each in (one, first, second))
            assert_same(mine["weights"], theirs["weights"])
            assert mine["norms"] == pytest.approx(alone["norms"], rel=10 * self.tolerance), (
                f"two ranks ('{name}'): gradient norms {mine['norms']}, and {alone['norms']} in one process: gradients are "
                "summed over ranks and divided once, by the weight of all (finish_grads)"
            )
            assert_close(mine["weights"], alone["weights"], alone["start"], self.tolerance, f"two ranks ('{name}')")
            for rank in (mine, theirs):
                assert rank["metric"] == pytest.approx(alone["metric"], rel=10 * self.tolerance), "the metric 'loss' differs"
            resumed = self.ready(name)
            assert resumed.resume_from_checkpoint(mine["saved"], adapter_name=name)["cur_step"] == 4
            assert_same(weights(resumed, name), mine["weights"])

    def as_rank(self, rank: int, world_size: int, rows: Rows, folder: str) -> dict[str, dict[str, Any]]:
        """What one rank does; called in a process of its own. Plain numbers and tensors go in and come out."""
        found = {}
        for name in self.trained():
            model = self.ready(name)
            model.add_metric("loss", is_training=True, adapter_name=name)
            start = weights(model, name)
            norms = [float(train(model, name, [share(rows, rank, world_size)], micro_batch_size=1)[-1][1] or 0.0)]
            norms += [float(train(model, name, [rows if rank == 0 else []])[-1][1] or 0.0)]
            window = [share(part, rank, world_size) for part in (rows[:2], rows[2:])]
            norms += [float(train(model, name, window, steps=2)[-1][1] or 0.0)]
            model.forward_backward(window[0], adapter_name=name)
            norms += [float(model.flush(adapter_name=name) or 0.0)]
            metric = model.calculate_metric(adapter_name=name)
            for _ in range(3):  # one takes another's place: ranks that write side by side would meet here
                saved = model.save(f"last-{name}", folder, adapter_name=name, save_optimizer=True)
            found[name] = {"start": start, "norms": norms, "metric": metric["loss"], "saved": saved}
            found[name]["weights"] = weights(model, name)
        return found


def _draw() -> None:
    """Move on the random states that a checkpoint holds."""
    torch.rand(1)
    random.random()
    if numpy := sys.modules.get("numpy"):
        numpy.random.random()


def _random_state() -> dict[str, str]:
    """Of each library, as text."""
    states = {"torch": str(torch.get_rng_state().tolist()), "Python": str(random.getstate())}
    if numpy := sys.modules.get("numpy"):
        numbers = numpy.random.get_state(legacy=True)
        states["numpy"] = str([list(part) if isinstance(part, numpy.ndarray) else part for part in numbers])
    return states
