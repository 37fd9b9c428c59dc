"""That a template trains no message that is marked not to be (L2)."""

from __future__ import annotations

import copy
from typing import Any

from twinkle_core.errors import TwinkleError
from twinkle_core.isolation import attempt
from twinkle_core.testing.suites.spans import answered, row_of, rows_of, talk, trained_text
from twinkle_core.testing.suites.template_text import TemplateText
from twinkle_core.types import IGNORE_INDEX

#: marks of a message: it is not trained; it is; what says neither
_NO: tuple[dict[str, Any], ...] = ({"weight": 0}, {"loss": False}, {"train": False})
_YES: tuple[dict[str, Any], ...] = ({"weight": 1}, {"loss": True}, {"train": True})
_NEITHER: tuple[dict[str, Any], ...] = ({"weight": 0.5}, {"loss": "no"}, {"weight": 1, "train": False})
_READ = "twinkle_core.templates.messages.untrained reads the marks"


class TemplateMarks(TemplateText):
    """``weight``, ``loss`` and ``train`` of a message, which data sets of three forms have."""

    def test_a_marked_answer_is_not_trained(self, template: Any, conversations: Any) -> None:
        """With ``"weight": 0``, ``"loss": false`` or ``"train": false`` it has no label; all else is as it was."""
        conversation = max(conversations, key=lambda c: len(c["messages"]))
        *_, case = answered(template, [conversation])
        plain = row_of(template, {**conversation, "messages": case.messages})
        for turn, message in enumerate(case.messages):
            own = case.tokens(turn)
            if message["role"] != "assistant" or own is None or not any(case.trained[t] for t in own):
                continue
            first, last = own.start, own.stop  # with its end token, and a thought before it
            while first and case.trained[first - 1]:
                first -= 1
            while last < len(case.ids) and case.trained[last]:
                last += 1
            others = any(case.trained[t] for t in range(len(case.ids)) if not first <= t < last)
            for mark in _NO:
                messages = copy.deepcopy(list(case.messages))
                messages[turn] = {**messages[turn], **mark}
                got = attempt(lambda m=messages: rows_of(template.encode({**conversation, "messages": m})))  # type: ignore[misc]
                place = f"message {turn} of {len(messages)} is marked {mark}"
                if isinstance(got.error, TwinkleError) or (got.error is None and not got.value):
                    assert not others, f"{place}, and the conversation is refused ({got.why}), though others of it are trained"
                    continue
                assert got.error is None, f"{place}, and encode() fails: {got.why}"
                (row,) = got.value or [{}]
                assert list(row["input_ids"]) == case.ids, f"{place}, and the ids are others: a mark is not shown to the model"
                labels = [IGNORE_INDEX, *row["labels"][:-1]]
                wrong = [t for t in range(first, last) if labels[t] != IGNORE_INDEX]
                assert not wrong, f"{place}, and {case.shown(wrong)} of it is trained: {_READ}"
                before = [IGNORE_INDEX, *plain["labels"][:-1]]
                lost = [t for t in range(len(labels)) if not first <= t < last and labels[t] != before[t]]
                assert not lost, f"{place}, and the label of {case.shown(lost)}, which belongs to another message, is another"

    def test_a_mark_that_says_yes_changes_nothing(self, template: Any, conversations: Any) -> None:
        """``"weight": 1``, ``"loss": true`` and ``"train": true`` on an answer."""
        plain = row_of(template, conversations[0])
        for mark in _YES:
            messages = [{**m, **(mark if m["role"] == "assistant" else {})} for m in conversations[0]["messages"]]
            row = row_of(template, {**conversations[0], "messages": messages})
            same = list(row["input_ids"]) == list(plain["input_ids"]) and list(row["labels"]) == list(plain["labels"])
            assert same, (
                f"an answer marked {mark} is trained like one without a mark; {trained_text(template, row)!r} is trained, not "
                f"{trained_text(template, plain)!r}"
            )

    def test_marks_that_can_not_be_followed_are_refused(self, template: Any) -> None:
        """Half a weight, two that differ, one that asks for the user's words: nothing of it is passed over in silence."""
        told = talk(user="Who are you?", assistant="A model.")["messages"]
        for turn, mark in [*((1, mark) for mark in _NEITHER), *((0, mark) for mark in _YES)]:
            messages = [{**message, **(mark if turn == k else {})} for k, message in enumerate(told)]
            got = attempt(lambda m=messages: rows_of(template.encode({"messages": m})))  # type: ignore[misc]
            assert isinstance(got.error, TwinkleError), (
                f"a message of the {told[turn]['role']} marked {mark} gives {got.why or 'a row'}: raise "
                f"twinkle_core.errors.TemplateError ({_READ}, and refuses what they can't say)"
            )
