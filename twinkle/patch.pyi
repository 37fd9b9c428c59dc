from typing import Any

from twinkle_core.contracts.patch import Patch as Patch
from twinkle_core.patches.embedding import EmbeddingPatch as EmbeddingPatch
from twinkle_core.patches.value_head import ValueHeadPatch as ValueHeadPatch
from twinkle_transformers.patches.fast_lora import FastLora as FastLora

def __getattr__(name: str) -> Any: ...  # classes of other distributions
