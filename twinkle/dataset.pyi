from twinkle_core.data.dataset import Dataset as Dataset
from twinkle_core.data.dataset import LazyDataset as LazyDataset
from twinkle_core.data.sources import DatasetMeta as DatasetMeta
