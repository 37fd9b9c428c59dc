"""How TransformersModel is built for its compliance suite: by ``twinkle check``, and by the tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig

from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.suites.model import ModelSuite
from twinkle_core.testing.suites.patch import PatchSuite
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.patches.fast_lora import FastLora
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


class FastLoraSuite(PatchSuite):
    """A Llama of two layers in fp32 with LoRA on all its linear layers, whose B is not 0 any more."""

    component = FastLora

    @pytest.fixture
    def model(self) -> TransformersModel:
        model = TransformersSuite().build(fast=False)
        model.add_adapter_to_model("default", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.adapters.parameters("default").values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        return model
