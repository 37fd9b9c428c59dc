"""Metrics of all installed distributions, and their contract."""

from twinkle_core.lazy import attach

__getattr__, __dir__, _ = attach(
    __name__,
    {
        "Metric": "twinkle_core.contracts.metric:Metric",
    },
    kind="metric",
)
