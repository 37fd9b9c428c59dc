"""The backends whose models are given slots. Each is a distribution of its own, asked for when a model of its kind is."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from twinkle_core.errors import NeedsLibrary


def needed(module: str, extra: str, what: str) -> Any:
    """A module of a backend.

    Args:
        extra: of this distribution, that installs the backend.
        what: needs it, for the error's text.

    Raises:
        NeedsLibrary: the backend is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:  # it is there, and lacks something itself
            raise
        raise NeedsLibrary(what, package, f"twinkle-multilora[{extra}]", sys.prefix) from error
