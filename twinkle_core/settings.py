"""Every TWINKLE_* environment variable: typed, documented, read here and nowhere else (L0).

Each is read at the moment it is asked for, so a test or a notebook may change the environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from twinkle_core.errors import BadLaunch


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable, for ``twinkle doctor`` and the docs."""

    variable: str
    default: str
    meaning: str


ALL = (
    Setting("TWINKLE_DISABLE_PLUGINS", "", "distributions whose components and hooks are switched off, by comma or space"),
    Setting("TWINKLE_PLUGINS", "", "if set: the only third-party distributions that are used"),
    Setting("TWINKLE_STRICT_PLUGINS", "0", "1: a hook module that fails to load raises instead of a warning"),
    Setting("TWINKLE_TRUST_REMOTE_CODE", "0", "1: components may be loaded from ms:// and hf:// repositories"),
    Setting("TWINKLE_CACHE", "~/.cache/twinkle", "where downloads and converted models are kept"),
    Setting("TWINKLE_LOG_LEVEL", "INFO", "level of twinkle's logger"),
    Setting("TWINKLE_MEGATRON_CPU", "0", "1: Megatron models compute on the CPU, also where CUDA is there"),
)


def shown() -> list[tuple[Setting, str]]:
    """Each setting with its value of now."""
    return [(setting, _value(setting.variable)) for setting in ALL]


def _value(variable: str) -> str:
    default = next(s.default for s in ALL if s.variable == variable)
    return os.environ.get(variable, default)


_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_SWITCHES = ("TWINKLE_STRICT_PLUGINS", "TWINKLE_TRUST_REMOTE_CODE", "TWINKLE_MEGATRON_CPU")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def fault(variable: str) -> str:
    """What is wrong with the value of a switch or of the log level, and what is used in its place; empty: nothing is."""
    value = _value(variable)
    if variable in _SWITCHES and value.strip().lower() not in _YES + _NO:
        return f"{variable}={value!r} is neither yes (1, true, yes, on) nor no (0, false, no, off): it is off"
    if variable == "TWINKLE_LOG_LEVEL" and value.strip().upper() not in _LEVELS:
        return f"{variable}={value!r} is none of {', '.join(_LEVELS)}: INFO is used"
    return ""


def faults() -> list[str]:
    """All of them."""
    return [text for setting in ALL if (text := fault(setting.variable))]


def _names(variable: str) -> frozenset[str]:
    return frozenset(_value(variable).replace(",", " ").split())


def _switch(variable: str) -> bool:
    return _value(variable).strip().lower() in _YES


def disabled_plugins() -> frozenset[str]:
    """Names in TWINKLE_DISABLE_PLUGINS, as written."""
    return _names("TWINKLE_DISABLE_PLUGINS")


def allowed_plugins() -> frozenset[str]:
    """Names in TWINKLE_PLUGINS, as written; empty: all are allowed."""
    return _names("TWINKLE_PLUGINS")


def strict_plugins() -> bool:
    """TWINKLE_STRICT_PLUGINS."""
    return _switch("TWINKLE_STRICT_PLUGINS")


@contextlib.contextmanager
def without(variable: str) -> Iterator[None]:
    """Inside, an environment variable of somebody else's is not set; afterwards it is as it was."""
    found = os.environ.pop(variable, None)
    try:
        yield
    finally:
        os.environ.pop(variable, None)  # libraries set them too
        if found is not None:
            os.environ[variable] = found


def environment() -> dict[str, str]:
    """A copy of all variables, to compare with later."""
    return dict(os.environ)


def trust_remote_code() -> bool:
    """TWINKLE_TRUST_REMOTE_CODE."""
    return _switch("TWINKLE_TRUST_REMOTE_CODE")


def megatron_cpu() -> bool:
    """TWINKLE_MEGATRON_CPU."""
    return _switch("TWINKLE_MEGATRON_CPU")


def one_device_connection() -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1, unless the user chose otherwise: Megatron's tensor parallelism insists on it."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def cache_dir() -> Path:
    """TWINKLE_CACHE, with ~ expanded."""
    return Path(_value("TWINKLE_CACHE")).expanduser()


def log_level() -> str:
    """TWINKLE_LOG_LEVEL, upper case; INFO where there is no such level."""
    return "INFO" if fault("TWINKLE_LOG_LEVEL") else _value("TWINKLE_LOG_LEVEL").strip().upper()


def local_rank() -> int | None:
    """LOCAL_RANK, which torchrun sets."""
    value = os.environ.get("LOCAL_RANK")
    return _launched("LOCAL_RANK", value, 0) if value is not None else None


def world_size() -> int:
    """WORLD_SIZE, which torchrun sets; 1 without it."""
    return _launched("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"), 1)


def rank() -> int:
    """RANK, which torchrun sets; 0 without it.

    Raises:
        BadLaunch: it is none of the ranks of several processes, or is missing there.
    """
    size = world_size()
    value = os.environ.get("RANK") if size > 1 else os.environ.get("RANK", "0")
    if value is None:
        raise BadLaunch.without("RANK", size)
    if (found := _launched("RANK", value, 0)) >= size > 1:
        raise BadLaunch.outside(found, size)
    return found


def speaks() -> bool:
    """Whether this process writes logs for all: no other rank's number is set, whatever else is."""
    return os.environ.get("RANK", "0").strip() in ("", "0")


def _launched(variable: str, value: str, least: int) -> int:
    try:
        number = int(value)
    except ValueError:
        number = least - 1
    if number < least:
        raise BadLaunch.number(variable, value, least)
    return number


def become_rank(rank: int, world_size: int, *, local_rank: int | None = None, master: tuple[str, int] | None = None) -> None:
    """Set RANK, LOCAL_RANK and WORLD_SIZE as torchrun would, for a process that was started to be one of several.

    Args:
        local_rank: which of the devices it sees is its own; default as ``rank``.
        master: address and port where the ranks meet (MASTER_ADDR, MASTER_PORT).
    """
    own = rank if local_rank is None else local_rank
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(own), "WORLD_SIZE": str(world_size)}
    if master is not None:
        os.environ |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}


def travelling() -> dict[str, str]:
    """The variables that a process elsewhere needs to decide as this one does: twinkle's, and whether hubs are asked."""
    return {name: value for name, value in os.environ.items() if name.startswith(("TWINKLE_", "HF_", "MODELSCOPE_"))}


def adopt(variables: Mapping[str, str]) -> None:
    """Take over what ``travelling`` gave elsewhere."""
    os.environ |= variables


def wait_passively() -> None:
    """Let CPU threads sleep while they wait for one another (OMP_WAIT_POLICY=PASSIVE), unless the user chose otherwise.

    Call it before torch is imported. Threads that spin instead cost nothing on an idle machine, but where another program wants
    the cores too they take its time slices and wait for their own: a step of 2 s was seen to take 25 s.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def offline() -> bool:
    """HF_HUB_OFFLINE, which Hugging Face's own libraries obey; ms:// obeys it here too."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in _YES


def ray_address() -> str:
    """RAY_ADDRESS, which Ray connects to; '' without it."""
    return os.environ.get("RAY_ADDRESS", "")


def ray_encrypts() -> bool:
    """RAY_USE_TLS: whether Ray's processes speak TLS to one another."""
    return os.environ.get("RAY_USE_TLS", "").strip().lower() in _YES
