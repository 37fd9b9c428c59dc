"""A YAML file to a plain tree in which every key knows its line (L1).

The scalars are those of YAML 1.2: ``1e-4`` is a number, ``no`` and ``off`` are words (``mixed_precision: no``), ``010`` is ten.
PyYAML reads YAML 1.1, which says otherwise to all three. A key that stands twice is an error, not the last one's victory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from twinkle_core import errors

#: Where a value stands in the tree: keys of mappings, indices of lists.
Place = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def number(self, node: yaml.Node) -> int:
        text = str(self.construct_scalar(node))  # type: ignore[arg-type]
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


_CORE = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}
for _tag, (_pattern, _first) in _CORE.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.number)


@dataclass(slots=True)
class Source:
    """A tree, and where each of its values was written.

    Attributes:
        name: what messages call it: the file's path.
        tree: dicts, lists and scalars.
        origins: for the place of each key and list item, ``line 7`` or the option that set it.
    """

    name: str
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Place, str] = field(default_factory=dict)

    def origin(self, place: Place) -> str:
        """Where ``place``, or the nearest place around it that was written, stands; '' when nothing of it was.

        A step that the file doesn't have is passed over: ``dataset: {…}`` is read as a list of one.
        """
        found: Place = ()
        for step in place:
            if (*found, step) in self.origins:
                found = (*found, step)
        return self.origins.get(found, "")


def read(path: Path) -> Source:
    """Read a YAML file.

    Raises:
        NoConfigFile: there is no such file.
        BadConfig: not YAML (with line and column), not a mapping, or a key stands twice in one mapping.
    """
    if not path.is_file():
        raise errors.NoConfigFile(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise errors.BadConfig(path, [("", f"is not UTF-8 text ({error.reason} at byte {error.start})")]) from None
    source = Source(str(path))
    value = _parse(text, source)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise errors.BadConfig(path, [("line 1", f"must hold keys and values, not {_kind(value)}")])
    source.tree = value
    return source


def scalar(text: str, option: str) -> Any:
    """The value of an option, by the rules of a file: ``1e-4``, ``true``, ``[1, 2]``, ``{a: 1}``, else the text itself."""
    try:
        return _parse(text, Source(option))
    except errors.BadConfig:
        # "a: b: c" or "[x" are no YAML, but fine as the value of an option that takes text
        return text


def _parse(text: str, source: Source) -> Any:
    loader = None
    try:
        loader = _Loader(text)  # refuses characters that YAML does not have
        node = loader.get_single_node()
        return None if node is None else _build(loader, node, (), source, frozenset())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise errors.BadConfig(source.name, [(where, f"is not YAML: {error.problem or error.context}")]) from None
    except yaml.YAMLError as error:
        raise errors.BadConfig(source.name, [("", f"is not YAML: {error}")]) from None
    finally:
        if loader is not None:
            loader.dispose()


def _build(loader: _Loader, node: yaml.Node, place: Place, source: Source, within: frozenset[int]) -> Any:
    """The node's value; notes the line of each key and item. ``within``: the nodes around it, against an alias to itself."""
    if id(node) in within:
        raise errors.BadConfig(source.name, [(_line(node), "holds an alias to itself")])
    within |= {id(node)}
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTIONS:
        raise errors.BadConfig(source.name, [(_line(node), f"the tag '{node.tag}' is not known")])
    if isinstance(node, yaml.MappingNode):
        _refuse_duplicates(loader, node, source)
        loader.flatten_mapping(node)  # "<<": merged keys come first, so the mapping's own win
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            source.origins[(*place, key)] = _line(key_node)
            built[key] = _build(loader, value_node, (*place, key), source, within)
        return built
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            source.origins[(*place, i)] = _line(item)
        return [_build(loader, item, (*place, i), source, within) for i, item in enumerate(node.value)]
    return loader.construct_object(node)


def _refuse_duplicates(loader: _Loader, node: yaml.MappingNode, source: Source) -> None:
    seen: dict[str, str] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise errors.BadConfig(source.name, [(_line(key_node), "a key must be a word")])
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = str(loader.construct_object(key_node))
        if key in seen:
            raise errors.BadConfig(source.name, [(_line(key_node), f"key '{key}' stands twice; the first is in {seen[key]}")])
        seen[key] = _line(key_node)


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"{value!r}"
