"""What a model's losses, gradients and updates must be, by other ways to the same numbers (L2)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

from twinkle_core.contracts.loss import Loss
from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.contracts.patch import Patch
from twinkle_core.contracts.processor import Processor
from twinkle_core.errors import TwinkleError
from twinkle_core.isolation import attempt
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.suites.base import capability
from twinkle_core.testing.suites.model_checks import ModelChecks
from twinkle_core.testing.suites.training import Rows, assert_close, assert_same, distance, train, weights
from twinkle_core.types import IGNORE_INDEX, InputFeature, LossOutput, ModelOutput

NO_LIMIT = 1e30  # of a gradient's norm


class Watching(Loss):
    """A mean of log probabilities that keeps what it was given."""

    needs: ClassVar[frozenset[str]] = frozenset({"logps", "entropies", "predictions"})

    def __init__(self, factor: float = -1.0) -> None:
        self.factor = factor
        self.seen: list[ModelOutput] = []

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, *args: Any, **loss_args: Any) -> LossOutput:
        self.seen.append(ModelOutput({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in outputs.items()}))
        held = inputs["labels"] != IGNORE_INDEX
        return LossOutput(outputs.logps[held].sum() * self.factor, held.sum())


class Reaching(Watching):
    """Notes which parameters of a network its gradient reaches, and how large it is there."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self.reached: dict[str, float] = {}

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, *args: Any, **loss_args: Any) -> LossOutput:
        result = super().__call__(inputs, outputs)
        trained = {key: p for key, p in self.network.named_parameters() if p.requires_grad}
        if trained and result.sum.requires_grad:
            found = torch.autograd.grad(result.sum, list(trained.values()), allow_unused=True, retain_graph=True)
            self.reached = {key: float(g.abs().max()) for key, g in zip(trained, found, strict=True) if g is not None}
        return result


class Counting(InputProcessor):
    """The default one, which counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def collate(self, rows: Any) -> InputFeature:
        self.batches += 1
        return super().collate(rows)


class Marks(Patch):
    """Notes what it is applied to."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def apply(self, model: Any) -> None:
        self.given.append(model)

    def undo(self, model: Any) -> None:
        self.given.remove(model)


