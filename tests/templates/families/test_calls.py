"""A call, written by each family's template and read back, is the same call; and labels are found for it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FAMILIES = {
    "qwen2_5": ("qwen", "hermes"),
    "qwen3": ("qwen", "hermes"),
    "qwen3_5": ("qwen35", "qwen_xml"),
    "llama3_1": ("llama3", "llama3"),
    "mistral_v3": ("mistral", "mistral"),
    "glm4": ("glm", "glm4"),
    "glm4_6": ("glm", "glm_xml"),
    "deepseek_v3": ("deepseek", "deepseek_v3"),
}
UNQUOTED = {"qwen_xml", "glm_xml"}
#: Its template writes calls, but no tools; rows that have some are refused.
TOOLLESS = {"deepseek_v3"}
ANY = st.characters(codec="utf-8", exclude_categories=("Cs",))
NAMES = st.text(st.sampled_from("abXY_9é"), min_size=1, max_size=6)
#: without a tag's beginning: where a form has no quotes, a closing tag in a text ends it, and an end token is refused anyway
TEXTS = st.text(st.sampled_from("\"'\\\n\t{}[]>: ,0é你👋") | ANY, max_size=8).filter(lambda text: "<" not in text)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, build, of_bytes):
    kind, form = FAMILIES[request.param]
    if kind == "glm":
        tokens = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
        tokenizer = of_bytes({t: 151331 + k for k, t in enumerate(tokens)}, eos_token="<|endoftext|>")
    else:
        tokenizer = request.getfixturevalue(kind)
    template = build(tokenizer, request.param)
    assert template.tool_format == form
    return template


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES, arguments=st.dictionaries(NAMES, VALUES, max_size=3))
def test_a_call_is_read_back(family, name, arguments):
    """Where the form has no quotes, the declared types tell texts from the rest."""
    if family.tool_format in UNQUOTED:  # an inner list or object is JSON there; bare values as its template writes them
        arguments = {k: v for k, v in arguments.items() if isinstance(v, (str, int, list, dict)) and not isinstance(v, bool)}
    types = {k: {"type": "string" if isinstance(v, str) else "object"} for k, v in arguments.items()}
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": types}}}
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": name, "arguments": arguments}}
    question = [{"role": "user", "content": "w?"}]
    declared = {} if family.tool_format in TOOLLESS else {"tools": [tool]}
    talk = {"messages": [*question, {"role": "assistant", "content": None, "tool_calls": [call]}], **declared}
    asked = family.render({"messages": question, **declared}, add_generation_prompt=True)
    text = family.render(talk)
    assert text.startswith(asked)
    message = family.parse(text[len(asked) :], tools=[tool])
    if family.tool_format != "mistral":
        del call["id"]
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert family.check(talk) is None
