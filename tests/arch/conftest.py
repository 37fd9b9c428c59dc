"""The source as syntax trees. Nothing is imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Source:
    """One file of the product."""

    path: str  # below the root
    module: str
    text: str
    tree: ast.Module


def _module(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if "src" in parts:
        parts = parts[parts.index("src") + 1 :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _sources(*patterns):
    found = []
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            relative, text = path.relative_to(ROOT), path.read_text(encoding="utf-8")
            found.append(Source(relative.as_posix(), _module(relative), text, ast.parse(text, str(relative))))
    return found


SOURCES = _sources("twinkle/**/*.py", "twinkle_core/**/*.py", "plugins/*/src/**/*.py")
assert SOURCES
CONTRIB = _sources("contrib/*/src/**/*.py")  # not the product: whose manners they keep is their owners' business
TESTS = _sources("tests/**/*.py", "plugins/*/tests/**/*.py")


@pytest.fixture(scope="session")
def sources():
    return SOURCES


@pytest.fixture(scope="session")
def contrib():
    return CONTRIB


@pytest.fixture(scope="session")
def tests():
    return TESTS


def imports(source, *, everywhere):
    """Modules that a file imports: at module level (in functions and under TYPE_CHECKING not), or everywhere."""
    found = []
    stack = list(source.tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = source.module.split(".") if source.path.endswith("__init__.py") else source.module.split(".")[:-1]
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            home = ".".join(filter(None, (base, node.module)))
            found += [f"{home}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not everywhere:
            stack += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or everywhere:
            stack += [
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case)
            ]
    return found


@pytest.fixture(scope="session")
def imports_of():
    return imports
