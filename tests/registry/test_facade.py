"""``from twinkle.loss import X`` finds what is installed."""

from __future__ import annotations

import importlib
import sys

import pytest

import twinkle
from twinkle_core import errors, registry
from twinkle_core.known import KNOWN
from twinkle_core.lazy import attach
from twinkle_core.names import PLURAL

FACADES = sorted(set(PLURAL) - {"runtime"})


@pytest.fixture
def installed(site):
    """The registry of this process sees what is added to the site, and forgets it afterwards."""
    yield site
    registry.refresh()


@pytest.mark.parametrize("kind", FACADES)
def test_each_kind_has_a_module(kind):
    module = importlib.import_module(f"twinkle.{kind}")
    assert getattr(twinkle, kind) is module
    first_party = {e.cls for e in registry.entries(kind) if e.dist == "twinkle-core"}
    assert first_party <= set(dir(module))


def test_third_party_classes_appear(installed):
    installed.add(
        "acme", entry_points={"losses": {"shiny": "acme_shiny:ShinyLoss"}}, modules={"acme_shiny.py": "class ShinyLoss: pass"}
    )
    registry.refresh()
    import twinkle.loss

    assert "ShinyLoss" in dir(twinkle.loss)
    assert "acme_shiny" not in sys.modules
    from twinkle.loss import ShinyLoss

    assert ShinyLoss is sys.modules["acme_shiny"].ShinyLoss


def test_an_import_that_fails_shows_the_whole_text(installed, monkeypatch):
    monkeypatch.setitem(KNOWN, ("model", "later"), ("LaterModel", "twinkle-multilora", "99.0"))
    installed.add(
        "bad", "0.3", entry_points={"losses": {"bad": "bad_one:BadLoss"}}, modules={"bad_one.py": "import does_not_exist"}
    )
    registry.refresh()
    with pytest.raises(ImportError, match="The fault is in bad or what it needs"):
        from twinkle.loss import BadLoss  # noqa: F401
    with pytest.raises(ImportError, match="pip install -U twinkle-multilora"):
        from twinkle.model import LaterModel  # noqa: F401
    with pytest.raises(ImportError, match=r"unknown loss 'CrosEntropyLoss'. Did you mean 'CrossEntropyLoss'\?") as caught:
        from twinkle.loss import CrosEntropyLoss  # noqa: F401
    assert type(caught.value) is errors.UnknownClass


def test_what_is_no_class_name_is_a_plain_attribute_error():
    import twinkle.loss

    for name in ("cross_entropy", "__wrapped__", "_private"):
        assert not hasattr(twinkle.loss, name)
    assert not hasattr(twinkle, "nothing")


def test_contracts_are_importable():
    import twinkle_core
    from twinkle.loss import Loss
    from twinkle.metric import Metric
    from twinkle.model import TwinkleModel
    from twinkle.patch import Patch
    from twinkle.processor import Processor

    for cls in (Loss, Metric, TwinkleModel, Patch, Processor):
        assert getattr(twinkle_core, cls.__name__) is cls


def test_attach():
    get, names, public = attach("somewhere", {"join": "os.path:join", "path": "os.path:"})
    import os.path

    assert (get("join"), get("path")) == (os.path.join, os.path)
    assert names() == public == ["join", "path"]
    with pytest.raises(AttributeError, match="module 'somewhere' has no attribute 'split'"):
        get("split")
