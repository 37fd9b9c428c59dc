"""The libraries' own bars and notices, which say nothing to who runs a command (L0 at import)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

#: whose notices of what they will deprecate are for their own callers, which are twinkle's
_LIBRARIES = r"(accelerate|datasets|huggingface_hub|peft|torch|transformers)(\.|$)"


@contextmanager
def quiet(bars: bool | None = None) -> Iterator[None]:
    """Without notices of what libraries will deprecate, and without their bars; what was set is put back.

    Args:
        bars: whether the libraries may draw them; None: on a terminal alone, since elsewhere each is a line without end.
    """
    import datasets
    import transformers

    found = transformers.utils.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    if not (sys.stderr.isatty() if bars is None else bars):
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=_LIBRARIES)
            yield
    finally:
        if found[0]:
            transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if not found[1]:
            datasets.enable_progress_bars()
