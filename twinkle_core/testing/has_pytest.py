"""Importing this says what to install where pytest is missing (L0). The suites' package imports it before all else."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from twinkle_core.errors import NeedsLibrary

if find_spec("pytest") is None:
    raise NeedsLibrary("a compliance suite", "pytest", "twinkle-core[testing]", sys.prefix)
