"""Faults of templates, each caught by the test that is about it."""

from __future__ import annotations

import contextlib
import copy
import socket
import urllib.request

import pytest

from twinkle_core import IGNORE_INDEX
from twinkle_core.errors import NoLabels
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.testing import TemplateSuite


class Right(ChatTemplate):
    """What the others are changed from: each changes the rows that this one gives."""

    def changed(self, row):
        return row

    def encode(self, trajectory, **kwargs):
        made = super().encode(trajectory, **kwargs)
        return [self.changed(row) for row in made] if isinstance(made, list) else self.changed(made) if made else made


class TrainsTheUser(Right):
    """Labels everywhere."""

    def changed(self, row):
        if "labels" in row:
            row["labels"] = [*row["input_ids"][1:], IGNORE_INDEX]
        return row


class FindsByText(Right):
    """Trains every place where the words of the answer stand."""

    def encode(self, trajectory, **kwargs):
        row = super().encode(trajectory, **kwargs)
        if isinstance(row, dict) and "labels" in row:
            ids, words = row["input_ids"], trajectory["messages"][-1]["content"]
            wanted = self.tokenizer(words if isinstance(words, str) else "-")["input_ids"]
            for at in range(1, len(ids) - len(wanted) + 1):
                if ids[at : at + len(wanted)] == wanted:
                    row["labels"][at - 1 : at - 1 + len(wanted)] = wanted
        return row


class DoesNotShift(Right):
    def changed(self, row):
        if "labels" in row:
            row["labels"] = [IGNORE_INDEX, *row["labels"][:-1]]
        return row


class TrainsTheLastTurnOnly(Right):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, train_on="last")


class LosesAToken(Right):
    """The byte-pair in the middle."""

    def changed(self, row):
        half = len(row["input_ids"]) // 2
        return {k: v[:half] + v[half + 3 :] if isinstance(v, list) else v - 3 for k, v in row.items()}


class IgnoresTruncation(Right):
    def __init__(self, model_id, max_length=8192, truncation_strategy="raise"):
        super().__init__(model_id)


class CutsTheWrongSide(Right):
    def __init__(self, model_id, max_length=8192, truncation_strategy="raise"):
        other = {"left": "right", "right": "left"}
        super().__init__(
            model_id, max_length=max_length, truncation_strategy=other.get(truncation_strategy, truncation_strategy)
        )


class SplitLosesLabels(Right):
    """The last label of each piece."""

    def changed(self, row):
        if self.truncation_strategy == "split":
            row["labels"] = [*row["labels"][:-1], IGNORE_INDEX]
        return row


class Asks(Right):
    """A service that counts tokens; a failure is passed over."""

    def changed(self, row):
        with contextlib.suppress(OSError):
            urllib.request.urlopen("http://127.0.0.1:9/count", timeout=0.01).close()
        return row


class Connects(Right):
    def changed(self, row):
        with socket.socket() as s:
            s.connect_ex(("127.0.0.1", 9))
        return row


class Local(Right):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.postprocess = lambda text: text


class Writes(Right):
    """Puts a system message into the data set's own conversation."""

    def encode(self, trajectory, **kwargs):
        messages = trajectory["messages"]
        if isinstance(messages, list) and messages and messages[0].get("role") == "user":
            trajectory["messages"].insert(0, {"role": "system", "content": "Be kind."})
        return super().encode(trajectory, **kwargs)


class AnyStrategy(Right):
    """What it does not know is 'raise'."""

    def __init__(self, model_id, max_length=8192, truncation_strategy="raise"):
        known = ("raise", "left", "right", "split", "delete")
        super().__init__(
            model_id,
            max_length=max_length,
            truncation_strategy=truncation_strategy if truncation_strategy in known else "raise",
        )


class ParsesWithTheEnd(Right):
    """Leaves the end token in the message."""

    def parse(self, text):
        return {"role": "assistant", "content": text}


class RowsOfNothing(Right):
    """A question alone is a row without a label."""

    def encode(self, trajectory, **kwargs):
        try:
            return super().encode(trajectory, **kwargs)
        except NoLabels:
            row = super().encode(trajectory, add_generation_prompt=True)
            return {**row, "labels": [IGNORE_INDEX] * row["length"]}

    def check(self, trajectory):
        why = super().check(trajectory)
        return why if why is None or "-100" not in why else None


