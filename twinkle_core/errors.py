"""Every exception of twinkle with its text (L0). Other rooms raise these; none builds a text of its own.

An exception takes values and writes the sentence: what was given, why it can't be, and the way out. It is raised before any
state changes, unless its text says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence


class TwinkleError(Exception):
    """Base of all errors raised on purpose by twinkle."""


# ---------------------------------------------------------------------------------------------------- names and plugins


# ---------------------------------------------------------------------------------------------------- meshes and runtimes


# ---------------------------------------------------------------------------------------------------- hubs and data


# ---------------------------------------------------------------------------------------------------- templates and processors


# ---------------------------------------------------------------------------------------------------- training


# ---------------------------------------------------------------------------------------------------- adapters


class UnknownAdapter(TwinkleError, LookupError):
    def __init__(self, name, known):
        super().__init__(f"unknown adapter {name!r}; known {known}")


class DuplicateAdapter(TwinkleError, ValueError):
    def __init__(self, name):
        super().__init__(f"adapter {name!r} exists already")


class BadAdapter(TwinkleError, ValueError):
    def __init__(self, name, reason):
        super().__init__(f"adapter {name!r}: {reason}")


# ---------------------------------------------------------------------------------------------------- checkpoints


class CheckpointMismatch(TwinkleError, ValueError):
    def __init__(self, what, *, missing=(), unknown=(), misshapen=(), tied=None):
        super().__init__(f"{what}: missing {missing} unknown {unknown} misshapen {misshapen} tied {tied}")


# ---------------------------------------------------------------------------------------------------- backends


class UnknownPrecision(TwinkleError, ValueError):
    """A value of ``mixed_precision`` that doesn't exist."""

    def __init__(self, value: object, known: Sequence[str]) -> None:
        super().__init__(f"mixed_precision={value!r} is not one of {', '.join(repr(k) for k in known)}")


class Fp8Unavailable(TwinkleError, RuntimeError):
    """fp8 asked for where it can't run."""

    def __init__(self) -> None:
        super().__init__(
            "mixed_precision='fp8' needs a GPU with fp8 units (H100 class or newer) and the library transformer-engine, and this "
            "version of twinkle-transformers can't drive them yet. Use mixed_precision='bf16'."
        )


class DamagedWeights(TwinkleError, OSError):
    """A weight file that can't be read whole."""

    def __init__(self, file: object, reason: str) -> None:
        super().__init__(f"{file} can't be read: {reason}")


class NotAnAdapter(TwinkleError, FileNotFoundError):
    """A folder that doesn't hold a saved adapter."""

    def __init__(self, folder: object, file: str) -> None:
        super().__init__(f"{folder} holds no saved adapter: there is no {file} in it")


# ---------------------------------------------------------------------------------------------------- configuration files and the command line
