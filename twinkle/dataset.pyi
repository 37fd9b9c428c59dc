from twinkle_core.data.dataset import Dataset as Dataset
from twinkle_core.data.dataset import LazyDataset as LazyDataset
from twinkle_core.data.packing import PackingDataset as PackingDataset
from twinkle_core.data.sources import DatasetMeta as DatasetMeta
from twinkle_core.data.streaming import IterableDataset as IterableDataset
