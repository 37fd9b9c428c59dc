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


class BadMesh(TwinkleError, ValueError):
    """Sizes of a mesh, or of a group, that can't be."""

    @classmethod
    def size(cls, name: str, value: object) -> BadMesh:
        return cls(f"{name}={value!r} is not a size; give a whole number from 1 up, or leave it out.")

    @classmethod
    def product(cls, sizes: dict[str, int], world_size: int) -> BadMesh:
        used = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
        product = 1
        for size in used.values():
            product *= size
        sum_ = " × ".join(f"{name}_size {size}" for name, size in used.items())
        return cls(
            f"{sum_} = {product}, which does not fit a world size of {world_size}.\n"
            f"    Start {product} processes, or give sizes whose product is {world_size}."
        )

    @classmethod
    def divides(cls, name: str, value: int, of: str, total: int) -> BadMesh:
        return cls(f"{name} = {value} must divide {of} = {total}; {total} / {value} = {total / value:.4g}.")

    @classmethod
    def rank(cls, rank: int, world_size: int) -> BadMesh:
        return cls(f"rank {rank} is outside a mesh of {world_size} (0 … {world_size - 1}).")

    @classmethod
    def group(cls, field: str, value: object, way: str) -> BadMesh:
        return cls(f"DeviceGroup({field}={value!r}): {way}.")


class AlreadyInitialized(TwinkleError, RuntimeError):
    """``initialize`` was called twice with different arguments."""

    def __init__(self, first: dict[str, object], second: dict[str, object]) -> None:
        different = [name for name in second if first.get(name) != second[name]]
        lines = "".join(f"\n    {name}: {first.get(name)!r} before, {second[name]!r} now" for name in different)
        super().__init__(f"twinkle.initialize was already called with other arguments:{lines}\n    Call it once, at the start.")


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
