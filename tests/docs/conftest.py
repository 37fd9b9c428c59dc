"""Reads and runs the pages: what the documentation shows is what happens.

A fenced block of a page is treated by its language:

* ``python`` runs, a page's blocks in order and in one namespace. ``# → text`` at the end of a line says what its statement
  prints (a bare expression prints its value); more lines of output follow as comments of the same form.
* ``bash`` and ``console`` run if they are twinkle's commands; ``console`` with ``$`` before a command, and then lines that
  its output holds in this order (``...`` stands for any lines).
* ``pytest FILE`` runs the compliance suites in a file that the page has written, in this process.
* ``pip install -e FOLDER`` of a folder that the page has made is done by hand: metadata as an installer leaves it, and ``src``
  on the path. Nothing is built or fetched, and the page's folder is all that it touches.
* ``<!-- file: NAME -->`` before a block of any language writes it to that file in the page's folder.
* ``<!-- not run: REASON -->`` before a block leaves it out.
* other languages (``text``, ``toml``, ``yaml``, ``json``) are shown only.

A page runs in an empty folder, without a network. Models that a reader takes from a hub are tiny random ones here: ``MODELS``.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from twinkle_core import plugins, registry
from twinkle_core.runtime import local
from twinkle_core.testing import Suite, runner
from twinkle_core.testing.distributions import write_distribution

ROOT = Path(__file__).resolve().parents[2]
#: what pages name -> what is loaded in its place: a Llama of 2 layers, 32 wide, with bytes for tokens and ChatML
MODELS = {
    "ms://Qwen/Qwen3.5-4B": "tiny",
    "hf://HuggingFaceTB/SmolLM2-135M-Instruct": "tiny",
}
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.M | re.S)
MARK = re.compile(r"<!-- (file|not run): *((?:(?!-->).)*?) *-->\s*\Z", re.S)
PRINTS = re.compile(r"#\s*→\s?(.*)$")


@dataclass(frozen=True)
class Block:
    """One fenced block. ``file``: where it is written; ``not_run``: why it is left out, None where it is not."""

    page: str
    line: int
    language: str
    text: str
    file: str | None = None
    not_run: str | None = None


def pages() -> list[str]:
    """Paths of all pages whose blocks are run."""
    found = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]

    return [p.relative_to(ROOT).as_posix() for p in found if "_build" not in p.parts]


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text("utf-8")
    found = []
    for fence in FENCE.finditer(text):
        marks = dict([m.groups()] if (m := MARK.search(text[: fence.start()])) else [])
        body = re.sub(rf"^{fence['indent']}", "", fence["body"], flags=re.M)
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(page, line, fence["language"], body, marks.get("file"), marks.get("not run")))
    return [b for b in found if language is None or b.language == language]


class Page:
    """A page at work in a folder."""

    def __init__(self, models: dict[str, str]) -> None:
        self.models = models
        self.namespace: dict[str, object] = {"__name__": "__page__"}

    def run(self, block: Block) -> None:
        """One block, by its language and marks."""
        if block.not_run is not None:
            return
        if block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(self.substituted(block.text), "utf-8")
        elif block.language == "python":
            self.python(block)
        elif block.language in ("bash", "console"):
            self.commands(block)

    def substituted(self, text: str) -> str:
        """The text with a folder for each model of a hub."""

        def folder(match: re.Match[str]) -> str:
            assert match[0] in self.models, f"{match[0]} is not in MODELS of tests/docs/conftest.py"
            return self.models[match[0]]

        return re.sub(r"(?:ms|hf)://[\w.-]+/[\w.-]*\w", folder, text)

    def python(self, block: Block) -> None:
        """Run a block statement by statement, and compare what each prints with what the page says."""
        text = self.substituted(block.text)
        lines = text.splitlines()
        body = ast.parse(text).body
        for k, statement in enumerate(body):
            end = body[k + 1].lineno - 1 if k + 1 < len(body) else len(lines)
            said = [m[1].rstrip() for line in lines[statement.lineno - 1 : end] if (m := PRINTS.search(line))]
            where = f"{block.page}:{block.line + statement.lineno - 1}"
            printed = self._statement(statement, where)
            if said:
                shown = [line.rstrip() for line in printed.splitlines() if line.strip()]
                assert shown == said, f"{where} prints {shown}, and the page says {said}"

    def _statement(self, statement: ast.stmt, where: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if isinstance(statement, ast.Expr):
                code = compile(ast.Expression(statement.value), where, "eval")
                value = eval(code, self.namespace)
                if value is not None:
                    print(repr(value))
            else:
                exec(compile(ast.Module([statement], []), where, "exec"), self.namespace)
        return out.getvalue()

    def commands(self, block: Block) -> None:
        """Run twinkle's commands in this process; anything else must be marked as not run."""
        console = block.language == "console"
        found: list[tuple[str, list[str]]] = []
        for line in block.text.splitlines():
            if console and not line.startswith("$ "):
                found[-1][1].append(line.rstrip())
            elif line.strip():
                found.append((line.removeprefix("$ ").partition("  #")[0], []))
        for command, said in found:
            words = shlex.split(self.substituted(command))
            if words[:3] == ["pip", "install", "-e"] and (project := Path(words[3].partition("[")[0])).is_dir():
                install(project)
                continue
            if words[0] == "pytest" and Path(words[1]).is_file():
                self.suites(words[1])
                continue
            assert words[0] == "twinkle", f"{block.page}:{block.line}: '{command}' is not twinkle's; mark the block as not run"
            self._command(words[1:], said, f"{block.page}:{block.line}")

    def suites(self, file: str) -> None:
        """All suites of a test file; none of their checks may fail."""
        module = import_module(Path(file).stem)
        found = [c for n, c in vars(module).items() if n.startswith("Test") and issubclass(c, Suite)]
        assert found, f"{file} has no suite"
        for suite in found:
            failed = [o for o in runner.run(suite) if o.outcome == runner.FAILED]
            assert not failed, "\n".join(f"{o.test}: {o.text}" for o in failed)

    def _command(self, words: list[str], said: list[str], where: str) -> None:
        from twinkle_core.cli.main import main

        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as faults:
            status = main(words)
        shown = [line.rstrip() for line in (out.getvalue() + faults.getvalue()).splitlines()]
        fails = any(line and re.match(r"(failed|[A-Z]\w+): ", line) for line in said)
        assert status == int(fails), f"{where}: status {status}\n" + "\n".join(shown)
        rest = iter(shown)
        for line in said:
            assert line in ("", "...") or line in rest, f"{where}: the output has no line {line!r} here:\n" + "\n".join(shown)


