"""Errors of checkpoints (L0)."""

from __future__ import annotations

from twinkle_core.errors.base import TwinkleError


class BadCheckpointName(TwinkleError, ValueError):
    """A name that leaves the output folder."""

    def __init__(self, name: str, output_dir: str) -> None:
        super().__init__(f"name {name!r} is not a folder inside output_dir '{output_dir}'. Give a plain name like 'step-100'.")


class CheckpointInTheWay(TwinkleError, FileExistsError):
    """Something that is no checkpoint, or more than one, stands where one is to be written."""

    def __init__(self, path: str, why: str = "is there and is not a checkpoint, so it is not replaced") -> None:
        super().__init__(f"'{path}' {why}. Choose another name, or move it.")


class CheckpointNotWritten(TwinkleError, OSError):
    """Writing failed. What was there before is whole; nothing half-written is left."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"checkpoint '{path}' could not be written: {why}\n"
            f"    an older checkpoint of that name is whole; nothing half-written is left"
        )


class CheckpointNotFound(TwinkleError, FileNotFoundError):
    """No checkpoint there."""

    def __init__(self, path: str, why: str = "there is no such folder") -> None:
        super().__init__(f"no checkpoint at '{path}': {why}.")


class CheckpointNotRead(TwinkleError, OSError):
    """Another rank could not read its part, so this one did not load either."""

    def __init__(self, path: str, rank: int, why: str) -> None:
        super().__init__(f"checkpoint '{path}' could not be read by rank {rank}, so no rank loaded anything: {why}")


class CheckpointDamaged(TwinkleError, ValueError):
    """A file that is missing, cut short or changed. Nothing was loaded."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"checkpoint file '{path}' is damaged: {why}. Nothing was loaded; take an older checkpoint.")


class CheckpointMismatch(TwinkleError, ValueError):
    """A checkpoint that belongs to something else. Nothing was loaded."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"checkpoint '{path}' does not fit: {why}. Nothing was loaded.")


class CheckpointUnfit(TwinkleError, ValueError):
    """A state that can't be written so that it could be resumed."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} can't be saved so that it could be resumed: {why}")