class ModelNumbers(ModelChecks):
    """Gradients, clipping, outputs, and that what is set is used."""

    def logits(self, model: TwinkleModel, name: str, rows: Rows) -> list[torch.Tensor]:
        """Of each row alone, ``[T, V]`` in float64."""
        return [model.forward_only([row], adapter_name=name).logits[0].double().cpu() for row in rows]

    def plain_loss(self, model: TwinkleModel, name: str, rows: Rows, temperature: float = 1.0) -> float:
        """Mean cross entropy of the labelled tokens, by the formula, in float64."""
        total, count = 0.0, 0
        for row, logits in zip(rows, self.logits(model, name, rows), strict=True):
            labels = torch.as_tensor(row["labels"])
            held = labels != IGNORE_INDEX
            total -= float((logits / temperature).log_softmax(-1)[held, labels[held]].sum())
            count += int(held.sum())
        return total / count

    def moved(
        self, name: str, rows: Rows, lr: float, max_norm: float = NO_LIMIT, norm_type: float = 2, maximize: bool = False
    ) -> tuple[TwinkleModel, Any, Any]:
        """A new model after one update of plain SGD: itself, the norm that was returned, and weights before minus after."""
        model = self.ready(name)
        model.set_optimizer("sgd", lr=lr, weight_decay=0.0, maximize=maximize, adapter_name=name)
        before = weights(model, name)
        model.forward_backward(rows, adapter_name=name)
        norm = model.clip_grad_and_step(max_norm, norm_type, adapter_name=name)
        after = weights(model, name)
        own = {live.data_ptr(): key for key, live in reversed(model.get_state_dict(adapter_name=name).items())}
        return model, norm, {key: (before[key].double() - after[key].double()) / lr for key in own.values()}  # tied ones once

    def test_the_gradient_is_that_of_the_loss(self, name: str, rows: Rows) -> None:
        """A step of h along the gradient g changes the mean loss, by the plain formula, by h times the square of the norm that
        was returned. A sum in place of the mean, or a gradient counted twice, is told by it."""
        norm = self.moved(name, rows, 1e-3)[1]
        assert norm is not None and norm > 0, f"clip_grad_and_step() returns {norm} at the end of a window"
        lr = 0.02 / norm
        down, _, gradient = self.moved(name, rows, lr)
        up = self.moved(name, rows, lr, maximize=True)[0]
        slope = (self.plain_loss(up, name, rows) - self.plain_loss(down, name, rows)) / (2 * lr)
        assert slope == pytest.approx(norm**2, rel=0.05), (
            f"the norm of the gradient is said to be {norm:.6g}; by what a small step does to the mean loss it is "
            f"{math.sqrt(max(slope, 0)):.6g}. Gradients are sums that finish_grads multiplies by its scale, once"
        )
        length = distance(gradient, {key: torch.zeros_like(value) for key, value in gradient.items()})
        assert length == pytest.approx(norm, rel=1e-3), (
            f"the norm of the gradient is said to be {norm:.6g}, and SGD moved the weights by {length:.6g} times its lr"
        )

    def test_all_that_can_be_trained_is(self, name: str, rows: Rows) -> None:
        """Each parameter of the network that is not frozen and that the loss depends on is moved by an update."""
        model = self.ready(name)
        network = self.network(model)
        reaching = Reaching(network)
        model.set_loss(reaching, adapter_name=name)
        before = {key: p.detach().clone() for key, p in network.named_parameters()}
        train(model, name, [rows])
        least = 1e-3 * max(reaching.reached.values(), default=0.0)
        still = [
            key
            for key, size in reaching.reached.items()
            if size > least and torch.equal(before[key], network.get_parameter(key).detach())
        ]
        assert not still, (
            f"{still[0]} has a gradient and is not moved by an update ({len(still)} of {len(reaching.reached)}): parameters() "
            "of the adapter store names all that is trained; what is not to be trained has requires_grad False"
        )

    def test_a_window_begins_with_no_gradient(self, name: str, rows: Rows) -> None:
        """After an update, the gradient of the next window is that of its own rows."""
        norms = []
        for windows in ([rows[2:]], [rows[:2], rows[2:]]):
            model = self.ready(name)
            model.set_optimizer("sgd", lr=0.0, weight_decay=0.0, adapter_name=name)  # weights stay: the norms can be compared
            norms.append(train(model, name, windows)[-1][1])
        assert norms[1] == pytest.approx(norms[0], rel=1e-3), (
            f"the second window's norm is {norms[1]}, and alone {norms[0]}: zero_grad() leaves the first one's gradients"
        )

    def test_gradients_are_clipped(self, name: str, rows: Rows) -> None:
        """To ``max_grad_norm`` in the norm that is asked for; what is returned is the norm before."""
        lr = 0.02 / self.moved(name, rows, 1e-3)[1]
        whole = self.moved(name, rows, lr)[2]
        flat = torch.cat([value.flatten() for value in whole.values()])
        for norm_type in (2.0, 1.0, math.inf):
            expected = float(torch.linalg.vector_norm(flat, norm_type))
            for share in (0.5, 2.0):
                _, norm, clipped = self.moved(name, rows, lr, share * expected, norm_type=norm_type)
                assert norm == pytest.approx(expected, rel=1e-3), f"norm_type {norm_type}: {norm} is returned, not {expected}"
                wanted = {key: value * min(share, 1.0) for key, value in whole.items()}
                off = distance(clipped, wanted) / distance(whole, {k: torch.zeros_like(v) for k, v in whole.items()})
                assert off < 1e-2, (
                    f"max_grad_norm {share:g} times the norm (type {norm_type:g}): the update differs by {off:.2g} from "
                    f"the gradient {'cut to that norm' if share < 1 else 'as it is'}"
                )

    def test_the_verbs_of_an_update_one_by_one(self, name: str, rows: Rows) -> None:
        """clip_grad_norm, step, zero_grad and lr_step do what clip_grad_and_step does."""
        whole, apart = self.ready(name, optimizer="adamw"), self.ready(name, optimizer="adamw")
        for model in (whole, apart):
            model.set_lr_scheduler("cosine_warmup", num_warmup_steps=1, num_training_steps=5, adapter_name=name)
        for _ in range(3):
            for model in (whole, apart):
                model.forward_backward(rows, adapter_name=name)
            norms = [whole.clip_grad_and_step(0.1, adapter_name=name), apart.clip_grad_norm(0.1, adapter_name=name)]
            assert norms[0] == norms[1], f"clip_grad_norm() returns {norms[1]}, clip_grad_and_step() {norms[0]}"
            for verb in (apart.step, apart.zero_grad, apart.lr_step):
                assert verb(adapter_name=name), f"{verb.__name__}() says that it did nothing at the end of a window"
        assert_same(weights(apart, name), weights(whole, name))

    def test_a_window_can_be_given_up_or_closed_early(self, name: str, rows: Rows) -> None:
        """``zero_grad(drop=True)`` forgets an open window; ``flush`` makes an update of a short one."""
        plain, asked = self.ready(name), self.ready(name)
        train(asked, name, [rows[:3]], steps=2)
        asked.zero_grad(adapter_name=name, drop=True)
        assert_same(weights(asked, name), weights(plain, name))
        train(asked, name, [rows[1:]], steps=2)
        expected, found = train(plain, name, [rows[1:]])[0][1], asked.flush(adapter_name=name)
        assert found == expected, f"flush() returns {found}; an update with the same rows has the norm {expected}"
        assert_same(weights(asked, name), weights(plain, name))

    def test_gradients_that_are_not_finite_train_nothing(self, name: str, rows: Rows) -> None:
        """They raise, or the update is left out: the weights are what they were."""
        for bad in (math.nan, math.inf):
            model = self.ready(name)
            before = weights(model, name)
            model.set_loss(Watching(bad), adapter_name=name)
            model.forward_backward(rows, adapter_name=name)
            got = attempt(lambda model=model: model.clip_grad_and_step(adapter_name=name))  # type: ignore[misc]
            assert got.error is None or isinstance(got.error, TwinkleError), f"gradients of {bad}: {got.why}"
            assert_same(weights(model, name), before)

    def test_a_temperature_divides_the_logits(self, name: str, rows: Rows) -> None:
        """In ``forward_only`` and in the loss."""
        model = self.ready(name)
        expected = self.plain_loss(model, name, rows, 2.0)
        loss = float(model.forward_backward(rows, adapter_name=name, temperature=2.0))
        assert loss == pytest.approx(expected, rel=10 * self.tolerance), f"temperature 2: loss {loss}, not {expected}"
        cool, plain = (model.forward_only(rows[:1], adapter_name=name, temperature=t).logits for t in (2.0, 1.0))
        torch.testing.assert_close(cool * 2, plain, rtol=10 * self.tolerance, atol=10 * self.tolerance)

    def test_losses_get_what_they_need(self, name: str, rows: Rows) -> None:
        """The fields that a loss names, by their definitions, and none of the others."""
        model, watching = self.ready(name), Watching()
        model.set_loss(watching, adapter_name=name)
        logits = self.logits(model, name, rows)
        for row, plain in zip(rows, logits, strict=True):
            watching.seen.clear()
            model.forward_backward([row], adapter_name=name)
            found = watching.seen[0]
            more = sorted(set(found) & set(ModelOutput.KEYS) - watching.needs - {"loss", "num_items"})
            assert not more, f"a loss that needs {', '.join(sorted(watching.needs))} is given {', '.join(more)} too"
            labels, logps = torch.as_tensor(row["labels"]), plain.log_softmax(-1)
            held = labels != IGNORE_INDEX
            expected = {
                "logps": logps[held, labels[held]],
                "entropies": -(logps.exp() * logps).sum(-1)[held],
                "predictions": plain.argmax(-1)[held],
            }
            for field, right in expected.items():
                given = found[field][0, : len(labels)].cpu()[held]
                assert torch.allclose(given.double(), right.double(), rtol=1e-4, atol=1e-4), (
                    f"{field} at the labelled tokens are {given.tolist()}; by the logits they are {right.tolist()}"
                )

    def test_what_is_set_is_used(self, name: str, rows: Rows) -> None:
        """A loss, a processor, a metric and a patch."""
        model, counting, marks = self.ready(name), Counting(), Marks()
        expected = 3 * float(model.forward_backward(rows, adapter_name=name))
        model.set_loss(Watching(-3.0), adapter_name=name)
        found = float(model.forward_backward(rows, adapter_name=name))
        assert found == pytest.approx(expected, rel=1e-4), f"set_loss() with three times the loss: {found}, not {expected}"
        model.set_processor(counting, adapter_name=name)
        model.add_metric("loss", is_training=True, adapter_name=name)
        found = float(model.forward_backward(rows, adapter_name=name))
        assert counting.batches, "set_processor(): the processor that was set made no batch"
        said = model.calculate_metric(adapter_name=name).get("loss")
        assert said == pytest.approx(found, rel=1e-4), f"add_metric('loss'): it says {said}, and the loss was {found}"
        model.add_metric("loss", is_training=False, adapter_name=name)
        model.forward_backward(rows[:1], adapter_name=name)
        model.forward_only(rows, adapter_name=name)
        said = model.calculate_metric(is_training=False, adapter_name=name).get("loss")
        assert said == pytest.approx(found, rel=1e-4), f"add_metric('loss', is_training=False): it says {said}, not {found}"
        assert model.get_train_configs(adapter_name=name), "get_train_configs() says nothing"
        model.apply_patch(marks)
        assert len(marks.given) == 1, f"apply_patch(): the patch was applied {len(marks.given)} times"
        self.network(marks.given[0])

    @capability("packing")
    def test_packed_rows_do_not_see_each_other(self, name: str, rows: Rows) -> None:
        """In one sequence they give the loss, norms and updates that they give apart."""
        apart, packed = self.ready(name), self.ready(name)
        packed.set_processor(self.packer(), adapter_name=name)
        found, expected = train(packed, name, [rows] * 2), train(apart, name, [rows] * 2)
        assert [n for pair in found for n in pair] == pytest.approx([n for pair in expected for n in pair], rel=1e-4), (
            f"losses and norms of packed rows are {found}, of padded ones {expected}: tokens of a row see those of their own "
            "row alone (position_ids start at 0 with each). A model that can't says packing = False"
        )
        assert_close(weights(packed, name), weights(apart, name), weights(self.ready(name), name), 1e-3, "packed rows")

    def packer(self) -> Processor:
        """The processor that packs."""
        return InputProcessor(padding_free=True)