class ChecksNothing(Right):
    def check(self, trajectory):
        return None


class DecodesCleanly(Right):
    def decode(self, ids, **kwargs):
        return " ".join(super().decode(ids, **kwargs).split())


class TrainsPrompts(Right):
    def encode(self, trajectory, *, add_generation_prompt=False):
        row = super().encode(trajectory, add_generation_prompt=add_generation_prompt)
        return row | {"labels": row["input_ids"]} if add_generation_prompt else row


class NoParse(Right):
    def parse(self, text):
        return {"role": "assistant", "content": f"assistant: {text}"}


class NeverStops(Right):
    """The last label of each answer, its end token's, is taken away."""

    def changed(self, row):
        found = row.get("labels", [])
        for at, label in enumerate(found):
            if label == self.tokenizer.eos_token_id:
                found[at] = IGNORE_INDEX
        return row


class Moved(Right):
    """More is trained: the tokens before or after what is trained already, or some of the first message."""

    places = ()

    def changed(self, row):
        if labels := row.get("labels"):
            begins = [t for t in range(1, len(labels)) if labels[t] != IGNORE_INDEX and labels[t - 1] == IGNORE_INDEX]
            for at in self.places or [b - k for b in begins for k in (1, 2)]:
                labels[at] = row["input_ids"][at + 1]
        return row


class TrainsSomeOfTheUser(Moved):
    """Not the whole of the first message, so that it is not to be found as a text."""

    places = (5, 6, 7)


class TrainsTheHeader(Moved):
    """Starts two tokens before the answer."""


class TrainsTheUsersEnd(Right):
    """The end token of whoever wrote."""

    def changed(self, row):
        if labels := row.get("labels"):
            ids, end = row["input_ids"], self.tokenizer.eos_token_id
            row["labels"] = [end if follows == end else label for label, follows in zip(labels, [*ids[1:], 0], strict=True)]
        return row


