"""MultiLoraTransformersModel: a TransformersModel that many tenants train, each an adapter of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import BadLayout
from twinkle_core.runtime.dispatch import remote_class
from twinkle_core.train import limits
from twinkle_multilora.adapters import SlotAdapters
from twinkle_multilora.backend import needed
from twinkle_multilora.engine import SlotEngine
from twinkle_multilora.manager import MultiLora
from twinkle_multilora.ranks import RankScheduler, RankTurns
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
        BadLayout: a mesh that is not of data ranks alone. BadArgument, BadAdapter: no slots can be made of these. What
            TransformersModel raises.
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
            limits.check_count(name, value, least=1)
        _check_mesh(type(self).__name__, mesh_of(type(self).__name__, device_mesh))
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
        if self.engine.several:
            rank = self.engine.mesh.rank
            self.turns = turns = RankTurns(rank, self.engine.tell, lambda: self._chosen() or "")
            self.scheduler = RankScheduler(self, turns, rank)
        self.multi_lora = MultiLora(self, self.adapters.pool)

    def make_adapters(self, module: torch.nn.Module, precision: Precision, tokenizer: Callable[[], Any]) -> SlotAdapters:
        return SlotAdapters(module, precision, tokenizer, **self._slots)


#: what of a mesh tenants can't be laid over, and why
_REFUSED = {
    "tp_size": "a slot holds whole A and B, and the layers that it is beside would be cut",
    "ep_size": "tokens that travel to their experts meet those of other tenants",
    "ulysses_size": "rows of a shared pass are not cut into parts of the sequence",
}


def _check_mesh(owner: str, mesh: DeviceMesh) -> None:
    """Raise BadLayout unless ranks differ by their rows, and by which part of the frozen base they hold."""
    sizes = {"tp_size": mesh.sizes["tp"], "ep_size": mesh.ep_size, "ulysses_size": mesh.ulysses_size}
    for name, why in _REFUSED.items():
        if sizes[name] > 1:
            raise BadLayout(owner, f"{name} {sizes[name]}: {why}; tenants have dp_size and fsdp_size")
