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


# ---------------------------------------------------------------------------------------------------- checkpoints


# ---------------------------------------------------------------------------------------------------- backends


# ---------------------------------------------------------------------------------------------------- configuration files and the command line


class NoConfigFile(TwinkleError, FileNotFoundError):
    """The file named on the command line is not there."""

    def __init__(self, path: object) -> None:
        super().__init__(f"there is no configuration file {path}\n    twinkle train --schema prints what it may hold")


class BadConfig(TwinkleError, ValueError):
    """A configuration that can't be run. All its faults are told at once.

    Args:
        name: the file.
        faults: (where, what): ``line 7`` or the option that set it, and a sentence.
    """

    def __init__(self, name: object, faults: Sequence[tuple[str, str]]) -> None:
        self.faults = list(faults)
        lines = [f"{where}: {what}" if where else what for where, what in self.faults]
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
            "    Go on with it: --resume. Or begin elsewhere: --output_dir FOLDER."
        )


class NoCheckpoint(TwinkleError, FileNotFoundError):
    """``--resume PATH`` names no checkpoint."""

    def __init__(self, path: object) -> None:
        super().__init__(f"--resume {path}: there is no such checkpoint folder; --resume alone takes the newest in output_dir")


class NotOnThisMachine(TwinkleError, ValueError):
    """Something only the quickstart's default could have given."""

    def __init__(self, what: str, way_out: str) -> None:
        super().__init__(f"{what}\n    {way_out}")


class UnsupportedGGUF(TwinkleError, ValueError):
    """A GGUF file that the quickstart's reader does not know."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(
            f"{path}: {reason}.\n    The quickstart reads GGUF files of Llama models with a byte-level BPE tokenizer; for another model give --model."
        )
