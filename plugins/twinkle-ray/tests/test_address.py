"""An address at which no cluster answers is told at once, and not by Ray's own patience."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager

import pytest
import ray

from twinkle_core.errors import NoCluster
from twinkle_core.mesh import DeviceGroup
from twinkle_core.runtime import local
from twinkle_ray import address


@contextmanager
def listening(says=None):
    """The address of something that says this to whoever comes; None: nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            line, _ = server.accept()
            with line:
                line.recv(100)
                line.sendall(says)

        if says is not None:
            threading.Thread(target=answer, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nobody():
    with listening() as free:
        pass
    return free


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_nobody_listens(nobody, prefix, monkeypatch):
    """``initialize`` says so within 3 seconds, and has chosen nothing."""
    monkeypatch.setattr(local, "_state", local._State(local.LocalRuntime()))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", prefix + nobody)
    begun = time.monotonic()
    with pytest.raises(NoCluster, match=f"RAY_ADDRESS is '{prefix}{nobody}'.*refused") as caught:
        local.initialize(mode="ray", groups=[DeviceGroup("a", 1, device_type="CPU")])
    assert time.monotonic() - begun < 3
    assert "Without RAY_ADDRESS Ray is started on this machine" in str(caught.value)
    assert isinstance(caught.value, ConnectionError) and local._state.arguments is None


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00\x00"])
def test_what_listens_is_not_ray(said):
    with listening(said) as other, pytest.raises(NoCluster, match=r"not Ray|reset by peer"):
        address.check(other)


def test_what_listens_says_nothing(monkeypatch):
    monkeypatch.setattr(address, "ANSWER", 0.2)
    with listening() as other:
        with pytest.raises(NoCluster, match="timed out"):
            address.check(other)
        address.check(other, encrypted=True)


def test_no_such_host_or_port(nobody):
    with pytest.raises(NoCluster, match=r"Name or service not known|No address|failure in name"):
        address.check("no.such.host.invalid:6379")
    with pytest.raises(NoCluster):
        address.check("127.0.0.1:99999")


def test_who_answers_as_a_server_of_grpc_is_left_to_ray():
    with listening(b"\x00\x00\x18\x04\x00\x00\x00\x00\x00") as other:
        address.check(other)


@pytest.mark.parametrize("given", ["", "auto", "local", "nonsense", "anyscale://x"])
def test_what_is_no_address_is_left_to_ray(given):
    address.check(given)


def test_what_ray_says_of_an_address_names_it(monkeypatch):
    def fail(**options):
        raise ValueError("Invalid address format: nonsense")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(NoCluster, match=r"RAY_ADDRESS is 'nonsense'.*Invalid address format"):
        address.connect("nonsense")
    with pytest.raises(ValueError, match="Invalid"):
        address.connect("")
