"""The loader."""

from twinkle_core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "DataLoader": "twinkle_core.data.dataloader:DataLoader",
    },
)
