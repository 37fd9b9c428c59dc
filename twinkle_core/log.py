"""twinkle's logger (L0)."""

from __future__ import annotations

import logging
import sys

from twinkle_core import settings


class _ToStderr(logging.Handler):
    """Writes to the stderr of the moment, so that capturing and redirecting work after import."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def get_logger(name: str = "twinkle") -> logging.Logger:
    """The logger ``twinkle``, or one below it; level from TWINKLE_LOG_LEVEL; ranks above 0 log warnings only. The
    first call warns of settings whose values can't be.

    A program that has configured logging itself keeps its own handlers and format.
    """
    root = logging.getLogger("twinkle")
    if not root.handlers and not logging.getLogger().handlers:
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter("[%(levelname)s %(name)s] %(message)s"))
        root.addHandler(handler)
    if root.level == logging.NOTSET:
        root.setLevel(settings.log_level() if settings.speaks() else "WARNING")
        if settings.speaks():
            for fault in settings.faults():  # once: the level is set now
                root.warning("%s", fault)
    return root if name == "twinkle" else root.getChild(name.removeprefix("twinkle."))
