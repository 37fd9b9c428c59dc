"""Errors of templates and processors (L0)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from twinkle_core.errors.base import TwinkleError, listed, meant, shown


class TemplateError(TwinkleError, ValueError):
    """A conversation that can't be encoded rightly. ``turn``: index of the message at fault, if it is one's."""

    turn: int | None = None

    @classmethod
    def at(cls, turn: int, role: object, cause: str) -> TemplateError:
        error = cls(f"message {turn} ({role}): {cause}")
        error.turn = turn
        return error

    @classmethod
    def shape(cls, value: object) -> TemplateError:
        has = ", ".join(map(repr, value)) if isinstance(value, Mapping) else type(value).__name__
        if isinstance(value, Mapping) and "messages" in value:
            has = f"'messages', which is {value['messages']!r:.80}"
        return cls(f"a conversation needs 'messages', a list of at least one message; this one has {has or 'nothing'}.")

    @classmethod
    def rendering(cls, cause: object) -> TemplateError:
        return cls(f"the model's chat template refuses this conversation: {cause}")

    @classmethod
    def role(cls, turn: int, role: str, near: str | None, known: Iterable[str]) -> TemplateError:
        return cls.at(
            turn,
            role,
            f"the model's chat template does not know the role {role!r}.{meant(near)}\n"
            f"    roles: {listed(known)}, and what the template handles by name; only 'assistant' is trained",
        )

    @classmethod
    def tools(cls, count: int) -> TemplateError:
        return cls(
            f"the model's chat template shows nothing of the row's 'tools' ({count}); the model would learn to call what "
            f"it does not see.\n    Remove 'tools' from the rows, or give a template that shows them as chat_template=…"
        )

    @classmethod
    def unseen(cls, field: str, count: int) -> TemplateError:
        return cls(
            f"the row has {count} {field}, which this template does not show to the model.\n"
            f"    For images and videos take template 'vision' and a model that sees; else remove '{field}' from the rows."
        )

    @classmethod
    def plain_marks(cls) -> TemplateError:
        return cls(
            "a message is marked not to be trained, and of plain text (use_chat_template=False) everything is.\n"
            "    Remove the message or its mark ('weight', 'loss', 'train')."
        )

    @classmethod
    def plain_part(cls, turn: int, role: str, what: str) -> TemplateError:
        way = (
            f"it holds {what} that plain text (use_chat_template=False) has no place for. Remove it, or give the row as 'text'"
        )
        return cls.at(turn, role, way)

    @classmethod
    def prompt(cls) -> TemplateError:
        return cls("add_generation_prompt is for a conversation that waits for an answer; this one ends with the assistant.")

    @classmethod
    def strategy(cls, value: object, choices: Iterable[str]) -> TemplateError:
        return cls(f"truncation_strategy={value!r} is none of {', '.join(map(repr, choices))}.")

    @classmethod
    def argument(cls, name: str, value: object, way: str) -> TemplateError:
        return cls(f"{name}={value!r}: {way}.")

    @classmethod
    def tokenizer(cls, name: object, cause: object) -> TemplateError:
        return cls(f"no tokenizer could be loaded from {name}: {cause}")

    @classmethod
    def unreadable(cls, turn: int, field: str) -> TemplateError:
        way = f"read back, it has another {field!r}: its text holds signs of the format, which nothing escapes"
        return cls.at(turn, "assistant", way)

    @classmethod
    def tokens(cls, name: object, missing: Iterable[str], release: str) -> TemplateError:
        return cls(
            f"the tokenizer of {name} has no single token for {', '.join(missing)}, which {release} writes.\n"
            f"    Take a tokenizer of that release's checkpoints, or the release that fits the tokenizer."
        )

    @classmethod
    def half_character(cls, text: str) -> TemplateError:
        return cls(
            f"the conversation holds half a character (a lone surrogate), which is no text: ...{text!a}... Repair or drop it."
        )

    @classmethod
    def old_call(cls, turn: int, role: str) -> TemplateError:
        return cls.at(turn, role, "'function_call' is the old form of a call; write a list 'tool_calls'")

    @classmethod
    def slow(cls, name: object) -> TemplateError:
        return cls(f"the tokenizer of {name} gives no character offsets (it is no 'fast' one), so labels can't be placed.")


class NoChatTemplate(TemplateError):
    """A tokenizer of a base model."""

    def __init__(self, name: object) -> None:
        super().__init__(
            f"the tokenizer of {name} has no chat template (a base model?).\n"
            f"    Give one with chat_template=…, take an instruct model's, or train plain text with use_chat_template=False."
        )


class BadCompletion(TemplateError):
    """A completion that breaks its format. ``place``: the character at which it does, counted from 0."""

    place: int = 0

    @classmethod
    def at_character(cls, text: str, place: int, cause: str) -> BadCompletion:
        rest = text[place : place + 40]
        error = cls(f"character {place}: {cause}; there stands {rest!r}." if rest else f"character {place}, the end: {cause}.")
        error.place = place
        return error


class RowTooLong(TemplateError):
    """More tokens than ``max_length``, and the strategy is to say so."""

    def __init__(self, tokens: int, max_length: int, strategy: str) -> None:
        super().__init__(
            f"the row has {tokens} tokens, max_length is {max_length} (truncation_strategy={strategy!r}).\n"
            f"    Raise max_length, or choose 'left', 'right', 'split' or 'delete'."
        )


class NoLabels(TemplateError):
    """A row with nothing to learn from: it would reach the loss as an all -100 row."""

    @classmethod
    def untrained(cls) -> NoLabels:
        return cls("no token of the row is trained: the conversation has no assistant turn that train_on asks for.")

    @classmethod
    def marked(cls) -> NoLabels:
        return cls(
            "no token of the row is trained: every assistant turn that train_on asks for is marked not to be ('weight': 0, "
            "'loss': false or 'train': false).\n    Remove such rows, or drop them with truncation_strategy='delete'."
        )

    @classmethod
    def short(cls, tokens: int) -> NoLabels:
        return cls(
            f"the text is {tokens or 'no'} token{'s' if tokens != 1 else ''} long, and one token predicts another: there is "
            f"nothing to learn.\n    Remove such rows, or drop them with truncation_strategy='delete'."
        )

    @classmethod
    def cut(cls, tokens: int, max_length: int, strategy: str) -> NoLabels:
        return cls(
            f"no trained token is left after truncation_strategy={strategy!r} cut {tokens} tokens to max_length {max_length}.\n"
            f"    Raise max_length, cut the other side, or drop such rows with 'delete'."
        )


class BadRow(TwinkleError, ValueError):
    """An encoded row that can't be collated. ``row``: its number, where it is one row's fault; ``adapter``: whose it is, where
    rows of several were given."""

    adapter: str | None = None

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text if row is None else f"row {row}{text}")
        self.text, self.row = text, row

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text, self.row), self.__dict__

    def moved(self, by: int) -> BadRow:
        """The same of a row that has so many others before it."""
        if self.row is None or not by:
            return self
        made = type(self)(self.text, self.row + by)
        made.__dict__.update({**self.__dict__, "row": made.row})
        return made

    @classmethod
    def no_rows(cls) -> BadRow:
        return cls("an empty batch: there are no rows to collate.")

    @classmethod
    def kind(cls, row: int, value: object) -> BadRow:
        return cls(f" is a {type(value).__name__}, not a mapping with 'input_ids'.", row)

    @classmethod
    def missing(cls, row: int, field: str, has: Iterable[str]) -> BadRow:
        keys = list(has)
        raw = " It is a conversation that no template has encoded: call set_template first." if "messages" in keys else ""
        return cls(f" has no {field!r}; it has {', '.join(map(repr, keys)) or 'nothing'}.{raw}", row)

    @classmethod
    def field(cls, row: int, field: str, way: str) -> BadRow:
        return cls(f": {field!r} {way}.", row)

    @classmethod
    def length(cls, row: int, field: str, length: int, tokens: int) -> BadRow:
        return cls(f": {field!r} has {length} values, 'input_ids' has {tokens}; one value a token is needed.", row)

    @classmethod
    def argument(cls, name: str, value: object, way: str) -> BadRow:
        return cls(f"{name}={value!r}: {way}.")


class PatchOrder(TwinkleError, RuntimeError):
    """A patch that can't be undone yet: what it changed was changed again. ``later``: by what."""

    def __init__(self, patch: str, later: str) -> None:
        super().__init__(f"{patch} can't be undone: {later} stands on it.\n    Undo the later one first. Nothing was changed.")


