"""How MultiLoraTransformersModel is built for its compliance suite: by ``twinkle check``, and by the tests."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig

from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.suites.model import ModelSuite
from twinkle_multilora.backend import needed
from twinkle_multilora.model import MultiLoraTransformersModel

tiny_config = needed("twinkle_transformers.testing", "transformers", "its compliance suite").tiny_config


class MultiLoraSuite(ModelSuite):
    """A Llama of two layers in fp32 with three slots. The base model, which tenants share, is not trained."""

    component = MultiLoraTransformersModel
    full_parameters = False
    vocabulary = 250
    generate_arguments = {"max_new_tokens": 3}

    def build(self, **options: Any) -> MultiLoraTransformersModel:
        return MultiLoraTransformersModel(
            config=tiny_config(),
            mixed_precision="no",
            **{"device_mesh": DeviceMesh.from_sizes(device_type="cpu"), "max_loras": 3, "max_r": 8, **options},
        )

    def adapter_config(self, name: str) -> LoraConfig:
        return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
