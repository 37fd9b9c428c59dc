"""Errors of configuration files (L0)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twinkle_core.errors.base import TwinkleError


class NoConfigFile(TwinkleError, FileNotFoundError):
    """The file named on the command line is not there."""

    def __init__(self, path: object) -> None:
        super().__init__(f"there is no configuration file {path}\n    twinkle train --schema prints what it may hold")


class NoConfigGiven(TwinkleError, ValueError):
    """``twinkle train`` alone."""

    def __init__(self) -> None:
        super().__init__(
            "which file? twinkle train CONFIG.yaml [--key value]\n    twinkle train --schema prints what it may hold"
        )


class BadConfig(TwinkleError, ValueError):
    """A configuration that can't be run. All its faults are told at once.

    Args:
        name: the file.
        faults: (where, what): ``line 7`` or the option that set it, and a sentence.
    """

    def __init__(self, name: object, faults: Sequence[tuple[str, str]]) -> None:
        self.faults = list(faults)
        # an option is called as the key that it sets, which is told once
        lines = [f"{where}: {what.removeprefix(where[2:] + ': ')}" if where else what for where, what in self.faults]
        count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
        super().__init__(f"{name} has {count}:\n" + "\n".join("    " + line.replace("\n", "\n    ") for line in lines))


class StrayWord(TwinkleError, ValueError):
    """A word on the command line that belongs to no option."""

    def __init__(self, word: str) -> None:
        super().__init__(f"'{word}' belongs to no option; write --key value or --key=value (--optimizer.lr 1e-4)")


class OutputInUse(TwinkleError, FileExistsError):
    """A new run would mix its checkpoints with another's."""

    def __init__(self, output_dir: object, checkpoint: object) -> None:
        super().__init__(
            f"{output_dir} already holds {checkpoint} of another run.\n"
            f"    Go on with it: --resume. Or begin elsewhere: --output_dir FOLDER."
        )


class NoCheckpoint(TwinkleError, FileNotFoundError):
    """``--resume PATH`` names no checkpoint."""

    def __init__(self, path: object) -> None:
        super().__init__(f"--resume {path}: there is no such checkpoint folder; --resume alone takes the newest in output_dir")


class DataOrderChanged(TwinkleError, ValueError):
    """A resumed run whose rows come in another order. ``different``: (what, before, now)."""

    def __init__(self, checkpoint: object, file: object, different: Iterable[tuple[str, object, object]]) -> None:
        lines = "".join(f"\n    {what}: {before!r} before, {now!r} now" for what, before, now in different)
        super().__init__(
            f"{checkpoint} can't be gone on from: its run drew other rows, or in another order.{lines}\n"
            f"    Give what it had. For other data begin a new run, from the trained adapter with adapter.path.\n"
            f"    To go on all the same, counting rows on from where it was, remove {file}."
        )


class CacheNotWritable(TwinkleError, OSError):
    """The quickstart's model could not be kept."""

    def __init__(self, folder: object, reason: object) -> None:
        super().__init__(f"{folder} can't be written ({reason}).\n    Choose another place: TWINKLE_CACHE=FOLDER")


class UnsupportedGGUF(TwinkleError, ValueError):
    """A GGUF file that the quickstart's reader does not know."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(
            f"{path}: {reason}.\n    The quickstart reads GGUF files of Llama models with a byte-level BPE tokenizer.\n"
            "    For another model: --model ID"
        )
