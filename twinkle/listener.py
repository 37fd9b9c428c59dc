"""Listeners to training: a metrics file, a progress bar, or an object of yours with functions marked ``hookimpl``."""

from twinkle_core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "JsonLinesWriter": "twinkle_core.listeners.jsonl:JsonLinesWriter",
        "ProgressBar": "twinkle_core.listeners.progress:ProgressBar",
        "hookimpl": "twinkle_core.hookspecs:hookimpl",
        "listening": "twinkle_core.plugins:listening",
    },
)
