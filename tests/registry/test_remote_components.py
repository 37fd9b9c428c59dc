"""Components in a repository of a hub: only on explicit trust."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import twinkle_core
from twinkle_core import errors


@pytest.fixture
def hub(site, monkeypatch, tmp_path):
    """A hub whose repositories are folders: name -> files."""
    fetched = []

    def add(repository, **files):
        folder = tmp_path / "hub" / repository
        folder.mkdir(parents=True)
        for name, source in files.items():
            (folder / f"{name}.py").write_text(source)

    def resolve(reference):
        fetched.append(reference)
        return tmp_path / "hub" / reference.partition("://")[2]

    fake = ModuleType("twinkle_core.hub")
    fake.resolve, fake.add, fake.fetched = resolve, add, fetched
    monkeypatch.setitem(sys.modules, "twinkle_core.hub", fake)
    monkeypatch.setattr(twinkle_core, "hub", fake, raising=False)
    return fake


def test_nothing_is_fetched_without_trust(site, hub):
    with pytest.raises(errors.RemoteCodeRefused):
        site.registry().resolve("loss", "hf://acme/losses")
    assert hub.fetched == []


def test_two_repositories_do_not_shadow_each_other(site, hub, monkeypatch):
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    hub.add("acme/losses", __init__="from .parts import MineLoss", parts="class MineLoss:\n    who = 'acme'")
    hub.add("beta/losses", __init__="from .parts import MineLoss\nclass Other: pass", parts="class MineLoss:\n    who = 'beta'")
    names = site.registry()
    assert names.resolve("loss", "hf://acme/losses").who == "acme"
    assert names.resolve("loss", "ms://beta/losses#mine").who == "beta"
    assert names.resolve("loss", "hf://acme/losses#MineLoss") is names.resolve("loss", "hf://acme/losses")
    assert [row["name"] for row in names.snapshot()][:2] == ["hf://acme/losses", "hf://acme/losses#MineLoss"]
    with pytest.raises(errors.BadRemoteComponent, match=r"defines MineLoss, Other\n.*hf://beta/losses#Class"):
        names.resolve("loss", "hf://beta/losses")


def test_names_that_read_alike_are_still_two(site, hub, monkeypatch):
    """Repositories whose module names differ in nothing but signs that a module's name can't hold, and one on two hubs."""
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    names = site.registry()
    for repository in ("acme/my-losses", "acme/my_losses", "acme_my/losses"):
        hub.add(repository, __init__=f"class MineLoss:\n    who = {repository!r}")
    for repository in ("acme/my-losses", "acme/my_losses", "acme_my/losses", "acme/my-losses"):
        assert names.resolve("loss", f"hf://{repository}").who == repository
    one, two = (names.resolve("loss", f"{scheme}://acme/my-losses") for scheme in ("hf", "ms"))
    assert one.__module__ != two.__module__ and all(cls.__module__ in sys.modules for cls in (one, two))


def test_trust_that_is_unclear_is_none_and_said_to_be_unclear(site, hub, monkeypatch):
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "maybe")
    with pytest.raises(errors.RemoteCodeRefused, match=r"TWINKLE_TRUST_REMOTE_CODE='maybe' is neither yes .*: it is off"):
        site.registry().resolve("loss", "ms://acme/losses#Mine")
    assert hub.fetched == []


@pytest.mark.parametrize("value", ["0", "", "no", "false", "off", " No "])
def test_what_does_not_say_yes_is_no_trust(site, hub, monkeypatch, value):
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", value)
    with pytest.raises(errors.RemoteCodeRefused) as caught:
        site.registry().resolve("loss", "ms://acme/losses#Mine")
    assert hub.fetched == [] and "neither" not in str(caught.value)


def test_a_repository_that_fails_leaves_no_module_behind(site, hub, monkeypatch):
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    hub.add("acme/bad", __init__="from . import fine\nraise RuntimeError('no')", fine="")
    hub.add("acme/empty")
    with pytest.raises(errors.BadRemoteComponent, match="RuntimeError: no"):
        site.registry().resolve("loss", "hf://acme/bad")
    assert not [m for m in sys.modules if m.startswith("twinkle_remote_hf_acme_bad")]
    with pytest.raises(errors.BadRemoteComponent, match=r"has no __init__\.py"):
        site.registry().resolve("loss", "hf://acme/empty")
    with pytest.raises(errors.BadRemoteComponent, match="'ftp://' is no hub"):
        site.registry().resolve("loss", "ftp://acme/bad")
