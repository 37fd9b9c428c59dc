"""Write the tables of docs/models.md: a tiny model of each family is built, loaded and asked.

``python tools/generate_models.py`` writes them; ``--check`` only says whether they are stale. What stands around the tables is
written by hand. The tests of plugins/twinkle-transformers/tests/models train, save and load the same models.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT / "plugins" / "twinkle-transformers" / "tests" / "models"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(kind: str) -> str:
    """The rows of one kind of models."""
    import families

    lines = [line(families.COLUMNS), "|" + "---|" * len(families.COLUMNS)]
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, family) in enumerate(families.FAMILIES.items()):
            if family.kind == kind:
                place = families.write(name, Path(folder) / str(number))
                lines.append(line(families.cells(name, families.facts(name, place))))
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its tables, each between two comments, made anew."""
    pattern = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.S)
    return pattern.sub(lambda part: f"{part[1]}{table(part[2])}\n{part[3]}", text)


def main() -> int:
    """Write the page, or check it."""
    before = TARGET.read_text("utf-8")
    after = page(before)
    if "--check" in sys.argv[1:]:
        print(f"{TARGET.relative_to(ROOT)} is {'up to date' if after == before else 'stale: python tools/generate_models.py'}")
        return int(after != before)
    TARGET.write_text(after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
