"""Pages that tell what code says are compared with the code."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from twinkle_core import errors, hookspecs, names, settings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def classes() -> list[type[errors.TwinkleError]]:
    found = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.TwinkleError)]
    return [c for c in found if c is not errors.TwinkleError]


@pytest.fixture(scope="module")
def examples():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield import_module("error_examples").ENTRIES
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_every_error_has_a_heading_and_an_example(examples):
    headings = re.findall(r"^### (\w+)$", page("errors.md"), re.M)
    assert len(headings) == len(set(headings)) and set(headings) == {c.__name__ for c in classes()}
    assert list(examples.keys() - set(classes())) == [] and [c for c in classes() if c not in examples] == []


def test_every_way_to_make_an_error_has_its_text(examples):
    """A class with several texts writes them in classmethods; each has an example that has the words it writes."""
    trees = [ast.parse(path.read_text("utf-8")) for path in Path(errors.__file__).parent.glob("*.py")]
    bodies = {node.name: node.body for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    for cls in classes():
        texts = [str(e) for e in examples[cls].examples]
        makers = [n for n in bodies[cls.__name__] if isinstance(n, ast.FunctionDef) and n.decorator_list]
        assert len(texts) >= len(makers), f"{cls.__name__} has {len(makers)} texts"
        for maker in makers:
            written = [n.value for n in ast.walk(maker) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            words = max(written, key=len).strip()
            assert any(words in text for text in texts), f"{cls.__name__}.{maker.name}: no example says {words!r}"


def test_an_error_without_a_way_out_in_its_text_has_one_on_the_page(examples):
    """A second line, a suggestion, or a word that says what to do; where a text has none of these, the page gives the way."""
    words = r"\b(give|use|take|set|call|choose|lower|load|write|leave|raise|remove|say|check|move|install|switch|start|must)\b"
    alone = []
    for cls, entry in examples.items():
        texts = " ".join(str(e) for e in entry.examples)
        if not (entry.way or re.search(words, texts, re.I) or "did you mean" in texts.lower() or "\n" in texts):
            alone.append(cls.__name__)
    assert not alone, "no way out, neither in the text nor on the page"


def test_the_page_of_errors_is_not_stale():
    run = subprocess.run([sys.executable, "tools/generate_errors.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_setting_is_in_the_table():
    rows = re.findall(r"^\| `(TWINKLE_\w+)` \| (.*?) \| (.*?) \|$", page("settings.md"), re.M)
    assert rows == [(s.variable, f"`{s.default}`" if s.default else "empty", s.meaning) for s in settings.ALL]


def test_every_command_and_option_is_on_its_page():
    from twinkle_core.cli.main import COMMANDS

    subparsers = argparse.ArgumentParser().add_subparsers()
    parts = dict(re.findall(r"^## twinkle (\w+)\n(.*?)(?=^## |\Z)", page("cli.md"), re.M | re.S))
    assert set(parts) == set(COMMANDS)
    for command, text in parts.items():
        import_module(f"twinkle_core.cli.{command}").add_parser(subparsers)
        for action in subparsers.choices[command]._actions:
            for option in action.option_strings:
                if option not in ("-h", "--help") and option.startswith("--"):
                    assert f"`{option}" in text, f"cli.md does not tell {option} of twinkle {command}"


def test_every_hook_is_on_the_page_of_plugins():
    told = re.findall(r"autofunction:: twinkle_core.hookspecs.(\w+)", page("write_a_plugin.md"))
    assert sorted(told) == sorted(hookspecs.NAMES)


def test_every_contract_has_its_page():
    for kind in ("loss", "metric", "template", "processor", "patch", "model"):
        assert kind in names.PLURAL
        assert f"contracts/{kind}\n" in page("index.md") and (DOCS / "contracts" / f"{kind}.md").is_file()


def test_links_between_pages_lead_somewhere():
    """The build checks links within docs/; the README and the plugins' pages are not part of it."""
    for path in [ROOT / "README.md", *ROOT.glob("plugins/*/README.md"), ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text("utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
