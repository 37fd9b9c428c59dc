"""What a chat template does not show, or does not know, is told: messages, thoughts, calls, tools and roles."""

from __future__ import annotations

import pytest

from twinkle_core.errors import NoLabels, TemplateError
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.testing import tokenizers as toys

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
LOOP = "{% for m in messages %}"


def says(role, content="x", **more):
    return {"role": role, "content": content, **more}


def tagged(old="", new=""):
    """A template with generation tags, and the same without them, both changed alike."""
    source = toys.CHATML_TAGGED.replace(old, new) if old else toys.CHATML_TAGGED
    bare = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return [ChatTemplate(toys.chatml_tokenizer(text)) for text in (source, bare)]


NO_SYSTEM = (LOOP, "{% for m in messages if m.role != 'system' %}")
NO_THOUGHT = (LOOP, LOOP + "{# reasoning_content #}")


@pytest.mark.parametrize(
    ("change", "messages", "told"),
    [
        (
            (),
            [TALK[0], says("assistant", "", tool_calls=[CALL]), says("tool", "sunny"), TALK[1]],
            r"1 \(assi.*tool call",
        ),
        ((), [TALK[0], says("assistant", None, tool_calls=[CALL]), says("tool", "sunny"), TALK[1]], r"1 \(assi.*tool call"),
        (NO_SYSTEM, [says("system", "IMPORTANT"), *TALK], r"message 0 \(system\).*leaves out its content"),
        (NO_THOUGHT, [TALK[0], says("assistant", "yo", reasoning_content="r")], r"message 1 \(assistant\).*its thought"),
    ],
)
def test_what_a_template_leaves_out_is_refused_with_its_tags_and_without(change, messages, told):
    """The same words from both ways to the labels."""
    texts = []
    for template in tagged(*change):
        with pytest.raises(TemplateError, match=told) as caught:
            template.encode({"messages": messages})
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_a_default_system_message_that_is_not_shown_is_refused():
    source = toys.CHATML_TAGGED.replace(*NO_SYSTEM)
    with pytest.raises(TemplateError, match=r"message 0 \(system\).*leaves out"):
        ChatTemplate(toys.chatml_tokenizer(source), default_system="be kind").encode({"messages": TALK})


def test_with_tags_old_thoughts_may_go_and_a_text_may_hold_the_marks():
    shows = "{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }}{% endif %}"
    template = tagged("{% generation %}", "{% generation %}" + shows)[0]
    talk = [TALK[0], says("assistant", "yo", reasoning_content="old"), says("user"), says("assistant", "go")]
    labels = template.encode({"messages": talk})["labels"]
    assert template.decode(labels) == "yo<|im_end|>go<|im_end|>"
    marks = [says("user", "qzTWNKzq00000z"), says("assistant", "qzTWNKzq00001z")]
    assert template.decode(template.encode({"messages": marks})["labels"]) == "qzTWNKzq00001z<|im_end|>"


def test_a_template_that_writes_two_texts_is_told_so():
    """What differs is said, and not that its places are too many or too few."""
    source = toys.CHATML_TAGGED.replace(LOOP, "{{ strftime_now('%f') }}" + LOOP)
    with pytest.raises(TemplateError, match="rendered twice, it writes two texts"):
        ChatTemplate(toys.chatml_tokenizer(source)).encode({"messages": TALK})


def test_with_tags_a_template_that_cuts_every_thought_shows_the_live_one():
    """Its places are those of the text in which the tag stands again."""
    source = toys.CHATML_TAGGED.replace(
        "{{ m['content'] }}<|im_end|>{%", "{{ m['content'].split('</think>')[-1] }}<|im_end|>{%"
    )
    source = source.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    template = ChatTemplate(toys.chatml_tokenizer(source))
    talk = [*TALK, says("user")]
    talk += [says("assistant", "<think>\nnew\n</think>\n\ngo"), says("tool"), says("assistant", "so")]
    row = template.encode({"messages": talk})
    assert template.decode(row["labels"]) == "yo<|im_end|><think>\nnew\n</think>\n\ngo<|im_end|>so<|im_end|>"


def test_tools_that_the_template_does_not_show_are_refused():
    for template in tagged():
        with pytest.raises(TemplateError, match=r"nothing of the row's 'tools' \(1\)[\s\S]*Remove 'tools'"):
            template.encode({"messages": TALK, "tools": TOOLS})
        assert template.encode({"messages": TALK, "tools": []}) == template.encode({"messages": TALK})
    shown = ChatTemplate(toys.thinking_tokenizer())
    assert "weather" in shown.decode(shown.encode({"messages": TALK, "tools": TOOLS})["input_ids"])


ALL = [toys.chatml_tokenizer, toys.headers_tokenizer, toys.next_role_tokenizer]


@pytest.mark.parametrize("tokenizer", ALL)
@pytest.mark.parametrize(
    ("role", "meant"),
    [("Assistant", "assistant"), ("ASSISTANT ", "assistant"), ("model", "assistant"), ("gpt", "assistant"), ("User", "user"),
     ("human", "user"), ("asistant", "assistant"), ("usr", "user"), ("sytem", "system")],
)  # fmt: skip
def test_a_mistyped_role_is_refused_with_the_one_that_was_meant(tokenizer, role, meant):
    template = ChatTemplate(tokenizer())
    with pytest.raises(TemplateError, match=rf"message 2 \({role}\): .*does not know the role.*Did you mean '{meant}'\?"):
        template.encode({"messages": [*TALK, says(role), *TALK]})
    with pytest.raises(TemplateError, match="Did you mean"):
        template.encode({"messages": [*TALK, says(role)]}, add_generation_prompt=True)


