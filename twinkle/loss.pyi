from typing import Any

from twinkle_core.contracts.loss import Loss as Loss
from twinkle_core.losses.chunked_cross_entropy import ChunkedCrossEntropyLoss as ChunkedCrossEntropyLoss
from twinkle_core.losses.cross_entropy import CrossEntropyLoss as CrossEntropyLoss
from twinkle_core.losses.mse import MSELoss as MSELoss
from twinkle_core.types import LossOutput as LossOutput

def __getattr__(name: str) -> Any: ...  # classes of other distributions
