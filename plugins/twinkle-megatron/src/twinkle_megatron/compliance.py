"""How MegatronModel is built for its compliance suite: by ``twinkle check``, and by the tests."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig
from transformers import LlamaConfig

from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.suites.model import ModelSuite
from twinkle_megatron.model import MegatronModel
from twinkle_megatron.testing import SIZES


class ByCoresNames(MegatronModel):
    """Optimizers and schedules under the names that the suite has for them, as Megatron's own."""

    def set_optimizer(
        self, optimizer_cls: Any = "default", *, adapter_name: str | None = None, maximize: bool = False, **kwargs: Any
    ) -> None:
        own: dict[str, Any] = {"optimizer": "sgd", "sgd_momentum": 0.0} if optimizer_cls == "sgd" else {"optimizer": "adam"}
        super().set_optimizer("default", adapter_name=adapter_name, **own, **kwargs)
        for group in self._session(adapter_name).optimizer.param_groups if maximize else ():  # type: ignore[union-attr]
            group["lr"] = -group["lr"]

    def set_lr_scheduler(self, scheduler_cls: Any = "default", *, adapter_name: str | None = None, **kwargs: Any) -> None:
        plan = {"lr_warmup_steps": kwargs["num_warmup_steps"], "lr_decay_steps": kwargs["num_training_steps"]}
        super().set_lr_scheduler("default", adapter_name=adapter_name, **plan)


class MegatronSuite(ModelSuite):
    """A Llama of two layers in fp32, whole and with LoRA on all its linear layers, in one process; two data ranks in two."""

    component = MegatronModel
    vocabulary = 250

    def build(self, **options: Any) -> MegatronModel:
        config = LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "initializer_range": 0.1})
        mesh = DeviceMesh.from_sizes(device_type="cpu")
        return ByCoresNames(config=config, mixed_precision="no", device_mesh=mesh, init_method_std=0.1, **options)

    def adapter_config(self, name: str) -> LoraConfig:
        return LoraConfig(r=4, lora_alpha=8)
