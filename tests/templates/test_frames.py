"""Models that write a thought and an answer between tokens of their own, in place of ``<think>``."""

from __future__ import annotations

import pytest

from twinkle_core.data.preprocessors import MessagesProcessor, ShareGPTProcessor
from twinkle_core.errors import TemplateError
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.testing import tokenizers as toys

CHANNELS = (  # as gpt-oss: the last answer alone has its thought, and the token with which the model stops
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.last and not add_generation_prompt %}"
    "{% if m.thinking is defined %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
COMMAND = (  # as Command R7B: a thought before a call only, and the next prompt written whether asked for or not
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>{% if m.tool_calls %}"
    "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_ACTION|>[\n"
    '{% for call in m.tool_calls %}    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.function.name }}", '
    "\"parameters\": {{ call.function.arguments | tojson }}}{{ '' if loop.last else ',' }}\n{% endfor %}]<|END_ACTION|>"
    "{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
    "{% else %}<|{{ m.role | upper }}_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
)
BEGUN = (  # the prompt begins the thought
    "{% for m in messages %}{% if m.role == 'assistant' %}<|bot|><|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>"
    "<|START_TEXT|>{{ m.content }}<|END_TEXT|>{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}<|END|>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|><|START_THINKING|>{% endif %}"
)
ONE_END = (  # one token ends thoughts and turns
    "{% for m in messages %}<|begin|>{{ m.role }}{% if m.reasoning is defined %}<|think|>{{ m.reasoning }}<|end|>"
    "<|begin|>assistant{% endif %}<|content|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
)
OF_CHANNELS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"]
OF_COMMAND = [f"<|START_{word}|>" for word in ("THINKING", "ACTION", "RESPONSE", "OF_TURN_TOKEN")] + [
    *(f"<|END_{word}|>" for word in ("THINKING", "ACTION", "RESPONSE")),
    *(f"<|{role}_TOKEN|>" for role in ("CHATBOT", "USER", "SYSTEM")),
]
OF_BEGUN = ["<|bot|>", "<|user|>", *(f"<|{end}_{word}|>" for end in ("START", "END") for word in ("THINKING", "TEXT"))]


def channels(**options):
    return ChatTemplate(toys.chat_tokenizer(CHANNELS, OF_CHANNELS, eos="<|return|>"), **options)


def command(**options):
    return ChatTemplate(toys.chat_tokenizer(COMMAND, OF_COMMAND, bos="<BOS>", eos="<|END_OF_TURN_TOKEN|>"), **options)


def begun(**options):
    return ChatTemplate(toys.chat_tokenizer(BEGUN, OF_BEGUN, eos="<|END|>"), **options)


def one_end(**options):
    return ChatTemplate(toys.chat_tokenizer(ONE_END, ["<|begin|>", "<|think|>", "<|content|>"], eos="<|end|>"), **options)


def talk(*answers):
    messages = [m for k, a in enumerate(answers) for m in ({"role": "user", "content": f"q{k}"}, {"role": "assistant", **a})]
    return {"messages": messages}


def trained(template, conversation):
    """The text of each run of trained tokens."""
    runs, before = [], -100
    for label in template.encode(conversation)["labels"]:
        if label != -100:
            runs = runs if before != -100 else [*runs, []]
            runs[-1].append(label)
        before = label
    return [template.decode(run) for run in runs]


def completion(template, conversation):
    """What the model writes after the prompt of the last answer."""
    asked = template.render({**conversation, "messages": conversation["messages"][:-1]}, add_generation_prompt=True)
    text = template.render(conversation)
    assert text.startswith(asked)
    return text[len(asked) :]


THOUGHT = "<|channel|>analysis<|message|>r1<|end|><|start|>assistant"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_goes_to_its_channel(key):
    """An earlier one is left out by the model's template; the last is trained before its answer, under whichever key it is."""
    conversation = talk({"content": "yo", key: "r0"}, {"content": "go", key: "r1"})
    assert trained(channels(), conversation) == [
        "<|channel|>final<|message|>yo",
        f"{THOUGHT}<|channel|>final<|message|>go<|return|>",
    ]
    assert completion(channels(), conversation) == f"{THOUGHT}<|channel|>final<|message|>go<|return|>"
    assert trained(channels(enable_thinking=False), conversation)[1] == "<|channel|>final<|message|>go<|return|>"


def test_tags_of_a_thought_become_its_channel():
    row = channels().encode(talk({"content": "yo"}, {"content": "go", "reasoning_content": "r1"}))
    assert channels().encode(talk({"content": "yo"}, {"content": "<think>\nr1\n</think>\n\ngo"})) == row
    plain = channels().encode(talk({"content": "yo"}, {"content": "go"}))
    assert channels().encode(talk({"content": "yo"}, {"content": "<think>\n\n</think>\n\ngo"})) == plain


