"""What the distributions promise is there, and the stubs say the same."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from twinkle_core import registry
from twinkle_core.names import CONTRACTS, KINDS, PLURAL

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [ROOT / "pyproject.toml", *sorted((ROOT / "plugins").glob("*/pyproject.toml"))]


def promised():
    """(kind, name, value, distribution) of every first-party entry point in the tree."""
    found = []
    for project in PROJECTS:
        data = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        for group, names in data.get("entry-points", {}).items():
            kind = KINDS.get(group.removeprefix("twinkle."))
            found += [(kind, name, value, data["name"]) for name, value in names.items() if kind]
    return found


PROMISED = promised()
FACADES = sorted(set(PLURAL) - {"runtime"})


def stub_names(path):
    """name -> ``module:attribute`` of what a stub re-exports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            found |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign):  # another name for one of them
            found[ast.unparse(node.targets[0])] = found[ast.unparse(node.value)]
    return found


def attached_names(path):
    """The same of the table that a facade module hands to ``attach``; ``module:`` as the stub writes it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "attach"]
    table = ast.literal_eval(call.args[1]) if len(call.args) > 1 else {}
    return {name: value if not value.endswith(":") else ":".join(value[:-1].rsplit(".", 1)) for name, value in table.items()}


@pytest.mark.parametrize("kind", FACADES)
def test_a_kinds_stub_names_what_the_entry_points_name(kind):
    promises = {value.partition(":")[2]: value for k, _, value, _ in PROMISED if k == kind}
    facade = ROOT / "twinkle" / f"{kind}.py"
    assert stub_names(facade.with_suffix(".pyi")) == promises | attached_names(facade)


@pytest.mark.parametrize(
    "module",
    [
        "twinkle/__init__",
        "twinkle/dataset",
        "twinkle/dataloader",
        "twinkle/listener",
        "twinkle_core/__init__",
        "twinkle_core/testing/__init__",
    ],
)
def test_a_stub_names_what_its_module_attaches(module):
    assert stub_names(ROOT / f"{module}.pyi") == attached_names(ROOT / f"{module}.py")


@pytest.mark.parametrize("stub", sorted(p.name for p in (ROOT / "twinkle").glob("*.pyi")))
def test_what_a_stub_names_exists(stub):
    import importlib

    for name, value in stub_names(ROOT / "twinkle" / stub).items():
        home, _, attribute = value.partition(":")
        module = importlib.import_module(home)
        assert hasattr(module, attribute) or importlib.import_module(f"{home}.{attribute}"), name


@pytest.mark.parametrize(("kind", "name", "value", "distribution"), PROMISED)
def test_an_entry_point_loads_and_keeps_its_contract(kind, name, value, distribution):
    import importlib

    cls = registry.resolve(kind, f"{distribution}/{name}")
    home, _, attribute = value.partition(":")
    assert cls is getattr(importlib.import_module(home), attribute), "install the distributions again: their metadata is old"
    if kind in CONTRACTS:
        module, contract = CONTRACTS[kind]
        assert issubclass(cls, getattr(importlib.import_module(module), contract))
        assert not getattr(cls, "__abstractmethods__", None)
    assert registry.resolve(kind, name) is registry.resolve(kind, attribute) is cls
