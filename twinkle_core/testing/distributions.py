"""Hand-made installed distributions, for tests of plugins and of hosts (L0)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def write_distribution(
    folder: Path,
    name: str,
    version: str = "1.0",
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
    modules: Mapping[str, str] | None = None,
    requires: Sequence[str] = (),
    api: int | None = 1,
    egg: bool = False,
) -> Path:
    """Write metadata and modules as an installer would leave them.

    Args:
        folder: what stands in for site-packages; put it on ``sys.path``.
        name, version: of the distribution.
        entry_points: group without ``twinkle.`` (``"losses"``) -> name -> ``"module:Class"``.
        modules: file below ``folder`` -> source.
        requires: lines of ``Requires-Dist``, extras included.
        api: the version of the plugin API it states; None states none.
        egg: an ``.egg-info`` as old builds left it, in place of a ``.dist-info``.

    Returns:
        The metadata folder.
    """
    stem = name.replace("-", "_")
    home = folder / (f"{stem}.egg-info" if egg else f"{stem}-{version}.dist-info")
    home.mkdir(parents=True, exist_ok=True)
    extras = sorted({line.split("extra ==")[1].strip(" '\"") for line in requires if "extra ==" in line})
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {line}" for line in requires]
    (home / ("PKG-INFO" if egg else "METADATA")).write_text("\n".join(lines) + "\n")
    groups = dict(entry_points or {})
    if api is not None:
        groups["api"] = {f"v{api}": stem}
    text = "".join(
        f"[twinkle.{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()
    )
    (home / "entry_points.txt").write_text(text)
    for path, source in (modules or {}).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return home
