"""What a model must leave as it was: training flags, other weights, what was loaded wrongly (L2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle_core.contracts.adapters import BASE, AdapterStore
from twinkle_core.errors import CheckpointMismatch
from twinkle_core.isolation import attempt
from twinkle_core.testing.suites.base import capability
from twinkle_core.testing.suites.model_checks import ModelChecks
from twinkle_core.testing.suites.training import Rows, assert_same, seeded, train, weights
from twinkle_core.train.folder import STATE_FILE

Tensors = dict[str, torch.Tensor]


def _stumble(inputs: Any, outputs: Any, **loss_args: Any) -> Any:
    raise ZeroDivisionError("what a loss of these checks raises")


class ModelState(ModelChecks):
    """Flags, and what a checkpoint may be loaded into."""

    def flags(self, model: Any) -> dict[str, bool]:
        """What is trained and which modules are in training mode."""
        network = self.network(model)
        trained = {f"requires_grad of {key}": p.requires_grad for key, p in network.named_parameters()}
        return trained | {f"training of {key or 'the network'}": m.training for key, m in network.named_modules()}

    def test_an_evaluation_is_in_evaluation_mode(self, name: str, rows: Rows) -> None:
        """No dropout within; afterwards each module's flag is what it was, whatever that was."""
        model = self.ready(name)
        modules = dict(self.network(model).named_modules())
        odd = list(modules)[-1]
        modules[odd].eval()
        before = self.flags(model)
        seen = self._training_in(model, lambda: model.forward_only(rows, adapter_name=name))
        dropping = [key or "the network" for key, training in seen.items() if training]
        assert not dropping, f"forward_only computes in training mode ({dropping[0]}): dropout is on"
        changed = [key for key, flag in self.flags(model).items() if flag != before[key]]
        assert not changed, f"forward_only leaves another {changed[0]} behind; it puts back what it found, module by module"

    def test_training_is_in_training_mode(self, name: str, rows: Rows) -> None:
        """With dropout, if the model has any."""
        model = self.ready(name)
        seen = self._training_in(model, lambda: model.forward_backward(rows, adapter_name=name), graph=True)
        assert next(iter(seen.values()), True), (  # of the first that ran: losses may call the output layer later
            "forward_backward computes in evaluation mode, so nothing is ever dropped: call module.train() when the model is "
            "built (transformers' from_pretrained gives models in evaluation mode), and in forward() leave it"
        )

    def _training_in(self, model: Any, call: Callable[[], Any], graph: bool = False) -> dict[str, bool]:
        """Whether each module that ran was in training mode, in the order in which they ran.

        Args:
            graph: only of calls with gradients on: engines probe a model without.
        """
        seen: dict[str, bool] = {}

        def note(key: str) -> Callable[..., None]:
            def hook(module: torch.nn.Module, *args: Any) -> None:
                if torch.is_grad_enabled() or not graph:
                    seen[key] = module.training

            return hook

        hooks = [module.register_forward_pre_hook(note(key)) for key, module in self.network(model).named_modules()]
        call()
        for one in hooks:
            one.remove()
        return seen

    def test_random_numbers_go_on(self, name: str, rows: Rows) -> None:
        """Training and evaluation seed nothing: dropout and the order of data would repeat."""
        model = self.ready(name)
        for verb in ("forward_only", "forward_backward"):
            states = []
            with torch.random.fork_rng(devices=[]):
                for seed in (1, 2):
                    torch.manual_seed(seed)
                    getattr(model, verb)(rows, adapter_name=name)
                    states.append(torch.get_rng_state())
            assert not torch.equal(*states), f"{verb}() seeds torch's random numbers: use a torch.Generator"

    def test_an_error_leaves_the_flags_alone(self, name: str, rows: Rows) -> None:
        """A loss that raises, in training and in evaluation: what was active and trained before is so afterwards."""
        model, plain = self.ready(name), self.ready(name)
        before, logits = self.flags(model), plain.forward_only(rows, adapter_name=BASE).logits
        for way in ("no error", "an error"):
            if way == "an error":
                model.set_loss(_stumble, adapter_name=name)
                with pytest.raises(ZeroDivisionError):
                    model.forward_backward(rows, adapter_name=name)
                model.set_loss("cross_entropy", adapter_name=name)
                model.zero_grad(adapter_name=name, drop=True)
            else:
                model.forward_only(rows, adapter_name=name)
            changed = [key for key, flag in self.flags(model).items() if flag != before[key]]
            assert not changed, f"after a forward with {way}, {changed[0]} is another: activate() puts back what it found"
        store = getattr(model, "adapters", None)
        if isinstance(store, AdapterStore):
            with store.activate(BASE):
                outer = self.flags(model)
                with store.activate(name):
                    pass
                changed = [key for key, flag in self.flags(model).items() if flag != outer[key]]
                assert not changed, f"activate('{name}') within activate(''): {changed[0]} stays another afterwards"
        assert torch.equal(model.forward_only(rows, adapter_name=BASE).logits, logits), "the base model computes otherwise"
        assert train(model, name, [rows] * 2) == train(plain, name, [rows] * 2), "it trains otherwise than without the error"

    @pytest.mark.parametrize("fault", ["lacks a key", "has a key too many", "has another shape"])
    def test_what_does_not_fit_is_not_loaded(self, name: str, fault: str, rows: Rows, tmp_path: Path) -> None:
        """CheckpointMismatch, and the weights are what they were."""
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        first, second = self.ready(name), self.ready(name)
        train(first, name, [rows] * 2)
        saved = Path(first.save("one", tmp_path, adapter_name=name))
        files = sorted(saved.rglob("*.safetensors"))
        assert files, f"{saved} holds no *.safetensors: weights are written as plain files that other libraries load"
        state: Tensors = load_file(files[0])
        with safe_open(files[0], "pt") as opened:
            facts = opened.metadata()
        key = max(state, key=lambda k: state[k].numel())
        state |= {"lacks a key": {}, "has a key too many": {f"{key}.more": torch.zeros(1)}}.get(fault) or {
            key: torch.zeros(*(n + 1 for n in state[key].shape))
        }
        if fault == "lacks a key":
            del state[key]
        save_file(state, files[0], metadata=facts)
        (saved / STATE_FILE).unlink()  # it knows how long the file was
        before = weights(second, name)
        got = attempt(lambda: second.load("one", tmp_path, adapter_name=name))
        assert isinstance(got.error, CheckpointMismatch), (
            f"load() of weights of which the file {fault} ({key}) gives {got.why or 'no error'}: raise CheckpointMismatch "
            "(twinkle_core.train.single.check_state compares)"
        )
        assert_same(weights(second, name), before)

    @capability("adapters")
    def test_an_adapters_checkpoint_fits_one_of_another_name(self, rows: Rows, tmp_path: Path) -> None:
        """No adapter's name is in the keys."""
        model = self.ready("a", "other")
        train(model, "a", [rows] * 2)
        model.save("one", tmp_path, adapter_name="a")
        model.load("one", tmp_path, adapter_name="other")
        assert_same(weights(model, "other"), weights(model, "a"))

    @capability("adapters")
    def test_an_adapter_that_comes_again_is_new(self, rows: Rows) -> None:
        """Nothing of a removed adapter is in a new one of its name."""
        again, fresh = self.ready("a", optimizer="adamw"), self.ready()
        train(again, "a", [rows] * 2)
        again.remove_adapter("a")
        for model in (again, fresh):
            with seeded():
                model.add_adapter_to_model("a", self.adapter_config("a"))
        assert_same(weights(again, "a"), weights(fresh, "a"))
