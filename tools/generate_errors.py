"""Write docs/errors.md: every class of twinkle_core/errors with its texts, room by room.

``python tools/generate_errors.py`` writes it; ``--check`` only says whether it is stale. The texts are those of real
exceptions (tools/error_examples.py), so the page can't say anything else than what a user reads.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "errors.md"
SOURCE = ROOT / "twinkle_core" / "errors"
#: file -> the heading of its classes, in the order of the page
ROOMS = {
    "names": "Names and plugins",
    "meshes": "Meshes and runtimes",
    "remote": "Workers elsewhere",
    "data": "Hubs and data",
    "templates": "Templates and processors",
    "training": "Training",
    "adapters": "Adapters",
    "checkpoints": "Checkpoints",
    "backends": "Backends",
    "command": "The command line",
    "configuration": "Configuration files",
}
HEAD = """# Errors

<!-- Generated: python tools/generate_errors.py -->

Every error that twinkle raises on purpose derives from `twinkle_core.TwinkleError`, and from the builtin that fits it, so
`except ValueError` works too. Its text says what was given, why it can't be, and the way out. It is raised before any state
changes, unless the text says otherwise. On the command line an error is one text and an exit status that is not 0; add
`--traceback` to see where it was raised.

This page has a heading for each class and an example of each of its texts. The errors of names and plugins come first.
"""


def rooms() -> dict[str, list[str]]:
    """Heading -> names of the classes, as they stand in the file."""
    files = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "base"}
    assert files == set(ROOMS), f"ROOMS and {SOURCE} differ by {sorted(files ^ set(ROOMS))}"
    source = {room: (SOURCE / f"{room}.py").read_text("utf-8") for room in ROOMS}
    return {ROOMS[room]: re.findall(r"^class (\w+)\(", text, re.M) for room, text in source.items()}


def section(name: str) -> str:
    """The heading of one class and what stands under it."""
    from error_examples import ENTRIES

    from twinkle_core import errors

    cls = getattr(errors, name)
    entry = ENTRIES[cls]
    bases = [b.__name__ for b in cls.__bases__ if b.__name__ != "TwinkleError"]
    sentence = re.match(r".+?\.(?=\s|$)", " ".join(inspect.cleandoc(cls.__doc__ or "").split()))
    assert sentence, f"{name} has no sentence in its docstring"
    parts = [f"### {name}", entry.why or sentence[0]]
    parts += [f"```text\n{name}: {example}\n```" for example in entry.examples]
    if entry.way:
        parts.append(f"**Way out.** {entry.way}")
    parts.append(f"*Also: {', '.join(f'`{base}`' for base in bases)}.*" if bases else "")
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    """The whole page."""
    parts = [HEAD.rstrip()]
    for room, names in rooms().items():
        parts.append(f"## {room}")
        parts += [section(name) for name in names]
    return "\n\n".join(parts).replace("\0", "\\0").encode("utf-8", "backslashreplace").decode("utf-8") + "\n"


def main() -> int:
    """Write the page, or check it."""
    text = page()
    if "--check" in sys.argv[1:]:
        stale = not TARGET.is_file() or TARGET.read_text("utf-8") != text
        print(f"{TARGET.relative_to(ROOT)} is {'stale: python tools/generate_errors.py' if stale else 'up to date'}")
        return int(stale)
    TARGET.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
