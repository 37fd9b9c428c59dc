from typing import Any

from twinkle_core.templates.chat import ChatTemplate as ChatTemplate

Template = ChatTemplate

def __getattr__(name: str) -> Any: ...  # classes of other distributions
