"""The forms of tool calls by name (L1). To add one: a reader in a file of its own, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from twinkle_core.templates.tools import cohere, deepseek, glm, hermes, llama3, mistral, qwen_xml, react
from twinkle_core.templates.tools.scan import Schema
from twinkle_core.types import ToolCall

#: name -> text to (the text without its calls, the calls)
FORMS: dict[str, Callable[[str, Schema], tuple[str, list[ToolCall]]]] = {
    "hermes": hermes.parse,
    "qwen_xml": qwen_xml.parse,
    "glm_xml": glm.parse_tagged,
    "mistral": mistral.parse,
    "deepseek_v3": deepseek.parse_fenced,
    "deepseek_v31": deepseek.parse_bare,
    "cohere": cohere.parse,
    "llama3": llama3.parse,
    "glm4": glm.parse_whole,
    "react": react.parse,
}


def schema_of(tools: Iterable[Any]) -> Schema:
    """The declared types of a conversation's tools; what is declared otherwise than in JSON schema is left out."""
    found: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(function.get("name"), str) and isinstance(properties, Mapping):
            types = {k: frozenset(_types(v)) for k, v in properties.items()}
            found[function["name"]] = {k: t for k, t in types.items() if t}
    return found


def _types(declared: Any, depth: int = 0) -> Iterator[str]:
    """The JSON types that a value may have: ``type`` (one or a list), those of its alternatives, those of listed values."""
    if not isinstance(declared, Mapping) or depth > 8:
        return
    one = declared.get("type")
    yield from (t for t in ([one] if isinstance(one, str) else _listed(one)) if isinstance(t, str))
    for key in ("anyOf", "oneOf", "allOf"):
        for other in _listed(declared.get(key)):
            yield from _types(other, depth + 1)
    if one is None and any(isinstance(value, str) for value in (*_listed(declared.get("enum")), declared.get("const"))):
        yield "string"


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()
