"""How MultiLoraMegatronModel is built for its compliance suite: by ``twinkle check``, and by the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft import LoraConfig

from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.suites.model import ModelSuite
from twinkle_multilora.backend import needed
from twinkle_multilora.megatron import MultiLoraMegatronModel

if TYPE_CHECKING:
    from twinkle_megatron.compliance import ByCoresNames
    from twinkle_megatron.testing import SIZES
else:
    ByCoresNames = needed("twinkle_megatron.compliance", "megatron", "its compliance suite").ByCoresNames
    SIZES = needed("twinkle_megatron.testing", "megatron", "its compliance suite").SIZES


class ByName(ByCoresNames, MultiLoraMegatronModel):
    """Optimizers and schedules under the names that the suite has for them."""


class MultiLoraMegatronSuite(ModelSuite):
    """A Llama of two layers in fp32 with three slots, in one process; two data ranks in two. The base is not trained."""

    component = MultiLoraMegatronModel
    full_parameters = False
    vocabulary = 250

    def build(self, **options: Any) -> MultiLoraMegatronModel:
        from transformers import LlamaConfig

        config = LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "initializer_range": 0.1})
        mesh = DeviceMesh.from_sizes(device_type="cpu")
        given = {"device_mesh": mesh, "max_loras": 3, "max_r": 8, "init_method_std": 0.1, **options}
        return ByName(config=config, mixed_precision="no", **given)

    def adapter_config(self, name: str) -> LoraConfig:
        return LoraConfig(r=4, lora_alpha=8)
