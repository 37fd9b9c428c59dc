"""A frozen registry, and the record of what was resolved."""

from __future__ import annotations

import json

import pytest

from twinkle_core import registry
from twinkle_core.errors import BadName, Disabled, FrozenRegistry, UnknownName, WorkerMismatch, WrongType
from twinkle_core.registry import Registry

SOURCE = "class A: pass\nclass B: pass\n"


@pytest.fixture
def acme(site):
    site.add("acme", "1.2", entry_points={"losses": {"a": "acme_ab:A", "b": "acme_ab:B"}, "metrics": {"a": "acme_ab:A"}},
             modules={"acme_ab.py": SOURCE})  # fmt: skip
    return site


def test_only_what_was_allowed_answers(acme, monkeypatch):
    names = acme.registry()
    names.freeze({"loss": ["a"]})
    assert names.frozen
    assert names.resolve("loss", "a").__name__ == names.resolve("loss", "acme/a").__name__ == "A"
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    refused = [
        ("loss", "b"),
        ("metric", "a"),
        ("loss", "acme_ab:B"),
        ("loss", "os:system"),
        ("loss", "hf://x/y"),
        ("loss", "ms://x/y#A"),
    ]
    for kind, spec in refused:
        with pytest.raises(FrozenRegistry):
            names.resolve(kind, spec)
    with pytest.raises(FrozenRegistry):
        names.register("loss", "c", int, override=True)
    assert names.resolve("loss", int) is int  # not a name, so not from outside


def test_what_comes_later_does_not_get_in(acme):
    names = acme.registry()
    names.register("loss", "own", int)
    names.freeze()
    assert sorted(e.name for e in names.entries("loss")) == ["a", "b", "own"]
    acme.add("more", entry_points={"losses": {"late": "acme_ab:A"}})
    names.refresh()
    with pytest.raises(FrozenRegistry):
        names.resolve("loss", "late")
    assert names.resolve("loss", "own") is int


def test_hooks_are_not_asked(acme):
    names = acme.registry()

    class Hooks:
        from twinkle_core import hookimpl

        @hookimpl
        def twinkle_resolve(self, kind, name):
            return int

    names.plugins().register(Hooks(), "test")
    assert names.resolve("loss", "whatever") is int
    names.freeze()
    with pytest.raises(FrozenRegistry):
        names.resolve("loss", "whatever")


def test_a_wrong_allow_list_freezes_nothing(acme, monkeypatch):
    names = acme.registry()
    with pytest.raises(UnknownName):
        names.freeze({"loss": ["a", "zzz"]})
    monkeypatch.setenv("TWINKLE_DISABLE_PLUGINS", "acme")
    with pytest.raises(Disabled):
        names.freeze({"loss": ["a"]})
    assert not names.frozen


def test_a_denied_distribution_is_not_in_the_frozen_table(acme, another_site, monkeypatch):
    """Frozen as a whole under a deny list: what it holds does not come back when the list is lifted."""
    another_site.add("beta", entry_points={"losses": {"c": "builtins:int"}})
    names = Registry(path=[str(acme.folder), str(another_site.folder)])
    monkeypatch.setenv("TWINKLE_DISABLE_PLUGINS", "acme")
    names.freeze()
    monkeypatch.delenv("TWINKLE_DISABLE_PLUGINS")
    assert names.resolve("loss", "c") is int
    for name in ("a", "acme/a"):
        with pytest.raises(FrozenRegistry):
            names.resolve("loss", name)


def test_snapshot_holds_what_was_resolved(acme):
    names = acme.registry()
    assert names.snapshot() == []
    names.find("loss", "a")  # looked up, not resolved
    names.resolve("metric", "A")
    names.resolve("loss", "b")
    names.resolve("loss", "b")
    names.register("loss", "own", int)
    names.resolve("loss", "own")
    got = names.snapshot()
    assert got == json.loads(json.dumps(got)) == [
        {"kind": "loss", "name": "b", "distribution": "acme", "version": "1.2", "value": "acme_ab:B"},
        {"kind": "loss", "name": "own", "distribution": "", "version": "", "value": "builtins:int"},
        {"kind": "metric", "name": "a", "distribution": "acme", "version": "1.2", "value": "acme_ab:A"},
    ]  # fmt: skip


def test_a_worker_answers_without_importing(acme, another_site):
    driver = acme.registry()
    driver.resolve("loss", "a")
    assert acme.registry().snapshot(of=driver.snapshot()) == driver.snapshot()
    registry.compare_snapshots(driver.snapshot(), acme.registry().snapshot(of=driver.snapshot()))

    another_site.add("acme", "1.1", entry_points={"losses": {"a": "acme_ab:A"}})
    with pytest.raises(WorkerMismatch, match=r"worker 2 \(h\) has acme 1.1; the driver has 1.2"):
        registry.compare_snapshots(driver.snapshot(), another_site.registry().snapshot(of=driver.snapshot()), rank=2, host="h")

    another_site.add("acme", "1.2", entry_points={"losses": {"a": "acme_ab:Other"}})
    (another_site.folder / "acme-1.1.dist-info" / "entry_points.txt").unlink()
    with pytest.raises(WorkerMismatch, match="acme_ab:Other"):
        registry.compare_snapshots(driver.snapshot(), another_site.registry().snapshot(of=driver.snapshot()))


def test_one_name_need_not_be_a_list():
    names = Registry(path=())
    names.register("loss", "focal", int)
    names.freeze({"loss": "focal"})
    assert names.resolve("loss", "focal") is int


@pytest.mark.parametrize("allow", ["mse", ["loss"], {"loss": 3}, {"loss": ["mse", None]}, 7])
def test_what_allows_nothing_that_has_a_name_is_refused_and_nothing_is_frozen(allow):
    names = Registry(path=())
    names.register("loss", "soft", int)
    with pytest.raises(WrongType, match=r"registry\.freeze: allow"):
        names.freeze(allow)
    assert not names.frozen


@pytest.mark.parametrize("value", [None, 3, 1.5, True, [], {}, (), b"mse"])
def test_a_plain_value_is_no_component(value):
    names = Registry(path=())
    with pytest.raises(WrongType, match="it must be a name, a class"):
        names.resolve("loss", value)
    with pytest.raises(BadName, match="is no component"):
        names.register("loss", "q", value)
