"""MultiLoraMegatronModel: a MegatronModel that many tenants train in turns, each an adapter of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from twinkle_core.runtime.dispatch import remote_class
from twinkle_core.train import limits
from twinkle_multilora.backend import needed
from twinkle_multilora.manager import MultiLora
from twinkle_multilora.many import Many

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from twinkle_core.mesh import DeviceMesh
    from twinkle_megatron.engine import MegatronEngine
    from twinkle_megatron.load import Built
    from twinkle_megatron.model import MegatronModel
    from twinkle_megatron.parallel import Layout
    from twinkle_multilora.megatron_slots import MegatronSlotEngine, MegatronSlots
else:
    MegatronModel = needed("twinkle_megatron.model", "megatron", "MultiLoraMegatronModel").MegatronModel


@remote_class(execute="all")
class MultiLoraMegatronModel(Many, MegatronModel):
    """A MegatronModel with slots for the LoRA adapters of many tenants.

    The base model is frozen and shared. A tenant is an adapter: ``add_adapter_to_model`` and ``remove_adapter``, or
    ``multi_lora.acquire_lora`` and ``multi_lora.release_lora``, which are the same. All verbs are MegatronModel's; they take
    the tenant's name or its slot's.

    Tenants take turns, under every layout of MegatronModel's: a pass of the model is one tenant's. Whose turn it is must be
    the same on all ranks, so several threads may call in a mesh of one rank alone.

    Args:
        model_id, config, device_mesh, mixed_precision: as for MegatronModel.
        max_loras: how many tenants at once. Room for their weights is allocated here, whether it is used or not.
        max_r: the highest rank of a tenant.
        max_length: the longest row, in tokens.
        target_modules: where adapters may be: ``all-linear``, or names as MegatronModel's adapters take them; a tenant may take
            a part of it.
        kwargs: all others of MegatronModel.

    Raises:
        BadArgument, BadAdapter: no slots can be made of these. What MegatronModel raises.
    """

    adapters: MegatronSlots
    engine: MegatronSlotEngine

    def __init__(
        self,
        model_id: str | Path | None = None,
        config: PretrainedConfig | None = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: Literal["no", "fp16", "bf16"] = "bf16",
        max_loras: int = 5,
        max_r: int = 32,
        max_length: int = 8192,
        *,
        target_modules: Any = "all-linear",
        **kwargs: Any,
    ) -> None:
        for name, value in (("max_loras", max_loras), ("max_r", max_r), ("max_length", max_length)):
            limits.check_count(name, value, least=1)
        self._slots = {"max_loras": max_loras, "max_r": max_r, "target_modules": target_modules}
        super().__init__(model_id, config, device_mesh, mixed_precision, **kwargs)
        self.engine.max_length, self.engine.slots = max_length, self.adapters
        self.multi_lora = MultiLora(self, self.adapters.pool)

    def make_engine(self, built: Built, **facts: Any) -> MegatronSlotEngine:
        from twinkle_multilora.megatron_slots import MegatronSlotEngine

        return MegatronSlotEngine(built, **facts)

    def make_adapters(self, built: Built, layout: Layout, engine: MegatronEngine) -> MegatronSlots:
        from twinkle_multilora.megatron_slots import MegatronSlots

        return MegatronSlots(built, layout, engine.reload, engine.forget, **self._slots)
