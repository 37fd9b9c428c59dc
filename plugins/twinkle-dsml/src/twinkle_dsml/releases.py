"""What differs between releases, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from twinkle_core.errors import TemplateError
from twinkle_dsml.tokens import ASSISTANT, BOS, DSML, EOS, SYSTEM, TASKS, THINK, THINK_END, USER

_ABSOLUTE_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and "
    "rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem "
    "into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than "
    "any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no "
    "assumption remains unchecked and no error remains undiscovered.\n\n"
)
_NUMBER = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


@dataclass(frozen=True)
class Tags:
    """How a release spells its markup. ``block``, ``invoke`` and ``parameter`` are what follows ``｜DSML｜`` in a tag."""

    block: str
    invoke: str = "invoke"
    parameter: str = "parameter"

    def opened(self, name: str) -> str:
        """The beginning of an opening tag."""
        return f"<{DSML}{name}"

    def closed(self, name: str) -> str:
        """The beginning of a closing tag."""
        return f"</{DSML}{name}"

    def call_example(self, *, name: str, second: str) -> list[str]:
        """The lines of the example with which a tools text begins."""
        return [
            f"{self.opened(self.block)}>",
            f'{self.opened(self.invoke)} name="${name}">',
            f'{self.opened(self.parameter)} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
            f"{self.closed(self.parameter)}>",
            "...",
            f"{self.closed(self.invoke)}>",
            f'{self.opened(self.invoke)} name="${second}">',
            "...",
            f"{self.closed(self.invoke)}>",
            f"{self.closed(self.block)}>",
        ]


def _v4_tools(tags: Tags) -> tuple[str, str]:
    lines = [
        "## Tools",
        "",
        "You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "
        f'"{tags.opened(tags.block)}>" block like the following:',
        "",
        *tags.call_example(name="TOOL_NAME", second="TOOL_NAME2"),
        "",
        'String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, '
        'objects), pass the value in JSON format and set `string="false"`.',
        "",
        f"If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside "
        f"{THINK}...{THINK_END} BEFORE any tool calls or final response.",
        "",
        f"Otherwise, output directly after {THINK_END} with tool calls or final response.",
        "",
        "### Available Tool Schemas",
        "",
        "",
    ]
    footer = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
    return "\n".join(lines), footer


def _v32_tools(tags: Tags) -> tuple[str, str]:
    lines = [
        "## Tools",
        "",
        "You have access to a set of tools you can use to answer the user's question.",
        f'You can invoke functions by writing a "{tags.opened(tags.block)}>" block like the following as part of your reply to '
        "the user:",
        *tags.call_example(name="FUNCTION_NAME", second="FUNCTION_NAME2"),
        "",
        "String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should "
        'use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other '
        "types (numbers, booleans, arrays, objects).",
        "",
        "If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking "
        "block. Here is an example:",
        "",
        f"{tags.opened(tags.block)}>",
        "...",
        f"{tags.closed(tags.block)}>",
        "",
        "<function_results>",
        "...",
        "</function_results>",
        "",
        f"{THINK}...thinking about results{THINK_END}",
        "",
        "Here are the functions available in JSONSchema format:",
        "<functions>",
        "",
    ]
    return "\n".join(lines), "\n</functions>\n"


_SINGLE = (BOS, EOS, USER, ASSISTANT, THINK, THINK_END)


@dataclass(frozen=True)
class Release:
    """One release's format.

    * ``layout``: how turns follow one another; ``render.LAYOUTS`` has them.
    * ``tools``: what stands before and after the schemas.
    * ``efforts``: value of ``reasoning_effort`` -> text; ``effort_number``: the text for a number from 1 to 100;
      ``default_effort``: what no value means.
    * ``single``: what must be one token each.
    * ``system_mark``: written before a system message.
    * ``roles``: of messages; ``tasks``: what ``task`` of a message may be, and the token that it writes.
    * ``answered``: roles after which the assistant's header is written, and ``answers``: roles before which it is. With
      ``assistant`` among the answered, every message of the assistant has a header, the first of all too.
    """

    name: str
    tags: Tags
    tools: tuple[str, str]
    layout: Literal["v4", "v3.2"] = "v4"
    efforts: Mapping[str, str] = field(default_factory=dict)
    effort_number: str | None = None
    default_effort: str | None = None
    single: tuple[str, ...] = (*_SINGLE, DSML)
    system_mark: str = ""
    roles: frozenset[str] = frozenset({"system", "user", "assistant", "tool", "developer", "latest_reminder"})
    tasks: Mapping[str, str] = field(default_factory=lambda: TASKS)
    answered: frozenset[str] = frozenset({"user", "developer"})
    answers: frozenset[str] = frozenset({"assistant", "latest_reminder"})

    def effort(self, value: str | int | None) -> str:
        """The text of a reasoning effort, for thinking mode.

        Raises:
            TemplateError: the release has no such effort.
        """
        value = self.default_effort if value is None else value
        if value is None:
            return ""
        if self.effort_number and isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 100:
            return self.effort_number.format(value)
        if not isinstance(value, str) or value not in self.efforts:
            known = ", ".join(map(repr, self.efforts)) or "no reasoning effort at all"
            more = " or a number from 1 to 100" if self.effort_number else ""
            raise TemplateError.argument("reasoning_effort", value, f"release {self.name} has {known}{more}")
        return self.efforts[value]


_V4, _V41, _V32 = Tags("tool_calls"), Tags(" calls", " invoke", " parameter"), Tags("function_calls")

RELEASES: Mapping[str, Release] = {
    release.name: release
    for release in (
        Release("v4-preview", _V4, _v4_tools(_V4), efforts={"high": "", "max": _ABSOLUTE_MAXIMUM}),
        Release(
            "v4-0731",
            _V4,
            _v4_tools(_V4),
            efforts={"low": "", "high": _ABSOLUTE_MAXIMUM, "xhigh": _ABSOLUTE_MAXIMUM, "max": _BEYOND_MAXIMUM},
            default_effort="high",
        ),
        Release(
            "v4.1",
            _V41,
            _v4_tools(_V41),
            efforts={name: _NUMBER.format(n) for name, n in {"low": 50, "high": 75, "xhigh": 75, "max": 100}.items()},
            effort_number=_NUMBER,
            default_effort="high",
            single=(*_SINGLE, DSML, SYSTEM),
            system_mark=SYSTEM,
            answered=frozenset({"user", "developer", "latest_reminder", "system", "assistant"}),
            answers=frozenset({"assistant"}),
        ),
        Release(
            "v3.2",
            _V32,
            _v32_tools(_V32),
            layout="v3.2",
            single=_SINGLE,
            roles=frozenset({"system", "user", "assistant", "tool", "developer"}),
            tasks={},
        ),
    )
}


def get(name: str) -> Release:
    """The release of a name.

    Raises:
        TemplateError: there is none; the text lists those there are.
    """
    if not isinstance(name, str) or name not in RELEASES:
        raise TemplateError.argument("release", name, f"one of {', '.join(map(repr, RELEASES))}")
    return RELEASES[name]
