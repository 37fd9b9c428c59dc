"""The version of what is installed, from its metadata (L0)."""

from __future__ import annotations

from twinkle_core.index import distribution

_installed = distribution("twinkle-core")
__version__ = str(_installed.version) if _installed is not None else "0+unknown"
