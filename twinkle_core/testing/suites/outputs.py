"""Rows, batches and model outputs for the suites of losses and metrics (L2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from twinkle_core.errors import BadNeeds
from twinkle_core.processors.input import unpack
from twinkle_core.testing.engines import compute
from twinkle_core.testing.suites.base import Checks
from twinkle_core.testing.toys import TinyLM
from twinkle_core.train.losses import OF_CORE, check_needs
from twinkle_core.types import InputFeature, ModelOutput

#: outputs that an engine computes
COMPUTED = frozenset(
    ("logits", "logps", "entropies", "predictions", "hidden", "output_layer", "embeddings", "values", "aux_loss")
)


def tiny_lm(dtype: torch.dtype = torch.float64, seed: int = 0) -> TinyLM:
    """A model of 11 words whose outputs at a token depend on the tokens before it in its row, padded or packed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyLM().to(dtype)


class HiddenStates(torch.nn.Module):
    """The output layers of a TinyLM behind hidden states that are given: gradients stop where outputs begin."""

    def __init__(self, model: TinyLM, hidden: torch.Tensor) -> None:
        super().__init__()
        self.output_layer, self.value_head = model.output_layer, model.value_head
        self.hidden = hidden

    def forward(self, inputs: InputFeature) -> torch.Tensor:
        return self.hidden


def outputs_of(module: Any, inputs: InputFeature, needs: Iterable[str]) -> ModelOutput:
    """What an engine would hand over: the fields in ``needs``, ``embeddings`` (the mean over a row) and ``aux_loss`` too."""
    wanted = frozenset(needs) - OF_CORE
    output = compute(module, inputs, wanted - {"embeddings", "aux_loss"})
    if wanted & {"embeddings", "aux_loss"}:
        hidden = module(inputs)
        rows = torch.stack([row.mean(0) for row in unpack(inputs, hidden)])
        if "embeddings" in wanted:
            output.embeddings = torch.nn.functional.normalize(rows, dim=-1)
        if "aux_loss" in wanted:
            output.aux_loss = rows.square().mean()
    return output


def needs_a_set(suite: Checks, component: Any) -> None:
    """Raise BadNeeds, once, where ``needs`` is no set of names."""
    needs: Any = getattr(component, "needs", frozenset())
    try:
        check_needs(getattr(component, "__name__", type(component).__name__), needs, known=needs)
    except BadNeeds as error:
        raise suite.unusable(error) from None


class Watched(ModelOutput):
    """Outputs that note which fields were read, and which were asked for and not there. They answer as any others do."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        object.__setattr__(self, "read", set[str]())
        object.__setattr__(self, "asked", set[str]())

    def _note(self, key: Any) -> None:
        if dict.__contains__(self, key):
            self.__dict__["read"].add(key)
        elif key in ModelOutput.KEYS:
            self.__dict__["asked"].add(key)

    def _all(self) -> None:
        self.__dict__["read"].update(dict.keys(self))

    def __getattr__(self, key: str) -> Any:
        self._note(key)
        return super().__getattr__(key)

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __iter__(self) -> Any:  # and dict(outputs), {**outputs}, which are given a way of their own without it
        self._all()
        return super().__iter__()

    def keys(self) -> Any:
        self._all()
        return super().keys()

    def values(self) -> Any:
        self._all()
        return super().values()

    def items(self) -> Any:
        self._all()
        return super().items()
