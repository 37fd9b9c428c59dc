"""The compliance suite of templates (L2)."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from twinkle_core.errors import TwinkleError
from twinkle_core.isolation import attempt, describe
from twinkle_core.testing.suites.base import capability
from twinkle_core.testing.suites.spans import answered, oddities, row_of, rows_of, talk, trained_text
from twinkle_core.testing.suites.template_marks import TemplateMarks
from twinkle_core.testing.tokenizers import chatml_tokenizer
from twinkle_core.types import IGNORE_INDEX, Trajectory

#: parameters of a constructor that are given an offline tokenizer where ``arguments`` says nothing
_TOKENIZER = ("model_id", "tokenizer")


class TemplateSuite(TemplateMarks):
    """Checks of a Template, with a small tokenizer that needs no hub.

    A constructor's parameter ``model_id`` or ``tokenizer`` is given that tokenizer; other values go into ``arguments``.

    Fixtures and methods to override:

    * ``template``: the object; what ``build()`` makes.
    * ``build(**options)``: a new template; ``options`` are ``max_length`` and ``truncation_strategy``.
    * ``conversations``: what it can encode: no two messages of one may hold the same text. The last message is the assistant's.

    Capabilities:

    * ``strategies``: the truncation strategies it takes.
    * ``trains_every_turn``: all of the assistant's turns are trained; else the last one at least.
    * ``trains_end``: a token after each answer is trained, by which the model stops.
    * ``keeps_edges``: spaces around a message's text are kept (several families' formats trim them).
    * ``parses``: ``parse`` gives back the text of a completion.
    """

    strategies: ClassVar[Sequence[str]] = ("raise", "left", "right", "split", "delete")
    trains_every_turn: ClassVar[bool] = True
    trains_end: ClassVar[bool] = True
    parses: ClassVar[bool] = True

    def given(self) -> Mapping[str, Any]:
        """``arguments``, and a tokenizer where the constructor takes one."""
        component = type(self).component
        wanted = [name for name in _parameters(component) if name in _TOKENIZER] if inspect.isclass(component) else []
        return {**{name: chatml_tokenizer() for name in wanted if name not in self.arguments}, **self.arguments}

    @pytest.fixture
    def template(self) -> Any:
        """The template to check."""
        return self.build()

    @pytest.fixture
    def subject(self, template: Any) -> Any:
        """The same, by the name that all suites know it by."""
        return template

    @pytest.fixture
    def conversations(self) -> Sequence[Trajectory]:
        """One turn, turns with a system's, many turns, other scripts, spaces, line breaks, signs of Markdown and JSON."""
        return [
            talk(user="Who are you, and who wrote you?", assistant="I am a small model that learns."),
            talk(
                system="Answer briefly.",
                user="What is the quick brown fox?",
                assistant="An animal in a sentence.",
                user2="And the lazy dog?",
                assistant2="It lies there, and is jumped over.",
            ),
            talk(
                user="One  of four,  spaced.",
                assistant="First  answer,  spaced.",
                user2="Second question",
                assistant2="Answer number two",
                user3="Third question",
                assistant3="Answer number three",
                user4="Fourth question",
                assistant4="The end of it",
            ),
            talk(user='你好？ {"a": [1, 2]}\n\n# Titel – größer', assistant="谢谢！ ✨\n```py\nx = 1\n```\nend."),
        ]

    def test_rows_are_whole(self, template: Any, conversations: Any) -> None:
        """``input_ids``, ``labels`` and ``length`` fit, and hold whole numbers."""
        for conversation in conversations:
            row = row_of(template, conversation)
            missing = sorted({"input_ids", "labels", "length"} - row.keys())
            assert not missing, f"a row lacks {', '.join(missing)}"
            ids, labels = list(row["input_ids"]), list(row["labels"])
            assert len(ids) == len(labels) == row["length"], f"{len(ids)} ids, {len(labels)} labels, length {row['length']}"
            assert all(isinstance(i, int) for i in [*ids, *labels]), "ids and labels are Python's whole numbers (use .tolist())"

    def test_labels_are_what_comes_next(self, template: Any, conversations: Any) -> None:
        """``labels[t]`` is the token after ``input_ids[t]``, or -100. The template shifts, once; losses do not."""
        for conversation in conversations:
            row = row_of(template, conversation)
            ids, labels = row["input_ids"], row["labels"]
            wrong = [t for t, y in enumerate(labels) if y != IGNORE_INDEX and (t + 1 == len(ids) or ids[t + 1] != y)]
            assert not wrong, (
                f"labels[{wrong[0]}] is {labels[wrong[0]]}, and the token after position {wrong[0]} is "
                f"{ids[wrong[0] + 1] if wrong[0] + 1 < len(ids) else 'not there'}: shift the targets by one, "
                "labels = [*targets[1:], -100]"
            )

    # ------------------------------------------------------------------------------------------------ what is trained

    def test_the_assistants_words_are_trained(self, template: Any, conversations: Any) -> None:
        """Every answer stands in the labels."""
        for number, conversation in enumerate(conversations):
            trained = trained_text(template, row_of(template, conversation))
            answers = [m["content"] for m in conversation["messages"] if m["role"] == "assistant"]
            for answer in answers if self.trains_every_turn else answers[-1:]:
                assert answer in trained, f"conversation {number}: {answer!r} is not in the labels, which hold {trained!r}"

    def test_nobody_elses_words_are_trained(self, template: Any, conversations: Any) -> None:
        """No label on what a user or system wrote, not on a token of it."""
        for case in answered(template, conversations):
            for turn, message in enumerate(case.messages):
                held = (case.tokens(turn) if message["role"] != "assistant" else None) or ()
                wrong = [t for t in held if case.trained[t]]
                assert not wrong, (
                    f"{case.place}: of the words of the {message['role']} in message {turn}, {case.shown(wrong)} is trained: "
                    "labels are -100 everywhere but on what the assistant wrote"
                )

    def test_nothing_between_messages_is_trained(self, template: Any, conversations: Any) -> None:
        """No header, and no end token of a user or system: a model does not write them. Its own end token it does."""
        for case in answered(template, conversations):
            turns = [case.tokens(turn) for turn in range(len(case.messages) - 1)]
            held = [tokens for tokens in turns if tokens is not None]
            others = [t for t, m in zip(turns, case.messages, strict=False) if t is not None and m["role"] != "assistant"]
            prompt = min(len(case.prompt), len(case.ids))
            between = [*range(min((h[0] for h in held), default=prompt)), *range(others[-1].stop if others else 0, prompt)]
            for mine, following in itertools.pairwise(held):
                if mine not in others:
                    after = [t for t in range(mine.stop, following[0]) if case.stops[t] > case.starts[t]]
                    between += [t for t in after if t > mine.stop and case.shown([t]).strip("'\\nrt ")]
            wrong = [t for t in between if case.trained[t]]
            assert not wrong, (
                f"{case.place}: {case.shown(wrong)} (token {wrong[0]}) is trained, and it belongs to no answer: headers and "
                "the end tokens of others are given, labels there are -100"
            )

    @capability("trains_end")
    def test_an_answer_ends_with_a_trained_token(self, template: Any, conversations: Any) -> None:
        """What follows the last word of an answer is trained, so that the model learns to stop."""
        for case in answered(template, conversations):
            answer = case.tokens(case.turn)
            if answer is None:
                continue
            assert answer.stop < len(case.ids), f"{case.place}: no token follows the answer, so none teaches the model to stop"
            end = case.ids[answer.stop]
            assert case.trained[answer.stop], (
                f"{case.place}: the token after it, {end} ({template.decode([end])!r}), is not trained: a model that never "
                "learns its end token does not stop"
            )

    def test_a_prompt_is_how_the_row_begins(self, template: Any, conversations: Any) -> None:
        """``add_generation_prompt=True`` is the row up to the answer: its header in it, no end token; training begins there."""
        for case in answered(template, conversations):
            assert case.text.startswith(case.prompt_text), (
                f"{case.place}: the prompt ends in {case.prompt_text[-30:]!r}, and the row goes on otherwise, after "
                f"{_common(case.text, case.prompt_text)[-30:]!r}: the model is asked what it was not trained for"
            )
            same = next((t for t, (a, b) in enumerate(zip(case.ids, case.prompt, strict=False)) if a != b), len(case.prompt))
            assert same >= len(case.prompt) - 1, f"{case.place}: token {same} of the prompt is another than in the row"
            last = next((m for m in range(case.turn - 1, -1, -1) if case.messages[m]["role"] != "assistant"), None)
            before = (case.tokens(last) if last is not None else None) or range(0)
            first = next((t for t in range(before.stop, len(case.ids)) if case.trained[t]), len(case.ids))
            assert first == len(case.prompt), (
                f"{case.place}: training begins at token {first}, and the prompt has {len(case.prompt)}: all that comes after "
                "the prompt is the model's to write, nothing before it"
            )

    def test_what_trains_nothing_is_refused(self, template: Any, conversations: Any) -> None:
        """A conversation without an answer makes no row to train on, and says so."""
        question = copy.deepcopy(conversations[0])
        question["messages"] = question["messages"][:-1]
        got = attempt(lambda: rows_of(template.encode(question)))
        assert isinstance(got.error, TwinkleError) or (got.error is None and not got.value), (
            f"a conversation without an answer gives {got.why or 'a row in which nothing is trained'}: raise "
            "twinkle_core.errors.NoLabels (truncate.to_rows does)"
        )

    def test_an_echo_is_trained_once(self, template: Any) -> None:
        """The same words from user and assistant: found by their place, not by searching for the text."""
        words = "The quick brown fox"
        trained = trained_text(template, row_of(template, talk(user=words, assistant=words)))
        assert trained.count(words) == 1, (
            f"user and assistant both say {words!r}, and it is trained {trained.count(words)} times: {trained!r}. Find the "
            "answer by its place in the conversation"
        )

    def test_a_prompt_has_no_labels(self, template: Any, conversations: Any) -> None:
        """``add_generation_prompt=True`` gives a row to go on from: the question in it, nothing trained."""
        conversation = copy.deepcopy(conversations[0])
        conversation["messages"] = conversation["messages"][:-1]
        row = template.encode(conversation, add_generation_prompt=True)
        assert all(label == IGNORE_INDEX for label in row.get("labels") or ()), "a generation prompt has labels"
        question, text = conversation["messages"][-1]["content"], template.decode(row["input_ids"])
        assert question in text, f"the prompt does not hold the question {question!r}: {text!r}"

    # ------------------------------------------------------------------------------------------------ too long

    @pytest.mark.parametrize("strategy", ["raise", "left", "right", "split", "delete"])
    def test_truncation(self, conversations: Any, strategy: str) -> None:
        """A row that is too long is refused, cut on its side, split without losing a label, or left out, as asked."""
        if strategy not in self.strategies:
            pytest.skip(f"it has no strategy '{strategy}'")
        conversation = max(conversations, key=lambda c: len(c["messages"][-1]["content"]))
        whole = row_of(self.build(), conversation)
        ids, labels, size = list(whole["input_ids"]), list(whole["labels"]), len(whole["input_ids"])
        fits = rows_of(self.build(max_length=size, truncation_strategy=strategy).encode(copy.deepcopy(conversation)))
        assert [r["input_ids"] for r in fits] == [ids], f"'{strategy}' changes a row of exactly max_length tokens"
        trained = [t for t, label in enumerate(labels) if label != IGNORE_INDEX]
        within = next((t for t in trained if t >= size // 2), size - 2) + 1  # a piece that ends within the answer
        limit = within if strategy == "split" else size - 3
        template = self.build(max_length=limit, truncation_strategy=strategy)
        got = attempt(lambda: template.encode(copy.deepcopy(conversation)))
        if strategy == "raise":
            assert isinstance(got.error, TwinkleError), (
                f"'raise' gives {got.why or 'a row'} for {size} tokens and max_length {limit}: "
                "raise twinkle_core.errors.RowTooLong"
            )
            return
        assert got.error is None, f"'{strategy}' fails on {size} tokens with max_length {limit}: {got.why}"
        rows = rows_of(got.value)
        too_long = [len(r["input_ids"]) for r in rows if len(r["input_ids"]) > limit]
        assert not too_long, f"'{strategy}' with max_length {limit} gives a row of {too_long[0] if too_long else 0} tokens"
        for number, row in enumerate(rows):
            sizes = [len(row["input_ids"]), len(row["labels"]), row["length"]]
            assert len(set(sizes)) == 1, (
                f"row {number} of '{strategy}' has {sizes[0]} ids, {sizes[1]} labels, length {sizes[2]}"
            )
        if strategy == "delete":
            assert not rows, "'delete' gives a row that is too long; return None"
        elif strategy == "split":
            _assert_split(rows, ids, labels)
        else:
            kept = slice(size - limit, size) if strategy == "left" else slice(0, limit)
            assert len(rows) == 1 and list(rows[0]["input_ids"]) == ids[kept], (
                f"'{strategy}' keeps the {'last' if strategy == 'left' else 'first'} {limit} tokens of {size}; it gives "
                f"{len(rows)} row(s) that begin {[list(r['input_ids'][:5]) for r in rows]}, not {ids[kept][:5]}"
            )
            left = list(rows[0]["labels"])
            same = left[:-1] == labels[kept][:-1] and left[-1] in (labels[kept][-1], IGNORE_INDEX)
            assert same, f"'{strategy}' cuts the labels otherwise than the ids"

    def test_an_unknown_strategy_is_refused(self) -> None:
        """By the constructor, before anything is cut in a way that nobody asked for."""
        if not self.strategies or not inspect.isclass(type(self).component):
            pytest.skip("it takes no strategy")
        refused = attempt(lambda: self.build(truncation_strategy="lfet"))
        assert refused.error is not None, (
            "truncation_strategy='lfet' is taken silently: call twinkle_core.templates.truncate.check_strategy in __init__"
        )

    # ------------------------------------------------------------------------------------------------ manners

    def test_needs_no_network(self, template: Any, conversations: Any) -> None:
        """After construction nothing is fetched: not by encode, decode, check or parse."""
        with _offline() as asked:
            for conversation in conversations:
                got = attempt(lambda c=conversation: template.decode(row_of(template, c)["input_ids"]))  # type: ignore[misc]
                assert not asked, f"encode() asks the network ({asked[0]}): load everything in the constructor"
                assert got.error is None, f"without a network encode() fails: {got.why}"
                template.check(conversation)
                template.parse(conversation["messages"][-1]["content"])
        assert not asked, f"check() or parse() asks the network ({asked[0]}): load everything in the constructor"

    def test_check_says_what_encode_does(self, template: Any, conversations: Any) -> None:
        """None for what can be encoded, the reason for what can't."""
        for number, conversation in enumerate(conversations):
            why = template.check(copy.deepcopy(conversation))
            assert why is None, f"check() refuses conversation {number}, which encode() takes: {why}"
        nonsense: Any = {"messages": "no messages"}
        refused = attempt(lambda: template.encode(copy.deepcopy(nonsense)))
        assert isinstance(refused.error, TwinkleError), (
            f"encode({nonsense}) gives {refused.why or refused.value!r}: "
            "raise twinkle_core.errors.TemplateError, which names the place"
        )
        for odd in (nonsense, *oddities()):
            why = attempt(lambda odd=odd: template.encode(copy.deepcopy(odd))).error  # type: ignore[misc]
            told = attempt(lambda odd=odd: template.check(copy.deepcopy(odd)))  # type: ignore[misc]
            said = told.why or repr(told.value)
            if why is None:
                assert told.error is None and told.value is None, f"check({odd}) gives {said}; encode() takes it"
                continue
            assert isinstance(why, TwinkleError), (
                f"encode({odd}) fails with {describe(why)}: raise twinkle_core.errors.TemplateError, which names the message"
            )
            good = told.error is None and isinstance(told.value, str) and told.value
            assert good, f"check({odd}) gives {said}; it returns the text of encode's error: {why}"

    def test_batches_are_single_rows(self, template: Any, conversations: Any) -> None:
        """``batch_encode`` is ``encode`` of each, in order."""
        many = [*conversations, *conversations]
        together = template.batch_encode(copy.deepcopy(many))
        apart = [row for c in many for row in rows_of(template.encode(copy.deepcopy(c)))]
        assert [dict(r) for r in together] == [dict(r) for r in apart], "batch_encode() differs from encode() of each"
        nonsense: Any = {"messages": "no messages"}
        got = attempt(lambda: template.batch_encode([*copy.deepcopy(many), nonsense]))
        assert got.error is not None, (
            "batch_encode() leaves a conversation out that encode() refuses: let its error through, the data set counts and "
            "names what is left out"
        )

    def test_leaves_the_conversation_alone(self, template: Any, conversations: Any) -> None:
        """The data set's rows are encoded again in the next epoch, and give the same."""
        given = copy.deepcopy(conversations)
        first = [rows_of(template.encode(c)) for c in given]
        assert given == conversations, "encode() changes the conversation it is given: copy first"
        assert [rows_of(template.encode(c)) for c in given] == first, (
            "encode() of the same conversation differs the second time"
        )

    def test_survives_pickling(self, template: Any, conversations: Any) -> None:
        """Workers of a data set get it as a pickle."""
        copied = attempt(lambda: pickle.loads(pickle.dumps(template)))
        assert copied.value is not None, (
            f"it can't be pickled ({copied.why}): keep no lambda, local function, lock or file in it"
        )
        same = row_of(copied.value, conversations[0])["input_ids"] == row_of(template, conversations[0])["input_ids"]
        assert same, "its pickle encodes otherwise: what __init__ sets must be in its state"

    @capability("parses")
    def test_parses_a_completion(self, template: Any, conversations: Any) -> None:
        """A completion becomes the assistant's message, an empty one too."""
        nothing = attempt(lambda: template.parse(""))
        assert nothing.error is None and nothing.value is not None and nothing.value.get("role") == "assistant", (
            f"parse('') gives {nothing.why or nothing.value!r}: a model may say nothing; role 'assistant' and what there is"
        )
        answer = conversations[0]["messages"][-1]["content"]
        message = template.parse(answer)
        good = message.get("role") == "assistant" and message.get("content") == answer
        assert good, f"parse({answer!r}) gives {message!r}; it gives role 'assistant' and the text as content"
        case = next(answered(template, conversations))
        whole = template.decode(case.ids[len(case.prompt) :])  # as a sampler gives it that keeps the end token
        message = template.parse(whole)
        good = message.get("role") == "assistant" and message.get("content") == case.messages[case.turn]["content"]
        assert good, f"parse({whole!r}) gives {message!r}: take off what is written after an answer"


def _parameters(cls: type) -> list[str]:
    """Of its constructor, and where that passes keywords on, of the constructors before it."""
    found: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        found += [p.name for p in parameters]
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return found


def _common(a: str, b: str) -> str:
    return a[: next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _assert_split(rows: Sequence[Any], ids: list[int], labels: list[int]) -> None:
    wanted = sum(label != IGNORE_INDEX for label in labels)
    found = sum(label != IGNORE_INDEX for row in rows for label in row["labels"])
    assert found == wanted, (
        f"'split' keeps {found} of {wanted} labels: the last token of a piece predicts the first of the next"
    )
    at = 0
    for number, row in enumerate(rows):
        piece = list(row["input_ids"])
        starts = [s for s in range(at, len(ids) - len(piece) + 1) if ids[s : s + len(piece)] == piece]
        assert starts, f"piece {number} of 'split' is no consecutive part of the row, after the piece before it: {piece}"
        at = starts[0] + len(piece)


@contextlib.contextmanager
def _offline() -> Iterator[list[str]]:
    """Inside no connection can be made, nor a host's name be looked up; gives what was tried."""
    asked: list[str] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        asked.append(str(args[-1] if len(args) > 1 and not isinstance(args[0], str) else args[:2]))
        raise OSError("there is no network in this check")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
            patch.setattr(owner, name, refuse)
        patch.setattr(socket, "create_connection", refuse)
        yield asked
