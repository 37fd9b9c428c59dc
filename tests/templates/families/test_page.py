"""The table of families on the page of templates is what rendering shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "templates.md"
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
FAMILIES = {
    "Qwen2.5": ("qwen2_5", "qwen"),
    "Qwen3": ("qwen3", "qwen"),
    "Qwen3.5": ("qwen3_5", "qwen35"),
    "Llama 3": ("llama3", "llama3"),
    "Llama 3.1": ("llama3_1", "llama3"),
    "Mistral v0.3": ("mistral_v3", "mistral"),
    "GLM-4": ("glm4", (GLM, "<|endoftext|>")),
    "GLM-4.6": ("glm4_6", (GLM, "<|endoftext|>")),
    "InternLM2.5": ("internlm2_5", (("<s>", "<|im_end|>", "<|im_start|>", "</s>"), "</s>")),
    "Yi": ("yi", (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "<|endoftext|>")),
    "DeepSeek V3": ("deepseek_v3", "deepseek"),
    "DeepSeek R1": ("deepseek_r1", "deepseek"),
}


def rows():
    part = PAGE.read_text("utf-8").partition("## Families")[2].partition("## ")[0]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in part.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip().replace("\\|", "|") for cell in row[1:]] for row in cells[1:]}


def test_the_table_has_each_family():
    assert list(rows()) == list(FAMILIES)
    files = {path.stem for path in Path(__file__).parent.glob("*.jinja")}
    files -= {"qwen2_5_vl"}  # of a model that sees: docs/vision.md
    assert files == {name for name, _ in FAMILIES.values()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_what_rendering_shows(family, build, of_bytes, request):
    name, kind = FAMILIES[family]
    if isinstance(kind, str):
        tokenizer = request.getfixturevalue(kind)
    else:
        names = {"bos_token": "<s>"} if "<s>" in kind[0] else {}
        tokenizer = of_bytes({token: 500 + k for k, token in enumerate(kind[0])}, eos_token=kind[1], **names)
    template = build(tokenizer, name)
    shown = [_system(template), _end(template), _prompt(template), _thoughts(template), _calls(template), _tools(template)]
    assert rows()[family] == shown


def _talk(*turns):
    return [{"role": role, "content": text} for role, text in turns]


def _system(template):
    talk = _talk(("system", "SYS"), ("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2"))
    text = template.render({"messages": talk})
    if text.index("SYS") > text.index("A1"):
        assert "SYS\n\nQ2" in text
        return "before the last question"
    plain = template.render({"messages": talk[1:]})
    if "system" not in text[: text.index("SYS")]:
        return "without tags"
    return "own turn, a default without" if "system" in plain else "own turn"


def _last_token(template, messages):
    labels = template.encode({"messages": messages})["labels"]
    return template.decode([[label for label in labels if label != -100][-1]])


def _end(template):
    end = _last_token(template, _talk(("user", "Q"), ("assistant", "A")))
    if template.tool_format is None:
        return f"`{end}`"
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {}}}
    talk = [*_talk(("user", "Q")), {"role": "assistant", "content": "", "tool_calls": [call, call]}]
    if template.check({"messages": talk}):  # one call a message
        talk[1]["tool_calls"] = [call]
    after = _last_token(template, talk)
    return f"`{end}`" if after == end else f"`{end}`, a call `{after}`"


def _prompt(template):
    text = template.render({"messages": _talk(("user", "QQ"))}, add_generation_prompt=True)
    rest = text.partition("QQ")[2].removeprefix("<|im_end|>\n").removeprefix("<|eot_id|>")
    return f"`{rest.replace(chr(10), '⏎')}`"


def _thoughts(template):
    talk = _talk(("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2"))
    talk[1]["reasoning_content"], talk[3]["reasoning_content"] = "OLD", "NEW"
    text = template.render({"messages": talk})
    assert "NEW" in text
    if "OLD" in text:
        return "in the text"
    begun = _prompt(template).endswith("<think>⏎`")
    return "after the last question, begun by the prompt" if begun else "after the last question"


def _calls(template):
    return f"`{template.tool_format}`" if template.tool_format else "none"


def _tools(template):
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    reason = template.check({"messages": _talk(("user", "Q"), ("assistant", "A")), "tools": tools})
    assert reason is None or "shows nothing of the row's 'tools'" in reason
    return "refused" if reason else "shown"