def install(project: Path) -> None:
    """What ``pip install -e`` leaves, for names to be found and modules to be imported."""
    facts = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    groups = {group.removeprefix("twinkle."): names for group, names in facts["entry-points"].items()}
    (api,) = groups.pop("api")
    write_distribution(Path.cwd(), facts["name"], facts["version"], entry_points=groups, api=int(api[1:]))
    sys.path.insert(0, str((project / "src").absolute()))
    registry.refresh()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a tiny random Llama and its tokenizer. Read only."""
    from twinkle_transformers.testing import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def page(tiny, tmp_path, monkeypatch):
    """An empty folder to run a page in, but for ``conversations.jsonl`` with 20 rows of messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    with (tmp_path / "conversations.jsonl").open("w", encoding="utf-8") as file:
        for i in range(20):
            turns = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes" * (i + 1)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    monkeypatch.setattr(local, "_state", local._State(local.LocalRuntime()))  # twinkle.initialize is for once in a process
    before, path = set(sys.modules), list(sys.path)
    yield Page({name: str({"tiny": tiny}[stand_in]) for name, stand_in in MODELS.items()})
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    for listener in {r.entry.name for r in plugins.records() if r.entry.dist in ("", "acme-hooks")}:
        plugins.unregister(listener)
    sys.path[:] = [p for p in path if p != str(tmp_path)]
    registry.refresh()


@pytest.fixture
def read():
    """``blocks``, for tests that look at a page."""
    return blocks


@pytest.fixture
def all_pages():
    """``pages()``."""
    return pages()


def pytest_generate_tests(metafunc):
    if "path" in metafunc.fixturenames:
        slow = SLOW if "page" in metafunc.fixturenames else ()
        metafunc.parametrize("path", [pytest.param(p, marks=[pytest.mark.slow] if p in slow else []) for p in pages()])


#: pages whose blocks take longer than a few seconds
SLOW = {"README.md", "docs/embeddings.md", "docs/contracts/model.md", "docs/quickstart.md", "docs/write_a_plugin.md"}
