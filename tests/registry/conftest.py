"""Fake distributions on sys.path, and nothing of them left behind."""

from __future__ import annotations

import importlib
import sys

import pytest

from twinkle_core.registry import Registry
from twinkle_core.testing.distributions import write_distribution


class Site:
    """A folder that stands in for site-packages."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        monkeypatch.syspath_prepend(str(folder))

    def add(self, name, version="1.0", **kwargs):
        home = write_distribution(self.folder, name, version, **kwargs)
        importlib.invalidate_caches()
        return home

    def write(self, path, source):
        (self.folder / path).write_text(source)
        importlib.invalidate_caches()

    def registry(self):
        """Over this folder alone."""
        return Registry(path=[str(self.folder)])


@pytest.fixture
def clean_modules(tmp_path):
    """Modules of this test's folders are gone afterwards."""
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def site(tmp_path, monkeypatch, clean_modules):
    """An empty site; TWINKLE_* switches are as by default."""
    for variable in ("TWINKLE_DISABLE_PLUGINS", "TWINKLE_PLUGINS", "TWINKLE_STRICT_PLUGINS", "TWINKLE_TRUST_REMOTE_CODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a repaired module within one second has the same time stamp
    return Site(tmp_path / "site", monkeypatch)


@pytest.fixture
def another_site(tmp_path, monkeypatch, site):
    """A second folder, before the first one on sys.path."""
    return Site(tmp_path / "another", monkeypatch)
