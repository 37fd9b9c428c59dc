"""The scan of installed metadata."""

from __future__ import annotations

import pytest

from twinkle_core.index import scan
from twinkle_core.testing.distributions import write_distribution


def values(index, kind="loss"):
    return [(e.name, e.value, e.dist, e.version) for e in index.of(kind)]


def test_old_metadata_does_not_hide_the_new(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    write_distribution(old, "Acme.Losses", "0.9", {"losses": {"gone": "acme:Gone"}}, egg=True)
    write_distribution(new, "acme-losses", "1.2", {"losses": {"focal": "acme:F"}})
    for order in ([old, new], [new, old]):
        assert values(scan(list(map(str, order)))) == [("focal", "acme:F", "acme-losses", "1.2")]


def test_of_two_equal_kinds_of_metadata_the_first_wins_as_for_import(tmp_path):
    for folder, version in (("a", "1"), ("b", "2")):
        write_distribution(tmp_path / folder, "acme", version, {"losses": {"focal": "acme:F"}})
    assert scan([str(tmp_path / f) for f in "ab"]).version("acme") == "1"
    assert scan([str(tmp_path / f) for f in "ba"]).version("acme") == "2"


def test_only_twinkles_groups_count(tmp_path):
    home = write_distribution(tmp_path, "acme", "1", {"losses": {"focal": "acme:F"}, "unheard_of": {"x": "y:Z"}})
    with (home / "entry_points.txt").open("a") as file:
        file.write("[console_scripts]\nfocal = acme:main\n")
    assert [e.value for e in scan([str(tmp_path)]).entries] == ["acme:F"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda home: (home / "METADATA").write_text("Metadata-Version: 2.1\nVersion: 1.0\n"),
        lambda home: (home / "METADATA").unlink(),
        lambda home: (home / "METADATA").write_bytes(b"\xff\xfe\x00"),
        lambda home: (home / "entry_points.txt").write_bytes(b"[twinkle.losses]\nbad = \xff:X\n"),
        lambda home: (home / "entry_points.txt").write_text("[twinkle.losses]\nbad\n[twinkle"),
    ],
    ids=["no name", "no metadata", "metadata not text", "entry points not text", "entry points cut off"],
)
def test_damaged_metadata_takes_nothing_else_down(tmp_path, damage):
    damage(write_distribution(tmp_path, "bad", "1", {"losses": {"bad": "bad:B"}}))
    write_distribution(tmp_path, "good", "1", {"losses": {"good": "good:G"}})
    index = scan([str(tmp_path)])
    assert ("good", "good:G", "good", "1") in values(index)
    healthy = [e for e in index.entries if e.dist not in ("good", "bad")]
    assert healthy == []
    assert all("bad" in fault for fault in index.faults)


def test_a_missing_name_is_reported(tmp_path):
    home = write_distribution(tmp_path, "bad", "1", {"losses": {"bad": "bad:B"}})
    (home / "METADATA").write_text("Metadata-Version: 2.1\nVersion: 1.0\n")
    (fault,) = scan([str(tmp_path)]).faults
    assert str(home) in fault


def test_hook_modules_are_listed_apart(tmp_path):
    write_distribution(tmp_path, "acme", "1", {"plugins": {"acme": "acme.hooks"}, "losses": {"a": "acme:A"}})
    index = scan([str(tmp_path)])
    assert [e.module for e in index.of("plugins")] == ["acme.hooks"]
    assert [e.name for e in index.of("loss")] == ["a"]


def test_this_distribution_is_there():
    assert {"cross_entropy", "mse"} <= {e.name for e in scan().of("loss") if e.dist == "twinkle-core"}


def test_lines_that_nobody_could_ask_for_are_told(site):
    home = site.add("acme", entry_points={"losses": {"a/b": "m:A", "good": "m:Good"}, "lossess": {"odd": "m:Odd"}})
    with (home / "entry_points.txt").open("a") as file:
        file.write("[twinkle.metrics]\ntwice = m:One\ntwice = m:Two\n")
    index = site.registry().index()
    assert [e.name for e in index.of("loss")] == ["good"]
    assert [e.value for e in index.of("metric")] == ["m:One"]
    told = "\n".join(index.faults)
    assert "loss 'a/b' from acme 1.0 can't be asked for: a name holds no '/'" in told
    assert "there is no group [twinkle.lossess]; did it mean [twinkle.losses]?" in told
    assert "stands twice in its metadata, as m:One and as m:Two" in told


def test_a_distribution_that_is_there_twice_is_told(tmp_path):
    """The leftover egg-info of an old build, or the same folder twice on the path, is none."""
    for folder, version in (("a", "1"), ("b", "2")):
        write_distribution(tmp_path / folder, "acme", version, {"losses": {"focal": "acme:F"}})
    write_distribution(tmp_path / "b", "acme", "0.1", {"losses": {"focal": "acme:F"}}, egg=True)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    (fault,) = scan([a, b]).faults
    assert fault.startswith("acme is installed 2 times: 1 in ") and f"2 in {b}" in fault
    assert scan([a, a]).faults == () == scan([b]).faults


def test_another_distribution_under_the_cores_name_is_told(tmp_path):
    core = {e.name: e.value for e in scan().entries if e.dist == "twinkle-core" and e.kind == "loss"}
    write_distribution(tmp_path, "twinkle-core", "9", {"losses": core | {"mse": "evil:MSELoss", "more": "evil:More"}})
    (fault,) = scan([str(tmp_path)]).faults
    assert "twinkle-core 9 is not what this twinkle-core is" in fault
    assert "has loss 'mse' as evil:MSELoss, has loss 'more' as evil:More, lacks metric" in fault
    assert not [f for f in scan().faults if "twinkle-core" in f]
