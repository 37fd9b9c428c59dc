from typing import Any

from twinkle_core.contracts.model import TwinkleModel as TwinkleModel
from twinkle_megatron.model import MegatronModel as MegatronModel
from twinkle_multilora.megatron import MultiLoraMegatronModel as MultiLoraMegatronModel
from twinkle_multilora.model import MultiLoraTransformersModel as MultiLoraTransformersModel
from twinkle_transformers.model import TransformersModel as TransformersModel

def __getattr__(name: str) -> Any: ...  # classes of other distributions