def test_a_role_of_no_meaning_is_refused_with_those_that_there_are():
    with pytest.raises(TemplateError, match=r"the role 'critic'\.\n    roles: system, user, assistant, tool"):
        ChatTemplate(toys.chatml_tokenizer()).encode({"messages": [says("critic"), *TALK]})


def when(condition):
    """A template that marks the messages for which the condition holds."""
    return toys.chatml_tokenizer(toys.CHATML.replace(LOOP, f"{LOOP}{{% if {condition} %}}!{{% endif %}}"))


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (lambda: toys.chatml_tokenizer(), "tool"),
        (lambda: toys.chatml_tokenizer(), "developer"),
        (lambda: toys.headers_tokenizer(), "ipython"),
        (lambda: toys.next_role_tokenizer(), "observation"),
        (lambda: when("m.role == 'latest_reminder'"), "latest_reminder"),
        (lambda: when("m.role[:6] == 'latest'"), "latest_reminder"),
        (lambda: when("m.role == 'human'"), "human"),
    ],
)  # fmt: skip
def test_roles_that_the_template_handles_are_taken(template, role):
    made = ChatTemplate(template())
    row = made.encode({"messages": [TALK[0], TALK[1], says(role, "5"), says("assistant", "go")]})
    assert "go" in made.decode(row["labels"]) and "5" not in made.decode(row["labels"])


def test_a_template_that_takes_another_word_for_assistant_does_not_leave_it_untrained():
    with pytest.raises(TemplateError, match="Did you mean 'assistant'"):
        ChatTemplate(when("m.role in ['assistant', 'model']")).encode({"messages": [TALK[0], says("model")]})


def test_a_plain_text_too_short_to_learn_from_is_told_as_such():
    template = ChatTemplate(toys.chatml_tokenizer(), use_chat_template=False)
    with pytest.raises(NoLabels, match=r"the text is 1 token long[\s\S]*'delete'"):
        template.encode({"text": ""})
    dropping = ChatTemplate(toys.chatml_tokenizer(), use_chat_template=False, truncation_strategy="delete")
    assert dropping.encode({"text": ""}) is None and dropping.dropped == 1
    assert template.encode({"text": "x"})["length"] == 2


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_half_a_character_is_refused(role):
    """JSON can spell a lone surrogate, in the arguments of a call too; no tokenizer takes it."""
    template = ChatTemplate(toys.chatml_tokenizer())
    messages = [{**message, "content": "smile \ud83d"} if message["role"] == role else message for message in TALK]
    with pytest.raises(TemplateError, match=r"half a character .*'.*smile \\ud83d"):
        template.encode({"messages": messages})


@pytest.mark.parametrize("text", ["[" * 100_000, '{"x": ' + "1" * 5000 + "}"])
def test_json_that_python_does_not_read_is_refused(text):
    """Nested too deep, and more digits than it takes."""
    template = ChatTemplate(toys.chatml_tokenizer())
    called = says("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": text}}])
    assert "the arguments of tool call 'f' are not JSON" in template.check({"messages": [TALK[0], called]})
    assert "not JSON" in template.check({"messages": TALK, "tools": text})


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (
            [
                {"role": "user", "content": "w?"},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "sun"},
            ],
            r"message 1 \(assistant\): the chat template leaves out its tool call",
        ),
        (
            [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, {"role": "user", "content": "q"}],
            r"message 1 \(developer\): the chat template leaves out its content",
        ),
    ],
)
def test_a_prompt_shows_all_that_was_said_or_is_refused(messages, told):
    """A policy would be asked, and trained by rewards, without what its rows say."""
    shows = toys.CHATML.replace("{{ m['content'] }}", "{{ m['content'] if m['role'] != 'developer' else '' }}")
    template = ChatTemplate(toys.chatml_tokenizer(shows))
    with pytest.raises(TemplateError, match=told):
        template.encode({"messages": messages}, add_generation_prompt=True)
    assert template.encode({"messages": messages[:1]}, add_generation_prompt=True)


def test_a_prompt_may_leave_out_old_thoughts_and_name_a_tool_twice():
    names = toys.CHATML.replace(
        "{{ m['content'] }}",
        "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function.name }} for {{ c.function.name }}{% endfor %}",
    )
    messages = [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
    ]
    assert ChatTemplate(toys.chatml_tokenizer(names)).encode({"messages": messages}, add_generation_prompt=True)
    old = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "p"},
    ]
    assert ChatTemplate(toys.thinking_tokenizer()).encode({"messages": old}, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]},
            r"message 0 \(assistant\): it holds a call that plain",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "audio", "audio": "y"}]}]},
            r"message 0 \(user\): it holds a part that plain text",
        ),
        ({"messages": [{"role": "user", "content": "hi there"}], "tools": [CALL]}, "shows nothing of the row's 'tools'"),
    ],
)
def test_plain_text_leaves_nothing_out(row, told):
    template = ChatTemplate(toys.chatml_tokenizer(), use_chat_template=False)
    with pytest.raises(TemplateError, match=told):
        template.encode(row)
    assert template.encode({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi there"}]}]})
