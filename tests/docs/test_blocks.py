"""Every block of every page runs, or says why not."""

from __future__ import annotations

import ast

import pytest

#: languages that are shown and never run; a page that has another one is to be looked at
SHOWN = {"text", "toml", "yaml", "json", "jsonl", ""}
RUN = {"python", "bash", "console"}
#: how many blocks are left out, in all pages together: raise it only with a reason on the page
LEFT_OUT = 14


def test_the_blocks_of_a_page_run(path, page, read):
    for block in read(path):
        page.run(block)
    found = {component.__name__ for component in page.components()}
    shown = {name for block in read(path, "python") if block.not_run is None for name in derived(block.text)}
    assert shown <= found, f"{path}: no suite ran for {', '.join(shown - found)}"


def derived(text):
    """The classes of a block that derive from a contract, as they are written."""
    contracts = {"Loss", "Metric", "Processor", "Template", "Patch", "SessionModel"}
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return [c.name for c in classes if contracts & {base.id for base in c.bases if isinstance(base, ast.Name)}]


def test_every_block_is_known_and_what_is_left_out_says_why(path, read):
    for block in read(path):
        directive = block.language == "" and block.text.lstrip().startswith(("..", ":"))
        assert block.language in SHOWN | RUN or directive, f"{path}:{block.line} {block.language}"
        assert block.not_run is None or len(block.not_run.split()) >= 3, f"{path}:{block.line} says not why it isn't run"


def test_few_blocks_are_left_out(read, all_pages):
    left = [f"{p}:{b.line} {b.not_run}" for p in all_pages for b in read(p) if b.not_run is not None]
    assert len(left) <= LEFT_OUT, "\n".join(left)


def test_a_wrong_component_is_noticed(page, read):
    from dataclasses import replace

    wrong = (
        "from twinkle_core import Loss, LossOutput\n"
        "class Mean(Loss):\n"
        "    def __call__(self, inputs, outputs):\n"
        "        return LossOutput(-outputs.logps.mean(), 1.0)\n"
    )
    page.run(replace(read("README.md", "python")[0], text=wrong))
    assert derived(wrong) == ["Mean"]
    with pytest.raises(AssertionError, match=r"TestMean\.test_halves_add_up_as_its_scope_says"):
        page.components()


def test_a_wrong_output_is_noticed(page, read, tmp_path, monkeypatch):
    from dataclasses import replace

    block = read("README.md", "python")[0]
    page.run(replace(block, text="x = 2\nprint(x + 1)  # → 3\nx  # → 2\nfor i in range(2):\n    print(i)\n# → 0\n# → 1\n"))
    with pytest.raises(AssertionError, match="prints \\['3'\\], and the page says \\['4'\\]"):
        page.run(replace(block, text="x = 2\nprint(x + 1)  # → 4\n"))
    with pytest.raises(AssertionError, match="mark the block as not run"):
        page.run(replace(block, language="bash", text="rm -r output\n"))
    with pytest.raises(AssertionError, match="not in MODELS"):
        page.run(replace(block, text="model = 'hf://some/model'\n"))
