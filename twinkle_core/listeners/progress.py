"""A progress bar on the terminal (L0 at import)."""

from __future__ import annotations

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
    step would make an accelerator wait. Drawn on stderr, by rank 0.

    Args:
        total: windows of the whole run; None where that is not known.
        done: how many of them a resumed run has behind it.
        adapter_name: count this adapter's windows alone ('' is the base model); None: of all adapters and models.
        shown: False draws nothing.
    """

    def __init__(self, total: int | None = None, done: int = 0, *, adapter_name: str | None = None, shown: bool = True) -> None:
        from tqdm import tqdm

        hidden = not shown or settings.rank() != 0
        self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, disable=hidden, smoothing=0.1)
        self._adapter = adapter_name
        self._values: dict[str, str] = {}

    @hookimpl
    def twinkle_after_step(self, session: Session, result: StepResult) -> None:
        """Advance by one."""
        if self._adapter in (None, session.name):
            self._show({"lr": f"{result.lr:.1e}"})
            self._bar.update(1)

    @hookimpl
    def twinkle_metrics_logged(self, metrics: Mapping[str, float], session: Session, is_training: bool) -> None:
        """Show the numbers that have a place on the bar."""
        if self._adapter in (None, session.name):
            named = metrics if is_training else {f"eval_{name}": value for name, value in metrics.items()}
            self._show({label: f"{named[name]:{form}}" for name, (label, form) in SHOWN.items() if name in named})
            self._bar.refresh()

    @hookimpl
    def twinkle_shutdown(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()

    def _show(self, values: Mapping[str, str]) -> None:
        self._values |= values
        order = sorted(self._values, key=lambda label: label != "loss")  # what matters most is cut off last
        self._bar.set_postfix({label: self._values[label] for label in order}, refresh=False)


def note(text: str) -> None:
    """Print a line above the bars of this process."""
    from tqdm import tqdm

    tqdm.write(text)