class PromptsDiffer(Right):
    """A prompt without its last tokens, or with one too many."""

    cut, more = None, []

    def encode(self, trajectory, *, add_generation_prompt=False):
        row = super().encode(trajectory, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            row["input_ids"] = [*row["input_ids"][: self.cut], *self.more]
            row["length"] = len(row["input_ids"])
        return row


class PromptsWithoutTheHeader(PromptsDiffer):
    cut = -4


class PromptsThatEnd(PromptsDiffer):
    @property
    def more(self):
        return [self.tokenizer.eos_token_id]


class Changes(Right):
    """The conversation that is encoded is another one."""

    def said(self, messages):
        return messages

    def encode(self, trajectory, **kwargs):
        if isinstance(trajectory["messages"], list):
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                trajectory = {**trajectory, "messages": self.said(trajectory["messages"])}
        return super().encode(trajectory, **kwargs)


class Strips(Changes):
    def said(self, messages):
        return [{**m, "content": m["content"].strip()} for m in messages]


class DropsTools(Changes):
    def said(self, messages):
        return [m for m in messages if m["role"] != "tool"]


class ForgetsOldTurns(Changes):
    def said(self, messages):
        return messages[-4:] if len(messages) > 5 else messages


class ChecksTheShapeAlone(Right):
    def check(self, trajectory):
        return None if isinstance(trajectory["messages"], list) else "no list of messages"


class CutsWithALabel(Right):
    """A label of a token that was cut off, and another one at that."""

    def changed(self, row):
        if self.truncation_strategy in ("left", "right") and "labels" in row and row["labels"][-1] == IGNORE_INDEX:
            row["labels"][-1] = 5
        return row


class Sorts(Right):
    def batch_encode(self, trajectories, **kwargs):
        return super().batch_encode(sorted(trajectories, key=lambda t: len(str(t))), **kwargs)


UNKNOWN, PARSES = "test_an_unknown_strategy_is_refused", "test_parses_a_completion"


class LeavesOutWhatItRefuses(Right):
    def batch_encode(self, trajectories, **kwargs):
        return super().batch_encode([t for t in trajectories if self.check(t) is None], **kwargs)


class Spoken(Right):
    """What ``said`` makes of the messages is encoded."""

    def encode(self, trajectory, **kwargs):
        messages = trajectory["messages"]
        if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
            trajectory = {**trajectory, "messages": self.said(copy.deepcopy(messages))}
        return super().encode(trajectory, **kwargs)


class SaysNone(Spoken):
    def said(self, messages):
        return [{**m, "content": str(m.get("content"))} for m in messages]


class LeavesOutCalls(Spoken):
    def said(self, messages):
        return [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages]


class TheLastOfARoleSpeaks(Spoken):
    def said(self, messages):
        return [m for m, after in zip(messages, [*messages[1:], {}], strict=False) if m.get("role") != after.get("role")]


class FailsAsPythonDoes(Spoken):
    def said(self, messages):
        return [{**m, "content": m["content"]} for m in messages]


class ParsesNoSilence(Right):
    def parse(self, text):
        return super().parse(text[0] + text[1:])


class SaysTheWholeLength(Right):
    """Of the conversation, in each piece."""

    def encode(self, trajectory, **kwargs):
        rows = super().encode(trajectory, **kwargs)
        return [{**row, "length": sum(r["length"] for r in rows)} for row in rows] if isinstance(rows, list) else rows


class Marked(Right):
    """Its marks are others than they were given."""

    def encode(self, trajectory, **kwargs):
        messages = trajectory["messages"]
        if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
            trajectory = {**trajectory, "messages": [self.read(dict(m)) for m in messages]}
        return super().encode(trajectory, **kwargs)


class SeesNoMarks(Marked):
    def read(self, message):
        return {k: v for k, v in message.items() if k not in ("weight", "loss", "train")}


class SeesOneMark(Marked):
    """Of ms-swift's form."""

    def read(self, message):
        return {k: v for k, v in message.items() if k not in ("weight", "train")}


class RoundsMarks(Marked):
    """Half a weight is one, and of two marks the last counts."""

    def read(self, message):
        given = [message.pop(key) for key in ("weight", "loss", "train") if key in message]
        return {**message, **({"weight": int(bool(given[-1]))} if given and message["role"] == "assistant" else {})}


class TakesAMarkForNo(Marked):
    def read(self, message):
        return {k: False if k in ("weight", "loss", "train") else v for k, v in message.items()}


class KeepsTheMarkedEnd(Right):
    """Of a marked answer the words have no labels, and the end token has."""

    def encode(self, trajectory, **kwargs):
        row = super().encode(trajectory, **kwargs)
        if isinstance(row, dict) and "labels" in row and any(m.get("weight") == 0 for m in trajectory["messages"]):
            ids = row["input_ids"]
            ends = [t for t in range(len(ids) - 1) if ids[t + 1] == self.tokenizer.eos_token_id]
            for at in ends[1::2] if trajectory["messages"][0]["role"] == "user" else ends[2::2]:
                row["labels"][at] = self.tokenizer.eos_token_id
        return row


class ForgetsTheOthers(Right):
    """One mark, and nothing but the last answer is trained."""

    def encode(self, trajectory, **kwargs):
        row = super().encode(trajectory, **kwargs)
        if isinstance(row, dict) and "labels" in row and any("loss" in m for m in trajectory["messages"]):
            last = max(t for t, label in enumerate(row["labels"]) if label != IGNORE_INDEX)
            row["labels"][: last - 2] = [IGNORE_INDEX] * (last - 2)
        return row


class PromptsWithoutCalls(Right):
    """Training is held to what was said, prompts are not."""

    def encode(self, trajectory, *, add_generation_prompt=False):
        if add_generation_prompt:
            told = [{k: v for k, v in m.items() if k != "tool_calls"} for m in trajectory["messages"]]
            trajectory = {**trajectory, "messages": told}
        return super().encode(trajectory, add_generation_prompt=add_generation_prompt)


NO, YES, REFUSES = (
    "test_a_marked_answer_is_not_trained",
    "test_a_mark_that_says_yes_changes_nothing",
    "test_marks_that_can_not_be_followed_are_refused",
)
SAID = "test_what_is_said_is_shown_or_refused"


def test_the_right_one_passes(caught):
    assert caught(TemplateSuite, Right) == set(), caught.texts


@pytest.mark.parametrize(
    ("template", "tests"),
    [
        (
            TrainsTheUser,
            {
                "test_nobody_elses_words_are_trained",
                "test_nothing_between_messages_is_trained",
                "test_an_echo_is_trained_once",
                "test_a_prompt_is_how_the_row_begins",
                "test_truncation",
                NO,
            },
        ),
        (FindsByText, {"test_an_echo_is_trained_once", NO}),
        (DoesNotShift, {"test_labels_are_what_comes_next", "test_a_prompt_is_how_the_row_begins", "test_truncation"}),
        (TrainsTheLastTurnOnly, {"test_the_assistants_words_are_trained"}),
        (IgnoresTruncation, {"test_truncation", UNKNOWN}),
        (CutsTheWrongSide, {"test_truncation"}),
        (SplitLosesLabels, {"test_truncation"}),
        (Asks, {"test_needs_no_network"}),
        (Connects, {"test_needs_no_network"}),
        (Local, {"test_survives_pickling"}),
        (Writes, {"test_leaves_the_conversation_alone"}),
        (AnyStrategy, {UNKNOWN}),
        (ParsesWithTheEnd, {PARSES}),
        (RowsOfNothing, {"test_what_trains_nothing_is_refused"}),
        (ChecksNothing, {"test_check_says_what_encode_does"}),
        (TrainsPrompts, {"test_a_prompt_has_no_labels"}),
        (NoParse, {"test_parses_a_completion"}),
        (NeverStops, {"test_an_answer_ends_with_a_trained_token"}),
        (TrainsSomeOfTheUser, {"test_nobody_elses_words_are_trained", "test_truncation"}),
        (TrainsTheHeader, {"test_nothing_between_messages_is_trained", "test_a_prompt_is_how_the_row_begins"}),
        (TrainsTheUsersEnd, {"test_nothing_between_messages_is_trained", "test_a_prompt_is_how_the_row_begins", NO}),
        (PromptsWithoutTheHeader, {"test_a_prompt_is_how_the_row_begins", PARSES}),
        (PromptsThatEnd, {"test_nothing_between_messages_is_trained", "test_a_prompt_is_how_the_row_begins", PARSES}),
        (Strips, {"test_spaces_are_kept"}),
        (DropsTools, {"test_other_roles_are_shown_or_refused"}),
        (ChecksTheShapeAlone, {"test_check_says_what_encode_does"}),
        (CutsWithALabel, {"test_truncation"}),
        (LeavesOutWhatItRefuses, {"test_batches_are_single_rows"}),
        (SaysNone, {SAID}),
        (LeavesOutCalls, {SAID, "test_a_prompt_shows_what_was_said_or_is_refused"}),
        (TheLastOfARoleSpeaks, {SAID}),
        (FailsAsPythonDoes, {SAID, "test_check_says_what_encode_does"}),
        (ParsesNoSilence, {PARSES}),
        (SaysTheWholeLength, {"test_truncation"}),
        (Sorts, {"test_batches_are_single_rows"}),
        (PromptsWithoutCalls, {"test_a_prompt_shows_what_was_said_or_is_refused"}),
        (SeesNoMarks, {NO, REFUSES}),
        (SeesOneMark, {NO, REFUSES}),
        (RoundsMarks, {REFUSES}),
        (TakesAMarkForNo, {YES, REFUSES}),
        (KeepsTheMarkedEnd, {NO}),
        (ForgetsTheOthers, {NO, YES}),
    ],
)
def test_a_fault_is_caught_by_the_tests_about_it(caught, template, tests):
    assert caught(TemplateSuite, template) == tests, caught.texts


@pytest.mark.parametrize("template", [LosesAToken, DecodesCleanly, ForgetsOldTurns])
def test_a_template_that_changes_the_text_is_caught(caught, template):
    assert "test_decoding_gives_the_text_back" in caught(TemplateSuite, template)


def test_what_it_can_not_do_is_left_out(caught):
    assert caught(TemplateSuite, IgnoresTruncation, strategies=()) == set()
    assert "it has no strategy" in caught.left_out["test_truncation"]
    assert caught(TemplateSuite, NoParse, parses=False) == set()
    assert caught.left_out == {"test_parses_a_completion": "parses is off"}
