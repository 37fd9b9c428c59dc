"""Every first-party template against its suite; a component that is added is checked without a line here."""

from __future__ import annotations

from twinkle_core import registry
from twinkle_core.known import FIRST_PARTY
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.testing import TemplateSuite, compliance
from twinkle_core.testing.tokenizers import (
    CHATML_TAGGED,
    brackets_tokenizer,
    chatml_tokenizer,
    headers_tokenizer,
    next_role_tokenizer,
    thinking_tokenizer,
)

OWN = [entry for entry in registry.entries("template") if entry.dist in FIRST_PARTY]
CLASSES = {name: cls for dist in sorted({e.dist for e in OWN}) for name, cls in compliance(dist, "template").items()}
globals().update(CLASSES)


def test_none_is_forgotten():
    assert len(CLASSES) == len(OWN)


class TestThinking(TemplateSuite):
    """Thoughts and tools in the format."""

    component = ChatTemplate
    arguments = {"model_id": thinking_tokenizer(), "enable_thinking": False}


class TestHeaders(TemplateSuite):
    """Tokenizer and format both write the beginning token."""

    component = ChatTemplate
    arguments = {"model_id": headers_tokenizer()}
    keeps_edges = False


class TestBrackets(TemplateSuite):
    """No header before an answer; the system's words go before the last question."""

    component = ChatTemplate
    arguments = {"model_id": brackets_tokenizer()}
    keeps_edges = False


class TestThinkInPrompt(TemplateSuite):
    """The prompt begins the thought that the answer goes on with, so a bare answer is parsed as a thought."""

    component = ChatTemplate
    arguments = {"model_id": thinking_tokenizer(think_in_prompt=True)}
    parses = False


class TestNextRole(TemplateSuite):
    """No end token."""

    component = ChatTemplate
    arguments = {"model_id": next_role_tokenizer()}
    keeps_edges = False


class TestLastTurn(TemplateSuite):
    """Only what follows the last question is trained."""

    component = ChatTemplate
    arguments = {"model_id": chatml_tokenizer(CHATML_TAGGED), "train_on": "last"}
    trains_every_turn = False
