"""MultiLoraTransformersModel: a TransformersModel that many tenants train, each an adapter of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import BadLayout
from twinkle_core.runtime.dispatch import remote_class
from twinkle_multilora.adapters import SlotAdapters
from twinkle_multilora.backend import needed
from twinkle_multilora.engine import SlotEngine
from twinkle_multilora.manager import MultiLora
from twinkle_multilora.pool import check_size
from twinkle_multilora.scheduler import TenantScheduler
from twinkle_multilora.together import Together

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from twinkle_core.mesh import DeviceMesh
    from twinkle_transformers.model import TransformersModel
    from twinkle_transformers.parallel import mesh_of
    from twinkle_transformers.precision import Mixed, Precision
else:
    TransformersModel = needed("twinkle_transformers.model", "transformers", "MultiLoraTransformersModel").TransformersModel
    mesh_of = needed("twinkle_transformers.parallel", "transformers", "MultiLoraTransformersModel").mesh_of


@remote_class(execute="all")
class MultiLoraTransformersModel(Together, TransformersModel):
    """A TransformersModel with slots for the LoRA adapters of many tenants, who share passes of the base model.

    The base model is frozen and shared. A tenant is an adapter: ``add_adapter_to_model`` and ``remove_adapter``, or
    ``multi_lora.acquire_lora`` and ``multi_lora.release_lora``, which are the same. All verbs are TransformersModel's; they
    take the tenant's name or its slot's.

    Threads may call at once: each call is a turn, given in the order in which it was asked for. ``forward_backward`` calls of
    different tenants that wait for their turn together ride one pass (``scheduler``); ``forward_backward_many`` asks for that
    outright. Neither changes a bit of what a tenant gets.

    Args:
        model_cls, model_id, config, device_mesh, mixed_precision, grad_scaler_config: as for TransformersModel.
        max_loras: how many tenants at once. Their room is allocated here, whether it is used or not.
        max_r: the highest rank of a tenant.
        max_length: the longest row, in tokens.
        target_modules: where adapters may be, as peft's ``LoraConfig`` takes it; a tenant may take a part of it.
        fast: tenants share passes without padding, and layers add adapters in place. False: one tenant's padded batch a pass,
            and each layer computed as the formula stands; the same to rounding, to see what either is worth or to blame.
        kwargs: all others of TransformersModel.

    Raises:
        BadLayout: a mesh of several ranks. BadArgument, BadAdapter: no slots can be made of these. What TransformersModel
            raises.
    """

    adapters: SlotAdapters
    engine: SlotEngine
    engine_cls = SlotEngine
    fast_patches = ()

    def __init__(
        self,
        model_cls: type[PreTrainedModel] | type | str | None = "AutoModelForCausalLM",
        model_id: str | Path | None = None,
        config: PretrainedConfig | None = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: Mixed = "bf16",
        grad_scaler_config: Mapping[str, Any] | None = None,
        max_loras: int = 5,
        max_r: int = 32,
        max_length: int = 8192,
        *,
        target_modules: Any = "all-linear",
        fast: bool = True,
        **kwargs: Any,
    ) -> None:
        for name, value in (("max_loras", max_loras), ("max_r", max_r), ("max_length", max_length)):
            check_size(name, value)
        ranks = mesh_of(type(self).__name__, device_mesh).world_size
        if ranks > 1:  # which calls ride one pass is decided by when they come, on each rank by itself
            why = f"tenants share passes in one process in this version, and it has {ranks} ranks"
            raise BadLayout(type(self).__name__, why)
        self._slots = {"max_loras": max_loras, "max_r": max_r, "target_modules": target_modules}
        super().__init__(
            model_cls,
            model_id,
            config,
            device_mesh,
            mixed_precision,
            grad_scaler_config=grad_scaler_config,
            fast=fast,
            **kwargs,
        )
        self.engine.max_length, self.engine.slots = max_length, self.adapters
        self.engine.fast = self.adapters.selection.lean = fast
        self.scheduler = TenantScheduler(self)
        self.multi_lora = MultiLora(self, self.adapters.pool)

    def make_adapters(self, module: torch.nn.Module, precision: Precision, tokenizer: Callable[[], Any]) -> SlotAdapters:
        return SlotAdapters(module, precision, tokenizer, **self._slots)
