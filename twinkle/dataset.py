"""Data sets."""

from twinkle_core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Dataset": "twinkle_core.data.dataset:Dataset",
        "DatasetMeta": "twinkle_core.data.sources:DatasetMeta",
        "IterableDataset": "twinkle_core.data.streaming:IterableDataset",
        "LazyDataset": "twinkle_core.data.dataset:LazyDataset",
        "PackingDataset": "twinkle_core.data.packing:PackingDataset",
    },
)
