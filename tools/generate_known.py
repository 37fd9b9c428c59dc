"""Write twinkle_core/known.py from the entry points of this repository's distributions.

``python tools/generate_known.py`` writes it; ``--check`` only says whether it is stale.
"""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "twinkle_core" / "known.py"
HEADER = '''"""Which distribution provides which first-party name (L0). Generated: python tools/generate_known.py

So a name whose distribution is not installed is answered with what to install.
"""

from __future__ import annotations

'''


def load(path: Path) -> Any:
    """A module of this repository by its file, without the package around it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collect(root: Path = ROOT) -> dict[tuple[str, str], tuple[str, str, str]]:
    """(kind, name) -> (class, distribution, since). ``since`` of a name that is known already stays as it is."""
    sys.path.insert(0, str(root))
    try:
        from twinkle_core.names import KINDS
    finally:
        sys.path.remove(str(root))
    before = load(TARGET).KNOWN if TARGET.exists() else {}
    known: dict[tuple[str, str], tuple[str, str, str]] = {}
    for project in [root / "pyproject.toml", *sorted((root / "plugins").glob("*/pyproject.toml"))]:
        data = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        for group, entries in data.get("entry-points", {}).items():
            kind = KINDS.get(group.removeprefix("twinkle."))
            for name, value in entries.items() if kind else ():
                cls = value.partition(":")[2]
                since = before.get((kind, name), ("", "", data["version"]))[2]
                known[kind, name] = (cls, data["name"], since)
    return known


def text(known: dict[tuple[str, str], tuple[str, str, str]]) -> str:
    """The module's source."""
    dists = sorted({dist for _, dist, _ in known.values()})
    lines = ["#: twinkle's own distributions: their names can't be taken over by others", "FIRST_PARTY = ("]
    lines += [f'    "{dist}",' for dist in dists]
    lines += [")", "", "#: (kind, name) -> (class, distribution, first version that has it)", "KNOWN = {"]
    lines += [f'    ("{k}", "{n}"): ("{c}", "{d}", "{s}"),' for (k, n), (c, d, s) in sorted(known.items())]
    return HEADER + "\n".join([*lines, "}", ""])


def main(arguments: list[str]) -> int:
    """Write, or compare."""
    source = text(collect())
    if "--check" in arguments:
        stale = TARGET.read_text(encoding="utf-8") != source
        print(f"{TARGET} is {'stale: python tools/generate_known.py' if stale else 'as it should be'}")
        return int(stale)
    TARGET.write_text(source, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
