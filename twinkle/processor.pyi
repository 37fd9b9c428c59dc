from typing import Any

from twinkle_core.contracts.processor import Processor as Processor
from twinkle_core.processors.input import InputProcessor as InputProcessor

def __getattr__(name: str) -> Any: ...  # classes of other distributions
