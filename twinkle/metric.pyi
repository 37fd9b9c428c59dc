from typing import Any

from twinkle_core.contracts.metric import Metric as Metric
from twinkle_core.metrics.accuracy import AccuracyMetric as AccuracyMetric
from twinkle_core.metrics.dpo import DPOMetric as DPOMetric
from twinkle_core.metrics.embedding import EmbeddingMetric as EmbeddingMetric
from twinkle_core.metrics.grpo import GRPOMetric as GRPOMetric
from twinkle_core.metrics.loss import LossMetric as LossMetric
from twinkle_core.metrics.throughput import ThroughputMetric as ThroughputMetric
from twinkle_core.metrics.train import TrainMetric as TrainMetric

def __getattr__(name: str) -> Any: ...  # classes of other distributions
