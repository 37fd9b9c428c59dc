"""The kinds of components, and when two spellings are one name (L0)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import lru_cache

from twinkle_core.errors import UnknownKind

#: entry-point group without ``twinkle.`` -> the kind as the API writes it
KINDS = {
    "models": "model",
    "losses": "loss",
    "metrics": "metric",
    "templates": "template",
    "patches": "patch",
    "processors": "processor",
    "optimizers": "optimizer",
    "schedulers": "scheduler",
    "runtimes": "runtime",
    "preprocessors": "preprocessor",
}
PLURAL = {singular: plural for plural, singular in KINDS.items()}
#: what a class of a kind may end in without being another name; a preprocessor's class is called ...Processor
SUFFIXES = {kind: (kind,) for kind in PLURAL} | {"preprocessor": ("preprocessor", "processor")}
#: kind -> module and class of its contract; kinds that are absent here have none (torch's optimizers, plain functions)
CONTRACTS = {
    "model": ("twinkle_core.contracts.model", "TwinkleModel"),
    "loss": ("twinkle_core.contracts.loss", "Loss"),
    "metric": ("twinkle_core.contracts.metric", "Metric"),
    "template": ("twinkle_core.contracts.template", "Template"),
    "patch": ("twinkle_core.contracts.patch", "Patch"),
    "processor": ("twinkle_core.contracts.processor", "Processor"),
    "runtime": ("twinkle_core.contracts.runtime", "Runtime"),
}
SHORTEST_BEGINNING = 3


def kind_of(word: str) -> str:
    """``'losses'`` or ``'loss'`` -> ``'loss'``.

    Raises:
        UnknownKind: neither the singular nor the plural of a kind.
    """
    kind = KINDS.get(word, word)
    if kind not in PLURAL:
        raise UnknownKind(word, closest(word, [*KINDS, *PLURAL]), sorted(KINDS))
    return kind


@lru_cache(maxsize=4096)
def fold(kind: str, name: str) -> str:
    """The key under which a name is compared: ``infonce InfoNCE info_nce InfonceLoss`` have one."""
    key = re.sub(r"[-_]", "", name).lower()
    if key in SUFFIXES[kind]:
        return key
    return next((key.removesuffix(suffix) for suffix in SUFFIXES[kind] if key.endswith(suffix)), key)


def unusable(name: object) -> str:
    """Why nobody could ask for a name: '/' parts it from a distribution, ':' makes it an import path. Empty for a good one."""
    if not isinstance(name, str) or not name.strip():
        return "a name is a text that is not empty"
    return next((f"a name holds no '{sign}'" for sign in "/:" if sign in name), "")


def normalise(distribution: str) -> str:
    """A distribution's name as the package index compares it: ``Acme_Losses`` -> ``acme-losses``."""
    return re.sub(r"[-_.]+", "-", distribution).strip().lower()


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, whatever its case: the most similar one, or the only one that begins so."""
    by_key: dict[str, str] = {}
    for k in known:
        by_key.setdefault(k.lower(), k)
    wanted = word.lower()
    near = difflib.get_close_matches(wanted, by_key, 1, 0.6)
    longer = [key for key in by_key if key.startswith(wanted)] if len(wanted) >= SHORTEST_BEGINNING else []
    if near:
        return by_key[near[0]]
    return by_key[longer[0]] if len(longer) == 1 else None
