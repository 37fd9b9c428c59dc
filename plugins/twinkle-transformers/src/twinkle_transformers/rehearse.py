"""What peft would make of a config, found out on a copy of the model's tree before the model is touched."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.utils import get_peft_model_state_dict

from twinkle_core.errors import BadAdapter
from twinkle_core.ops.sharded import is_sharded
from twinkle_transformers.precision import Precision
from twinkle_transformers.tree import Reads, plain_parameters

#: What peft raises for a config that it can't inject.
_REFUSALS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, AssertionError, ImportError, NotImplementedError)


class Tree(PeftModel):  # type: ignore[misc]
    """peft's view of a model. It is never called; it knows the tuner, the configs and the keys."""

    def prepare_model_for_gradient_checkpointing(self, model: Any) -> Any:
        """Nothing: only the re-entrant kind, which isn't used here, needs embeddings that require gradients."""
        return model


@dataclass(frozen=True, slots=True)
class Trial:
    """A config put into a copy of a tree.

    ``tree``: peft's view of the copy. ``tensors``: the adapter's, under PEFT's keys. ``reads``: the base model's parameters
    whose values the adapter begins from.
    """

    tree: Any
    tensors: dict[str, torch.Tensor]
    reads: list[str]


def inject(copied: Any, inner: str, config: PeftConfig, *, weightless: bool) -> Trial:
    """Put a config into a copy of a tree: a plain one, or one that peft has adapters in.

    Args:
        copied: the copy (``tree.skeleton``).
        inner: what peft is to call the adapter.
        config: it is copied, since peft fills in what it finds.
        weightless: make shapes without storage.
    """
    config = copy.deepcopy(config)
    module = copied.get_base_model() if isinstance(copied, PeftModel) else copied
    with Reads(plain_parameters(module)) as reads:
        if isinstance(copied, PeftModel):
            copied.add_adapter(inner, config, low_cpu_mem_usage=weightless)
        else:
            copied = Tree(copied, config, inner, low_cpu_mem_usage=weightless)
    tensors = get_peft_model_state_dict(copied, adapter_name=inner, save_embedding_layers=False)
    return Trial(copied, tensors, sorted(reads.found))


@contextmanager
def refusals(name: str, model: str) -> Iterator[None]:
    """What peft raises inside is a BadAdapter that says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except _REFUSALS as error:
            raise BadAdapter(name, f"peft can't add it to {model}: {error}") from error


def rehearse(name: str, copied: Callable[[bool], Any], inner: str, config: PeftConfig, model: str) -> Trial:
    """Inject into a copy without weights. No random number is drawn.

    Args:
        name: the adapter, for error texts; ``model``: the class of the model.
        copied: gives a copy of the tree; its argument is whether it is to be without storage.

    Raises:
        BadAdapter: peft refuses it.
    """
    # numbers that a rehearsal draws must not be missing afterwards: the same seed gives the same adapter as in plain peft
    with refusals(name, model), torch.random.fork_rng(devices=[]):
        try:
            return inject(copied(True), inner, config, weightless=True)
        except NotImplementedError:  # a method whose layers look at the base weights' values (SHiRA's mask)
            return inject(copied(False), inner, config, weightless=False)


def check_not_rounded(name: str, reads: Mapping[str, torch.nn.Parameter], precision: Precision) -> None:
    """Raise BadAdapter if the adapter would begin from values that are not those of the checkpoint any more."""
    if apart := [key for key, p in reads.items() if is_sharded(p)]:
        raise BadAdapter(
            name, f"it begins from values of {apart[0]}, which lie apart on several ranks; take an adapter that does not"
        )
    narrowed = precision.narrowed
    lost = [key for key, p in reads.items() if p in narrowed and narrowed[p].rounded]
    if lost:
        shown, mixed = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else ""), precision.mixed
        why = f"it begins from values of {shown}, which are not as stored but rounded to {mixed}, for another adapter"
        way = "add such adapters (modules_to_save, DoRA, trainable tokens) before the first forward"
        raise BadAdapter(name, f"{why}; {way}, or load the model with mixed_precision='no'")
