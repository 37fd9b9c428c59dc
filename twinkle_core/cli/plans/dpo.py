"""Training on pairs of a preferred and a refused answer: DPO, and losses over pairs without a reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from twinkle_core.cli.plans.base import Beside, Fault, Task, built, required
from twinkle_core.config.schema import TrainConfig
from twinkle_core.config.source import Source

if TYPE_CHECKING:
    from twinkle_core.contracts.model import TwinkleModel


class Preference(Task):
    """Pairs. The answers alone are trained, so ``train_on`` is ``last``.

    The reference is the model as it is when the run begins. A new LoRA changes nothing at first, so the model without it is the
    reference; where an adapter is gone on from, or all weights are trained, the reference is a second model.
    """

    grouped = True
    gives = frozenset({"ref_logps"})
    unit = "a pair"

    def defaults(self, config: TrainConfig) -> dict[str, Any]:
        """The loss, its metrics, and labels on the answers alone."""
        return {
            **super().defaults(config),
            "template": {"train_on": "last"},
            "loss": {"cls": "dpo"},
            "metrics": ["loss", "dpo", "train"],
        }

    def faults(self, config: TrainConfig, source: Source, classes: Mapping[str, Any]) -> Iterator[Fault]:
        """Packing, and a loss that reads no pairs."""
        from twinkle_core.contracts.loss import Loss

        yield from super().faults(config, source, classes)
        if config.packing:
            yield source.origin(("packing",)), "packing: pairs can't be packed; remove it, or set it to false"
        loss = classes.get("loss")
        if inspect.isclass(loss) and issubclass(loss, Loss) and loss.groups is Loss.groups:
            yield source.origin(("loss",)), f"loss '{config.loss.cls}' reads no pairs; take dpo, simpo, cpo or orpo"

    def beside(self, config: TrainConfig, model: TwinkleModel, make: Callable[[], TwinkleModel]) -> Beside:
        """Logps of the reference, for a loss that can't do without."""
        if "ref_logps" not in required(built("loss", config.loss)):
            return super().beside(config, model, make)
        how: dict[str, Any] = {"return_logits": False, "micro_batch_size": config.training.micro_batch_size}
        if config.adapter is not None and config.adapter.path is None:
            reference = model
            how["disable_lora"] = True
        else:
            reference = make()
        return lambda rows: {"ref_logps": reference.forward_only(inputs=rows, **how).logps}


TASK = Preference()
