"""What importing twinkle and resolving names cost, against the bounds that the docs state.

    python benchmarks/import_time.py

Modules are counted in a fresh interpreter. The scan is measured over generated metadata of 150 and 330 distributions, each
time in a fresh interpreter too, since metadata readers cache; the least of several runs counts. Exits with 1 when a bound is
broken.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from twinkle_core.names import KINDS
from twinkle_core.testing.distributions import write_distribution

RUNS = 5
SIZES = (150, 330)
WITH_TWINKLE = 6  # distributions among them that have twinkle's entry points
MODULES = 30
SCAN_MS = {150: 60.0, 330: 120.0}  # expected are 10 to 30; the bound leaves room for a loaded machine
LOOKUP_US = 200.0
TIMES_CHEAPER = 3.0

COUNT = """
import json, sys, time
before = set(sys.modules)
began = time.perf_counter()
import twinkle
seconds = time.perf_counter() - began
new = set(sys.modules) - before
foreign = [m for m in new if m.partition(".")[0] not in sys.stdlib_module_names and not m.startswith("twinkle")]
print(json.dumps({"modules": len(new), "foreign": sorted(foreign), "ms": seconds * 1e3}))
"""

SCAN = """
import json, sys, time
from twinkle_core import index, registry
if sys.version_info >= (3, 12):
    import importlib.metadata as metadata
else:
    import importlib_metadata as metadata
metadata.distribution("pluggy").metadata  # loads the standard library's parser of mail headers, once for all
scans = []
def counted(path=None, scan=index.scan):
    scans.append(1)
    return scan(path)
registry.scan = counted
names = registry.Registry(path=[FOLDER])
began = time.perf_counter()
names.find("loss", "own_0")
first = time.perf_counter() - began
look_ups = [("loss", f"own_{n}") for n in range(WITH)] * 20
began = time.perf_counter()
for kind, name in look_ups:
    names.find(kind, name)
later = (time.perf_counter() - began) / len(look_ups)
print(json.dumps({"scan_ms": first * 1e3, "lookup_us": later * 1e6, "scans": len(scans)}))
"""

GROUPS = """
import json, sys, time
if sys.version_info >= (3, 12):
    import importlib.metadata as metadata
else:
    import importlib_metadata as metadata
metadata.distribution("pluggy").metadata
sys.path[:] = [FOLDER]
began = time.perf_counter()
found = [metadata.entry_points(group="twinkle." + kind) for kind in KINDS]
print(json.dumps({"groups_ms": (time.perf_counter() - began) * 1e3, "found": sum(map(len, found))}))
"""


def run(code: str, **values: object) -> dict[str, object]:
    """The JSON that a fresh interpreter prints."""
    header = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    done = subprocess.run([sys.executable, "-c", header + code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def least(code: str, key: str, **values: object) -> dict[str, object]:
    """Of several runs the one with the least ``key``."""
    return min((run(code, **values) for _ in range(RUNS)), key=lambda result: float(str(result[key])))


def site(folder: Path, size: int) -> None:
    """Metadata of ``size`` distributions, as long as it is on average, half of them with scripts."""
    description = "\n\n" + "A paragraph of a description, as long as they often are.\n" * 80
    for number in range(size):
        ours = number < WITH_TWINKLE
        points = {"losses": {f"own_{number}": f"own_{number}:OwnLoss"}} if ours else {}
        home = write_distribution(folder, f"package-{number}", "1.0", points, api=1 if ours else None,
                                  requires=[f"package-{n}>=1" for n in range(8)])  # fmt: skip
        with (home / "METADATA").open("a") as file:
            file.write(description)
        if number % 2:
            with (home / "entry_points.txt").open("a") as file:
                file.write(f"[console_scripts]\ncommand_{number} = package_{number}:main\n")
        elif not ours:
            (home / "entry_points.txt").unlink()


def main() -> int:
    """Measure, print, compare."""
    rows: list[tuple[str, float, str, float, bool]] = []
    count = least(COUNT, "ms")
    rows.append(
        ("modules loaded by `import twinkle`", float(str(count["modules"])), "<", MODULES, int(str(count["modules"])) < MODULES)
    )
    foreign = list(count["foreign"])  # type: ignore[call-overload]
    rows.append(("of third parties", len(foreign), "=", 0, not foreign))
    rows.append(("`import twinkle`, ms", float(str(count["ms"])), "<", 50, float(str(count["ms"])) < 50))
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            site(Path(folder), size)
            scan = least(SCAN, "scan_ms", FOLDER=folder, WITH=WITH_TWINKLE)
            groups = least(GROUPS, "groups_ms", FOLDER=folder, KINDS=list(KINDS))
        assert groups["found"] == WITH_TWINKLE, "both ways must find the same"
        ms, us = float(str(scan["scan_ms"])), float(str(scan["lookup_us"]))
        ratio = float(str(groups["groups_ms"])) / ms
        rows.append((f"{size} distributions: first look-up (the scan), ms", ms, "<", SCAN_MS[size], ms < SCAN_MS[size]))
        rows.append((f"{size} distributions: a later look-up, µs", us, "<", LOOKUP_US, us < LOOKUP_US))
        rows.append(
            (
                f"{size} distributions: scans for {20 * WITH_TWINKLE + 1} look-ups",
                int(str(scan["scans"])),
                "=",
                1,
                scan["scans"] == 1,
            )
        )
        rows.append(
            (f"{size} distributions: entry_points() by group costs × as much", ratio, ">", TIMES_CHEAPER, ratio > TIMES_CHEAPER)
        )
    width = max(len(row[0]) for row in rows)
    for what, value, relation, bound, holds in rows:
        print(f"{what:<{width}}  {value:8.1f}  {relation} {bound:<6g}  {'ok' if holds else 'BROKEN'}")
    return int(not all(row[4] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
