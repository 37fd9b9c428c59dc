"""Whether a cluster answers at an address: Ray itself says so after 20 seconds, or never, where something else listens."""

from __future__ import annotations

import importlib
import logging
import re
import socket

import ray

from twinkle_core.errors import NoCluster
from twinkle_core.isolation import attempt, describe

#: seconds until a host that does not answer counts as gone
CONNECT = 2.0
#: and a process that has taken the connection: one that is busy may be slow
ANSWER = 10.0
_ADDRESS = re.compile(r"(?:ray://)?(?P<host>\[[^\]]+\]|[^\[\]:/]+):(?P<port>\d{1,5})/?")
#: how a client of HTTP/2 (RFC 9113, 3.4), which gRPC is, says hello, with empty SETTINGS; a server answers with its own
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_HEAD, _KIND, _SETTINGS = 9, 3, 4


def connect(address: str, *, encrypted: bool = False) -> None:
    """Connect to a cluster, or start one on this machine where ``address`` is empty.

    Raises:
        NoCluster
    """
    check(address, encrypted=encrypted)
    # Ray imports this when the process ends. Where Ctrl-C ended it, Python forgets that meanwhile, and the status is 1 in place
    # of a signal's (130 to a shell)
    attempt(lambda: importlib.import_module("ray.dag.compiled_dag_node"))
    try:
        ray.init(logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        if not address:
            raise
        raise NoCluster(address, describe(error)) from error


def check(address: str, *, encrypted: bool = False) -> None:
    """Raise unless a server that may be Ray's answers.

    Args:
        address: as RAY_ADDRESS has it; what is no ``host:port`` (``auto``, ``local``) is Ray's own to judge.
        encrypted: it speaks TLS, so that a plain hello says nothing: it is enough that something listens.

    Raises:
        NoCluster
    """
    found = _ADDRESS.fullmatch(address.strip())
    if found is None:
        return
    host, port = found["host"].strip("[]"), int(found["port"])
    hosts = [host]
    if host == "localhost" or host.startswith("127."):  # by which Ray means this machine's address
        hosts.append(ray.util.get_node_ip_address())
    why = [_why_not(each, port, encrypted) for each in hosts]
    if all(why):
        raise NoCluster(address, why[0])


def _why_not(host: str, port: int, encrypted: bool) -> str:
    """What is wrong; '' if nothing is."""
    try:
        with socket.create_connection((host, port), CONNECT) as line:
            if encrypted:
                return ""
            line.settimeout(ANSWER)
            line.sendall(_HELLO)
            said = line.recv(_HEAD)
    except (OSError, OverflowError) as error:  # no such host or port, nobody who listens, nobody who answers
        return describe(error)
    return "" if said[_KIND : _KIND + 1] == bytes([_SETTINGS]) else f"what listens there is not Ray: it said {said!r}"
