"""How TransformersModel is built for its compliance suite: by ``twinkle check``, and by the tests."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig

from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.suites.model import ModelSuite
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import tiny_config


class TransformersSuite(ModelSuite):
    """A Llama of two layers in fp32, whole and with LoRA on all its linear layers."""

    component = TransformersModel
    vocabulary = 250
    generate_arguments = {"max_new_tokens": 3}

    def build(self, **options: Any) -> TransformersModel:
        return TransformersModel(
            config=tiny_config(), mixed_precision="no", device_mesh=DeviceMesh.from_sizes(device_type="cpu"), **options
        )

    def adapter_config(self, name: str) -> LoraConfig:
        return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
