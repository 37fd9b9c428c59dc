"""Marks of single messages that say whether they are trained, and what says a thing twice."""

from __future__ import annotations

import pytest

from twinkle_core.data.dataset import Dataset
from twinkle_core.data.preprocessors import ShareGPTProcessor
from twinkle_core.errors import NoLabels, TemplateError
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.testing import tokenizers as toys

FAMILIES = [
    toys.chatml_tokenizer(),
    toys.headers_tokenizer(),
    toys.brackets_tokenizer(),
    toys.next_role_tokenizer(),
    toys.thinking_tokenizer(),
]
NO = [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"train": False}, {"loss": 0, "train": None}]
ROLES = ("user", "assistant")
TALK = ("hi", "yo", "ok", "go", "so", "ha")


def talk(*marks):
    """Three rounds, whose answers have these marks."""
    return {
        "messages": [{"role": ROLES[k % 2], "content": text, **(marks[k // 2] if k % 2 else {})} for k, text in enumerate(TALK)]
    }


def runs(template, row):
    """The text of each run of trained tokens."""
    found, open_ = [], False
    for label in row["labels"]:
        if label == -100:
            open_ = False
        else:
            found = found if open_ else [*found, []]
            found[-1].append(label)
            open_ = True
    return [template.decode(run) for run in found]


@pytest.mark.parametrize("tokenizer", FAMILIES, ids=range(len(FAMILIES)))
@pytest.mark.parametrize("mark", NO, ids=str)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_marked_answer_is_shown_and_not_trained(tokenizer, mark, place):
    """The tokens are the same; of the labels one answer's are gone, the others' are as they were."""
    template = ChatTemplate(tokenizer, enable_thinking=False)
    marks = [{}, {}, {}]
    plain = template.encode(talk(*marks))
    marks[place] = mark
    row = template.encode(talk(*marks))
    assert row["input_ids"] == plain["input_ids"]
    every = runs(template, plain)
    assert len(every) == 3 and runs(template, row) == [run for k, run in enumerate(every) if k != place]
    assert all(label in (-100, before) for label, before in zip(row["labels"], plain["labels"], strict=True))


@pytest.mark.parametrize("mark", [{"weight": 1}, {"weight": 1.0}, {"loss": True}, {"train": True}, {"train": 1, "loss": None}])
def test_a_mark_that_says_yes_changes_nothing(mark):
    template = ChatTemplate(toys.chatml_tokenizer())
    assert template.encode(talk(mark, {}, mark)) == template.encode(talk({}, {}, {}))


def test_marks_and_train_on_agree():
    template = ChatTemplate(toys.chatml_tokenizer(), train_on="last")
    assert template.encode(talk({"weight": 0}, {}, {})) == template.encode(talk({}, {}, {}))
    with pytest.raises(NoLabels, match="every assistant turn that train_on asks for is marked not to be"):
        template.encode(talk({}, {}, {"weight": 0}))


def test_a_system_message_that_moves_leaves_marks_where_they_are():
    template = ChatTemplate(toys.brackets_tokenizer(), default_system="be brief")
    assert runs(template, template.encode(talk({"loss": False}, {}, {}))) == [" go</s>", " ha</s>"]


def test_generation_tags_follow_marks():
    tags = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(toys.chatml_tokenizer(), chat_template=tags)
    assert runs(template, template.encode(talk({}, {"train": False}, {}))) == ["yo<|im_end|>", "ha<|im_end|>"]


def test_a_template_that_writes_messages_out_does_not_show_marks():
    dumps = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for k in m if k not in ('role', 'content') %}"
        " {{ k }}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(toys.chatml_tokenizer(), chat_template=dumps)
    assert template.render(talk({"weight": 0}, {"loss": True}, {})) == template.render(talk({}, {}, {}))


def test_nothing_left_to_train_is_told_or_dropped():
    nothing = talk(*({"weight": 0} for _ in range(3)))
    with pytest.raises(NoLabels, match=r"marked not to be .'weight': 0"):
        ChatTemplate(toys.chatml_tokenizer()).encode(nothing)
    dropping = ChatTemplate(toys.chatml_tokenizer(), truncation_strategy="delete")
    assert dropping.encode(nothing) is None and dropping.dropped == 1


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            {"role": "assistant", "content": "yo", "weight": 0.5},
            "'weight' is 0.5; it says whether the message is trained, by 0",
        ),
        ({"role": "assistant", "content": "yo", "loss": "false"}, "'loss' is 'false'; it says"),
        (
            {"role": "assistant", "content": "yo", "weight": 1, "train": False},
            "trained, and not to be: 'weight': 1 and 'train'",
        ),
        ({"role": "user", "content": "yo", "train": True}, r"marked to be trained .'train'., and only the assistant's"),
        ({"role": "assistant", "content": "yo", "train_detail": [{"begin_offset": 0}]}, "'train_detail' marks parts of it"),
    ],
)
def test_marks_that_can_not_be_followed_are_refused(message, told):
    with pytest.raises(TemplateError, match=told) as caught:
        ChatTemplate(toys.chatml_tokenizer()).encode({"messages": [{"role": "user", "content": "hi"}, message]})
    assert caught.value.turn == 1


def test_plain_text_has_no_marks():
    plain = ChatTemplate(toys.chatml_tokenizer(), use_chat_template=False)
    assert plain.encode(talk({"weight": 1}, {}, {})) == plain.encode(talk({}, {}, {}))
    with pytest.raises(TemplateError, match=r"of plain text .use_chat_template=False. everything is"):
        plain.encode(talk({"weight": 0}, {}, {}))


@pytest.mark.parametrize("mark", NO, ids=str)
def test_preprocessors_keep_marks(mark):
    rows = [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo", **mark}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", **mark}]},
    ]
    for name, row in zip(("sharegpt", "messages"), rows, strict=True):
        dataset = Dataset([row])
        dataset.map(name)
        dataset.set_template("chat", model_id=toys.chatml_tokenizer())
        assert "marked not to be" in dataset.check()[0]
    calling = {"from": "function_call", "value": '{"name": "f", "arguments": {}}', **mark}
    (message,) = ShareGPTProcessor()({"conversations": [calling]})["messages"]
    assert {k: v for k, v in message.items() if k in mark} == {k: v for k, v in mark.items() if v is not None}


def test_a_thought_given_twice_is_refused():
    answer = {"role": "assistant", "content": "<think>A</think>x", "reasoning_content": "B"}
    asked = {"role": "user", "content": "hi"}
    for tokenizer in (toys.thinking_tokenizer(), toys.chatml_tokenizer()):
        template = ChatTemplate(tokenizer)
        with pytest.raises(TemplateError, match=r"message 1 .*a thought twice, in 'reasoning_content' and as <think>"):
            template.encode({"messages": [asked, answer]})
        for once in ({**answer, "content": "x"}, {**answer, "reasoning_content": " "}):
            assert template.encode({"messages": [asked, once]})
    empty = {**answer, "content": "<think>\n\n</think>\n\nx"}
    template = ChatTemplate(toys.thinking_tokenizer(), enable_thinking=False)
    assert template.encode({"messages": [asked, answer]}) == template.encode({"messages": [asked, empty]})