class PatchRefused(TwinkleError, ValueError):
    """A patch that a model can't be given, or an argument of one. Nothing was changed."""

    @classmethod
    def of_model(cls, patch: str, model: str, why: str, way: str) -> PatchRefused:
        return cls(f"{patch} can't be applied to {model}: {why}.\n    {way}.")

    @classmethod
    def argument(cls, patch: str, name: str, value: object, way: str) -> PatchRefused:
        return cls(f"{patch}({name}={value!r}): it must be {way}.")


class BadMedia(TemplateError):
    """An image or a video of a conversation that can't be used as it is given."""

    @classmethod
    def here(cls, where: str, cause: str) -> BadMedia:
        return cls(f"{where}: {cause}.")

    @classmethod
    def missing(cls, where: str, path: str) -> BadMedia:
        return cls(f"{where}: there is no file '{shown(path)}'.\n    Relative paths count from the current folder.")

    @classmethod
    def remote(cls, where: str, address: str) -> BadMedia:
        return cls(
            f"{where}: '{shown(address)}' lies on a network, and encoding fetches nothing.\n"
            f"    Download it first, and give its path or its bytes."
        )

    @classmethod
    def unopened(cls, kind: str, where: str, source: object, cause: object) -> BadMedia:
        what = f"'{shown(source)}'" if isinstance(source, str) or hasattr(source, "__fspath__") else type(source).__name__
        return cls(f"{where}: {what} can't be read as {_ONE[kind]} ({shown(cause, 200)}).")

    @classmethod
    def kind(cls, kind: str, where: str, source: object) -> BadMedia:
        forms = "a path, the bytes of a file, or a PIL picture" if kind == "image" else "a path or a list of frames"
        what = "nothing" if source is None else f"a {type(source).__name__}"
        return cls(f"{where}: {what} is no {kind}; give {forms}.")

    @classmethod
    def beside(cls, key: str, value: object) -> BadMedia:
        return cls(f"'{key}' of a row is a list, one for each place in its messages, not a {type(value).__name__}.")

    @classmethod
    def count(cls, kind: str, key: str, mark: str, places: int, there: int) -> BadMedia:
        more = f"\n    For a text that means the word {mark}, give it as a part: [{{'type': 'text', 'text': …}}]."
        return cls(
            f"the messages have {places} place{'s' if places != 1 else ''} for {_ONE[kind]} ({mark}, or a part without a "
            f"source), and '{key}' has {there}.{more if places > there else ''}"
        )

    @classmethod
    def unsaid(cls, turn: int) -> BadMedia:
        return cls(f"message {turn} (assistant): it is an image or video without a text, so it has nothing to be trained.")

    @classmethod
    def token(cls, turn: int, role: object, token: str) -> BadMedia:
        return cls(
            f"message {turn} ({role}): its text holds {token}, which stands for the tokens of an image or video.\n"
            f"    Remove it from the text, and give the image or video as a part or with a placeholder."
        )

    @classmethod
    def shown_otherwise(cls, kind: str, there: int, given: int) -> BadMedia:
        return cls(f"the chat template shows {there} {kind}(s) of the {given} that the conversation has.")

    @classmethod
    def processor(cls, cause: object) -> BadMedia:
        return cls(f"the model's image processor refuses it: {shown(cause, 200)}.")

    @classmethod
    def no_places(cls, processor: str) -> BadMedia:
        return cls(
            f"{processor} does not say which characters it puts in place of an image, so labels can't be placed.\n"
            f"    It takes transformers 5.24 or newer, and a processor that replaces a token for each image or video."
        )

    @classmethod
    def no_times(cls, where: str) -> BadMedia:
        return cls(
            f"{where}: it has frames without 'fps', how many of them are shown in a second, and this model counts time.\n"
            f"    Give it beside the frames: {{'type': 'video', 'video': […], 'fps': 2}}."
        )

    @classmethod
    def no_split(cls, tokens: int, max_length: int) -> BadMedia:
        return cls(
            f"the row has {tokens} tokens, max_length is {max_length}, and truncation_strategy='split' does not cut rows with "
            f"images: later pieces would speak of what they don't show.\n"
            f"    Raise max_length, make images smaller, or choose 'left', 'right' or 'delete'."
        )

    @classmethod
    def no_processor(cls, name: object, cause: object) -> BadMedia:
        return cls(
            f"no processor of images could be loaded from {name}: {cause}\n    For a model of texts take template 'chat'."
        )


_ONE = {"image": "an image", "video": "a video"}