def test_a_token_that_ends_old_answers_only_is_not_trained():
    """The model stops with <|return|>; the <|end|> that stands for it later would teach it to go on."""
    assert trained(channels(), talk({"content": "a"}, {"content": "b"}, {"content": "c"})) == [
        "<|channel|>final<|message|>a",
        "<|channel|>final<|message|>b",
        "<|channel|>final<|message|>c<|return|>",
    ]


def test_two_thoughts_are_refused_and_the_same_one_twice_is_not():
    same = talk({"content": "yo", "reasoning_content": "r", "reasoning": "r"})
    assert channels().encode(same) == channels().encode(talk({"content": "yo", "thinking": "r"}))
    with pytest.raises(TemplateError, match="a thought twice, in 'reasoning_content' and in 'thinking'"):
        channels().encode(talk({"content": "yo", "reasoning_content": "r", "thinking": "s"}))
    with pytest.raises(TemplateError, match="a thought twice, in 'thinking' and as <think>"):
        channels().encode(talk({"content": "<think>s</think>yo", "thinking": "r"}))


def test_a_template_that_knows_no_thoughts_shows_one_of_any_key():
    """Under a key that the template does not read it would be lost in silence."""
    template = ChatTemplate(toys.chatml_tokenizer())
    row = template.encode(talk({"content": "yo", "reasoning_content": "r"}))
    assert "<think>\nr\n</think>" in template.decode(row["input_ids"])
    assert template.encode(talk({"content": "yo", "thinking": "r"})) == row
    row = ChatTemplate(toys.thinking_tokenizer()).encode(talk({"content": "yo", "reasoning_content": "r"}))
    assert ChatTemplate(toys.thinking_tokenizer()).encode(talk({"content": "yo", "reasoning": "r"})) == row


CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Bern", "days": [1, None]}}}


@pytest.mark.parametrize(
    ("build", "answer"),
    [
        (channels, {"content": "yo"}),
        (channels, {"content": "two\nlines", "reasoning_content": "r1\nr2"}),
        (command, {"content": "yo"}),
        (command, {"content": "", "tool_calls": [{"id": "0", **CALL}, {"id": "1", **CALL}]}),
        (command, {"content": "", "reasoning_content": "r", "tool_calls": [{"id": "0", **CALL}]}),
        (begun, {"content": "yo", "reasoning_content": "r"}),
        (one_end, {"content": "yo"}),
        (one_end, {"content": "yo", "reasoning_content": "r"}),
    ],
)
def test_what_is_rendered_is_read_back(build, answer):
    template = build()
    conversation = talk({"content": "before"} if build is not begun else answer, answer)
    assert template.parse(completion(template, conversation)) == {"role": "assistant", **answer}


@pytest.mark.parametrize(
    ("build", "text", "message"),
    [
        (channels, "<|channel|>analysis<|message|>cut off", {"content": "", "reasoning_content": "cut off"}),
        (
            channels,
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final<|message|>c",
            {"content": "c", "reasoning_content": "a\nb"},
        ),
        (channels, "plain <|channel|> text", {"content": "plain <|channel|> text"}),
        (
            command,
            "<|START_THINKING|>r<|END_THINKING|><|START_RESPONSE|>yo<|END_RESPONSE|><|END_OF_TURN_TOKEN|>x",
            {"content": "yo", "reasoning_content": "r"},
        ),
        (command, "<|START_RESPONSE|>cut", {"content": "cut"}),
        (command, "<|START_ACTION|>[{}]<|END_ACTION|>", {"content": "<|START_ACTION|>[{}]<|END_ACTION|>"}),
        (command, '<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]', None),
        (begun, "cut", {"content": "", "reasoning_content": "cut"}),
        (one_end, "<|think|>r<|end|>", {"content": "", "reasoning_content": "r"}),
        (one_end, "<|content|>yo<|end|><|begin|>user", {"content": "yo"}),
    ],
)
def test_parse(build, text, message):
    template = build()
    assert template.parse(text) == {"role": "assistant", **(message or {"content": text})}


def test_a_thought_that_the_template_does_not_show_is_refused():
    with pytest.raises(TemplateError, match="leaves out its thought"):
        command().encode(talk({"content": "yo", "reasoning_content": "r"}))


@pytest.mark.parametrize("key", ["thinking", "reasoning"])
def test_preprocessors_keep_thoughts(key):
    answer = {"role": "assistant", "content": "yo", key: "r"}
    for made in (MessagesProcessor()({"messages": [answer]}), ShareGPTProcessor()({"conversations": [answer]})):
        assert made["messages"] == [answer]
