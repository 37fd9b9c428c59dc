"""Ids to paths: with a hub's client replaced by a fake, and with the real ones offline."""

from __future__ import annotations

import socket
import sys

import pytest

from twinkle_core import hub
from twinkle_core.errors import BadHubId, BareId, HubError, NeedsLibrary, NoSuchPath, NotOnHub, Unreachable


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to connect fails the test."""

    def refuse(*_, **__):
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_a_local_path_is_taken(tmp_path):
    assert hub.resolve(tmp_path) == tmp_path
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_a_path_that_is_not_there_is_told_at_once(tmp_path, no_network):
    (tmp_path / "qwen").mkdir()
    with pytest.raises(NoSuchPath, match=r"does not exist.*Did you mean '.*/qwen'") as caught:
        hub.resolve(tmp_path / "qwem")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(NoSuchPath, match=r"the dataset path './nowhere/rows.jsonl'"):
        hub.resolve("./nowhere/rows.jsonl", kind="dataset")


def test_an_id_without_its_hub_names_both_forms(tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BareId, match=r"'hf://org/name'.*'ms://org/name'"):
        hub.resolve("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub.resolve("org/name") == tmp_path / "org" / "name"


@pytest.mark.parametrize(
    "given",
    ["s3://bucket/x", "hf://a/b/c", "ms://name", "hf://", "", "hf://../x", "hf://a--b/c..d", "hf://a/b\n", "ms://a/b\n"],
)
def test_an_id_that_no_hub_has_is_told_at_once(given, no_network):
    with pytest.raises(BadHubId):
        hub.resolve(given)


@pytest.mark.parametrize("given", ["~nouser-of-this-name/x", "x" * 5000, "a\0b"])
def test_a_path_that_no_machine_has_is_told(given, no_network):
    with pytest.raises(NoSuchPath) as caught:
        hub.resolve(given)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("given", ["hf://twinkle-tests/none-such", "ms://twinkle-tests/none-such"])
def test_the_real_clients_offline_say_so_and_how_to_go_on(given, monkeypatch, no_network):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Unreachable, match=r"HF_HUB_OFFLINE forbids[\s\S]*give the path of a folder") as caught:
        hub.resolve(given)
    assert isinstance(caught.value, ConnectionError)


def test_the_real_client_takes_what_is_in_its_cache(tmp_path, monkeypatch, no_network):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cached = tmp_path / "models--org--name"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    import huggingface_hub

    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kw: real(name, cache_dir=tmp_path, **kw))
    assert hub.resolve("hf://org/name") == cached / "snapshots" / "abc"


class _Response:
    def __init__(self, status):
        self.status_code = status
        self.headers = {}
        self.request = None


@pytest.mark.parametrize(("prefix", "module"), [("hf://", "huggingface_hub"), ("ms://", "modelscope")])
def test_a_download_passes_the_id_kind_and_revision(prefix, module, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    asked = {}

    def fake(name, **kwargs):
        asked.update(kwargs, name=name)
        return str(tmp_path)

    monkeypatch.setattr(__import__(module), "snapshot_download", fake)
    assert hub.resolve(prefix + "org/name", kind="dataset", revision="v2", allow_patterns=["*.json"]) == tmp_path
    assert (asked["name"], asked["repo_type"], asked["revision"], asked["allow_patterns"]) == (
        "org/name",
        "dataset",
        "v2",
        ["*.json"],
    )


def _errors():
    from huggingface_hub import errors
    from modelscope_hub import errors as ms

    return [
        ("hf://", "huggingface_hub", errors.RepositoryNotFoundError("404 Client Error", response=_Response(404)), NotOnHub),
        ("hf://", "huggingface_hub", errors.LocalEntryNotFoundError("no connection"), Unreachable),
        ("hf://", "huggingface_hub", errors.HfHubHTTPError("503 Server Error", response=_Response(503)), Unreachable),
        ("ms://", "modelscope", ms.NetworkError("Connection failed"), Unreachable),
        ("ms://", "modelscope", ValueError("no such repo"), NotOnHub),
    ]


@pytest.mark.parametrize(("prefix", "module", "cause", "expected"), _errors())
def test_what_a_hub_answers_becomes_one_of_ours(prefix, module, cause, expected, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    def fake(name, local_files_only=False, **_):
        raise cause if not local_files_only else ValueError("not cached")

    monkeypatch.setattr(__import__(module), "snapshot_download", fake)
    with pytest.raises(expected, match="org/name") as caught:
        hub.resolve(prefix + "org/name")
    assert isinstance(caught.value, HubError)
    assert caught.value.__cause__ is cause


def test_modelscope_without_a_network_takes_its_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    import modelscope

    def fake(name, local_files_only=False, **_):
        if not local_files_only:
            raise ConnectionError("no route")
        return str(tmp_path)

    monkeypatch.setattr(modelscope, "snapshot_download", fake)
    assert hub.resolve("ms://org/name") == tmp_path


@pytest.mark.parametrize(
    ("given", "module", "pip"), [("hf://a/b", "huggingface_hub", "huggingface-hub"), ("ms://a/b", "modelscope", "modelscope")]
)
def test_a_missing_client_is_named_with_the_command(given, module, pip, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NeedsLibrary, match=rf"the model '{given}' needs '{module}'[\s\S]*pip install {pip}"):
        hub.resolve(given)
