from typing import Any

from twinkle_core.contracts.patch import Patch as Patch

def __getattr__(name: str) -> Any: ...  # classes of other distributions
