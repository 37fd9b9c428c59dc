"""Which plugin answered, in which version: written into checkpoints, compared between driver and workers (L0)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from twinkle_core.errors import WorkerMismatch
from twinkle_core.index import Entry

#: rows of ``kind name distribution version value``; ``distribution`` is empty for what was registered by hand
Snapshot = list[dict[str, str]]


def of(entries: Iterable[Entry]) -> Snapshot:
    """The rows of entries, sorted."""
    rows = [
        {"kind": e.kind, "name": e.name, "distribution": e.dist, "version": e.version, "value": e.value} for e in set(entries)
    ]
    return sorted(rows, key=lambda r: (r["kind"], r["name"], r["distribution"]))


def compare(
    driver: Iterable[Mapping[str, str]], worker: Iterable[Mapping[str, str]], *, rank: int = 0, host: str = "worker"
) -> None:
    """Check that a worker has what the driver resolved. What only the worker has does not matter.

    Args:
        driver: ``registry.snapshot()`` of the driver.
        worker: ``registry.snapshot(of=driver)`` of the worker.
        rank, host: which worker, for the error.

    Raises:
        WorkerMismatch: for the first distribution that is absent, of another version, or gives another class.
    """
    theirs = {(r["kind"], r["name"], r["distribution"]): r for r in worker}
    for row in driver:
        dist, version = row["distribution"], row["version"]
        if not dist:
            continue
        other = theirs.get((row["kind"], row["name"], dist))
        if other is None or other["version"] != version:
            raise WorkerMismatch(rank, host, dist, other["version"] if other else "", version)
        if other["value"] != row["value"]:
            detail = f" with {row['kind']} '{row['name']}' as {other['value']}"
            raise WorkerMismatch(rank, host, dist, version, f"{version} with {row['value']}", detail=detail)
