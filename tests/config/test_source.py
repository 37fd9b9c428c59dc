"""YAML to a tree with lines: compared with PyYAML where both agree on the language, with literal values where they differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core import errors
from twinkle_core.config.source import read, scalar


def _read(tmp_path: Path, text: str):
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return read(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E4", 1e4),
        ("-2.5e+3", -2500.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("no", "no"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1e-4'", "1e-4"),
        ("[1, 2e-1]", [1, 0.2]),
        ("{a: no}", {"a": "no"}),
        ("a: b: c", "a: b: c"),
        ("[q, k", "[q, k"),
        (r".*\.(q|v)_proj", r".*\.(q|v)_proj"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = scalar(text, "--x")
    assert found == value
    assert type(found) is type(value)


words = st.text("abcxyz", min_size=1, max_size=6).filter(lambda w: w not in {"a" * 9})
leaves = st.one_of(st.integers(-(10**6), 10**6), st.booleans(), st.none(), words, st.floats(-1e9, 1e9).map(lambda f: f + 0.5))
trees = st.dictionaries(words, st.recursive(leaves, lambda c: st.lists(c, max_size=3) | st.dictionaries(words, c, max_size=3)))


@settings(max_examples=80, deadline=None)
@given(trees)
def test_reads_what_pyyaml_writes(tmp_path_factory, tree):
    assert _read(tmp_path_factory.mktemp("y"), yaml.safe_dump(tree, sort_keys=False)).tree == tree


def test_every_key_and_item_knows_its_line(tmp_path):
    source = _read(tmp_path, "a:\n  b: 1\n  c:\n    - x\n    - d: 2\n")
    assert source.origins == {
        ("a",): "line 1",
        ("a", "b"): "line 2",
        ("a", "c"): "line 3",
        ("a", "c", 0): "line 4",
        ("a", "c", 1): "line 5",
        ("a", "c", 1, "d"): "line 5",
    }
    assert source.origin(("a", "c", 1, "missing")) == "line 5"
    assert source.origin(("z",)) == ""


def test_anchors_and_merge_keys(tmp_path):
    source = _read(tmp_path, "base: &b {lr: 1, r: 2}\nown:\n  <<: *b\n  lr: 3\n")
    assert source.tree == {"base": {"lr": 1, "r": 2}, "own": {"lr": 3, "r": 2}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: key 'a' stands twice; the first is in line 1"),
        ("a:\n  b: 1\n  b: 2\n", "line 3: key 'b' stands twice; the first is in line 2"),
        ("a: [1, 2\nb: 3\n", "line 2"),
        ("a: 1\n\tb: 2\n", "line 2, column 1: is not YAML"),
        ("- a\n- b\n", "line 1: must hold keys and values, not a list"),
        ("a: &x [*x]\n", "holds an alias to itself"),
        ("a: *nowhere\n", "line 1, column 4: is not YAML: found undefined alias"),
        ("a: !!python/object/apply:os.system [ls]\n", "python/object/apply:os.system' is not known"),
        ("? [a]\n: 1\n", "a key must be a word"),
    ],
)
def test_faults_name_file_and_line(tmp_path, text, told):
    with pytest.raises(errors.BadConfig) as caught:
        _read(tmp_path, text)
    assert told in str(caught.value)
    assert str(tmp_path / "c.yaml") in str(caught.value)


def test_no_such_file(tmp_path):
    with pytest.raises(errors.NoConfigFile, match="there is no configuration file"):
        read(tmp_path / "none.yaml")


def test_not_text(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(errors.BadConfig, match="is not UTF-8 text"):
        read(tmp_path / "c.yaml")


def test_an_empty_file_is_an_empty_tree(tmp_path):
    assert _read(tmp_path, "# nothing\n").tree == {}
