from twinkle_core.data.dataset import Dataset as Dataset
from twinkle_core.data.dataset import DatasetMeta as DatasetMeta
from twinkle_core.data.dataset import IterableDataset as IterableDataset
from twinkle_core.data.dataset import LazyDataset as LazyDataset
from twinkle_core.data.dataset import PackingDataset as PackingDataset
