"""A progress bar on the terminal, or lines where there is none (L0 at import)."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from twinkle_core import settings
from twinkle_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from twinkle_core.contracts.metric import StepResult
    from twinkle_core.train.session import Session

#: metric -> how it is called on the bar, and its format
SHOWN = {"loss": ("loss", ".3f"), "eval_loss": ("eval_loss", ".3f"), "tokens_per_second": ("tok/s", ".0f")}


class ProgressBar:
    """Closed windows out of ``total``, the time left, the learning rate, and what was last read of the metrics.

    ``loss`` and ``tok/s`` appear when ``calculate_metric`` reads them (metrics ``loss`` and ``train``): to read a loss at each
    step would make an accelerator wait. Drawn on stderr, by rank 0; where that is no terminal, a line now and then, and at the
    end.

    Args:
        total: windows of the whole run; None where that is not known.
        done: how many of them a resumed run has behind it.
        adapter_name: count this adapter's windows alone ('' is the base model); None: of all adapters and models.
        shown: False draws and writes nothing.
    """

    #: seconds between two lines
    every = 10.0

    def __init__(self, total: int | None = None, done: int = 0, *, adapter_name: str | None = None, shown: bool = True) -> None:
        from tqdm import tqdm

        seen, terminal = shown and settings.rank() == 0, sys.stderr.isatty()
        hidden = not (seen and terminal)
        self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, disable=hidden, smoothing=0.1)
        self._total, self._count, self._adapter = total, done, adapter_name
        self._values: dict[str, str] = {}
        self._lines, self._told_at, self._told = seen and not terminal, -math.inf, ""

    @hookimpl
    def twinkle_after_step(self, session: Session, result: StepResult) -> None:
        """Advance by one."""
        if self._adapter in (None, session.name):
            self._count += 1
            self._values["lr"] = f"{result.lr:.1e}"
            self._bar.set_postfix(self._shown(), refresh=False)
            self._bar.update(1)

    @hookimpl
    def twinkle_metrics_logged(self, metrics: Mapping[str, float], session: Session, is_training: bool) -> None:
        """Show the numbers that have a place on the bar."""
        if self._adapter in (None, session.name):
            named = metrics if is_training else {f"eval_{name}": value for name, value in metrics.items()}
            self._values |= {label: f"{named[name]:{form}}" for name, (label, form) in SHOWN.items() if name in named}
            self._bar.set_postfix(self._shown())
            if time.monotonic() - self._told_at >= self.every:
                self._tell()

    @hookimpl
    def twinkle_shutdown(self) -> None:
        """Leave the bar as it stands, or write the last line."""
        self._bar.close()
        if self._count:
            self._tell()

    def _shown(self) -> dict[str, str]:
        order = sorted(self._values, key=lambda label: label != "loss")  # what matters most is cut off last
        return {label: self._values[label] for label in order}

    def _tell(self) -> None:
        of = f" of {self._total}" if self._total is not None else ""
        text = f"step {self._count}{of}: " + ", ".join(f"{label}={value}" for label, value in self._shown().items())
        if self._lines and text != self._told:
            self._told_at, self._told = time.monotonic(), text
            print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print a line above the bars of this process."""
    from tqdm import tqdm

    tqdm.write(text)
