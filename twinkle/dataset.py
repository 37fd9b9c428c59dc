"""Data sets."""

from twinkle_core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Dataset": "twinkle_core.data.dataset:Dataset",
        "DatasetMeta": "twinkle_core.data.sources:DatasetMeta",
        "LazyDataset": "twinkle_core.data.dataset:LazyDataset",
    },
)
