from typing import Any

from twinkle_core.contracts.patch import Patch as Patch
from twinkle_transformers.patches.fast_lora import FastLora as FastLora

def __getattr__(name: str) -> Any: ...  # classes of other distributions
