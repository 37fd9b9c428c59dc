from typing import Any

from twinkle_core.templates.chat import ChatTemplate as ChatTemplate
from twinkle_core.templates.vision import VisionTemplate as VisionTemplate
from twinkle_dsml.template import DeepseekV4Template as DeepseekV4Template
from twinkle_dsml.template import DeepseekV32Template as DeepseekV32Template
from twinkle_dsml.template import DSMLTemplate as DSMLTemplate

Template = ChatTemplate

def __getattr__(name: str) -> Any: ...  # classes of other distributions
