"""Small real tokenizers with chat templates, for tests without a hub (L1). They are built in milliseconds.

The templates show the manners of families (who writes the beginning token, where thoughts go, how tools are written); they are
not any model's own file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_LINES = (
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "Who are you? I am a small language model, and I learn to answer questions.",
    "你好，我是一个小小的语言模型。谢谢你的问题！",
    '{"name": "weather", "arguments": {"city": "Bern", "days": 3}}',
    "system user assistant tool\n\n",
)

#: How text is cut before merging: words with one sign before them, digits alone, line breaks together.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TOY_T = (
    "<bos>{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %} <a>"
    "{% if m.get('reasoning_content') and loop.index0 > ns.last %} <think> {{ m['reasoning_content'] }} </think>{% endif %}"
    "{% else %} <u>{% endif %} {{ m['content'] }} <e>"
    "{% endfor %}{% if add_generation_prompt %} <a>{% endif %}"
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CHATML_TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Thoughts after the last question only; tool results in a user's turn; the empty pair when thinking is off.
_THINKING = """
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' and not (m.content is string and m.content.startswith('<tool_response>')) -%}
{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' -%}
{%- set content = m.content if m.content is string else '' -%}
{%- set thought = '' -%}
{%- if m.reasoning_content is string -%}{%- set thought = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought or EVERY) -%}
{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else -%}{{ content }}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{ '\n' if (loop.first and content) or not loop.first else '' }}
{%- set call = call.function if call.function else call -%}
{{ '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}
{%- else -%}{{ PROMPT }}{%- endif -%}{%- endif -%}
"""

CHATML_THINKING = _THINKING.replace("EVERY", "false").replace("PROMPT", "''")
CHATML_THINK_IN_PROMPT = _THINKING.replace("EVERY", "true").replace("PROMPT", r"'<think>\n'")

HEADERS = (  # trims, writes the beginning token itself; tool results quoted
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}' }}"
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

BRACKETS = (  # no role for system: before the last user's text; no header before an answer
    "{{ bos_token }}{% set ns = namespace(system='', last=-1) %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ ns.system if loop.index0 == ns.last else '' }}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)

NEXT_ROLE = (  # no end token: the next role's token ends a turn
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def toy_t_tokenizer(add_bos: bool = False, words: Sequence[str] = ("hi", "yo", "ok", "go", "r1", "r2")) -> Any:
    """Word-level: ``<u> text <e>``, ``<a> [<think> thought </think>] text <e>``, thoughts after the last user turn only.

    Args:
        add_bos: whether the tokenizer itself puts ``<bos>`` before each text, as many do.
        words: the vocabulary beside the tags; others are ``<unk>``.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tags = ("<unk>", "<pad>", "<bos>", "<e>", "<u>", "<a>", "<think>", "</think>")
    vocabulary = {word: index for index, word in enumerate((*tags, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    return _wrap(tokenizer, TOY_T, "<bos>", "<e>", "<pad>", ["<u>", "<a>"])


def chat_tokenizer(
    chat_template: str | None = CHATML,
    special: Sequence[str] = ("<|im_start|>", "<|endoftext|>"),
    bos: str | None = None,
    eos: str = "<|im_end|>",
    add_bos: bool = False,
) -> Any:
    """Byte-level BPE of a few hundred tokens: any text survives encoding and decoding.

    Args:
        chat_template: one of this module's, or another; None: a base model's tokenizer.
        special: tokens never cut, beside ``bos`` and ``eos``.
        add_bos: whether the tokenizer itself puts ``bos`` before each text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [*special, eos, *([bos] if bos else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES * 4, trainer)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    if add_bos and bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return _wrap(tokenizer, chat_template, bos, eos, special[-1] if special else eos, [s for s in special if s != eos])


def chatml_tokenizer(chat_template: str = CHATML) -> Any:
    """ChatML: ``<|im_start|>role⏎text<|im_end|>⏎``, no beginning token."""
    return chat_tokenizer(chat_template)


def thinking_tokenizer(think_in_prompt: bool = False) -> Any:
    """ChatML with thoughts and tools; ``think_in_prompt``: the generation prompt begins the thought."""
    return chat_tokenizer(CHATML_THINK_IN_PROMPT if think_in_prompt else CHATML_THINKING)


def headers_tokenizer() -> Any:
    """``<|start_header_id|>role<|end_header_id|>⏎⏎text<|eot_id|>``; template and tokenizer both write the beginning token."""
    tokens = ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
    return chat_tokenizer(HEADERS, tokens, bos="<|begin_of_text|>", eos="<|eot_id|>", add_bos=True)


def brackets_tokenizer() -> Any:
    """``[INST] question[/INST] answer</s>``."""
    return chat_tokenizer(BRACKETS, ("[INST]", "[/INST]", "<pad>"), bos="<s>", eos="</s>", add_bos=True)


def next_role_tokenizer() -> Any:
    """``<|user|>⏎question<|assistant|>⏎answer<|user|>…``: no end token."""
    tokens = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    return chat_tokenizer(NEXT_ROLE, tokens, eos="<|endoftext|>")


def _wrap(tokenizer: Any, chat_template: str | None, bos: str | None, eos: str, pad: str, more: Sequence[str]) -> Any:
    import transformers

    names: dict[str, Any] = {"eos_token": eos, "pad_token": pad}
    if bos:
        names["bos_token"] = bos
    cls: Any = transformers.PreTrainedTokenizerFast
    made = cls(tokenizer_object=tokenizer, extra_special_tokens=list(more), **names)
    made.chat_template = chat_template
    return made
