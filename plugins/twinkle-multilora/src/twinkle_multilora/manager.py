"""The tenants of one model: who comes, who goes, whose turn it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from twinkle_core.runtime.dispatch import remote_class, remote_function
from twinkle_multilora.pool import LoraTenant

if TYPE_CHECKING:
    from twinkle_core.train.verbs import SessionModel
    from twinkle_multilora.pool import SlotPool


@remote_class(execute="all")
class MultiLora:
    """Tenants and their slots. ``acquire_lora`` and ``release_lora`` are ``add_adapter_to_model`` and ``remove_adapter`` of the
    model: the slot and the training state go together, whichever is called.

    Args:
        model: whose tenants.
        pool: the slots of its store.
    """

    def __init__(self, model: SessionModel, pool: SlotPool) -> None:
        self._model, self._pool = model, pool

    @property
    def max_loras(self) -> int:
        """How many tenants there may be at once."""
        return len(self._pool.slots)

    @property
    def max_r(self) -> int:
        """The highest rank of a tenant."""
        return self._pool.max_r

    @property
    def free(self) -> int:
        """How many slots nobody holds."""
        return self._pool.free

    @remote_function(dispatch="all", collect="first")
    def tenants(self) -> list[LoraTenant]:
        """All slots in order, held or free: copies of what is noted about them."""
        with self._model.turns.local():
            return copy.deepcopy(self._pool.slots)

    @remote_function(dispatch="all", collect="first")
    def acquire_lora(self, name: str, config: Any, *, gradient_accumulation_steps: int | None = None) -> str:
        """A slot, and training state, for a new tenant.

        Args:
            name: the tenant's. ``lora_<n>`` is what slots are called.
            config: a peft ``LoraConfig``, or where an adapter is saved.

        Returns:
            The slot's name (``lora_0``). Verbs take it in place of the tenant's name, as long as the tenant holds the slot.

        Raises:
            SlotsFull, RankTooLarge (both RuntimeErrors), DuplicateAdapter, BadAdapter: nothing was changed.
        """
        with self._model.turns.of("add_adapter_to_model", name):
            self._model.add_adapter_to_model(name, config, gradient_accumulation_steps=gradient_accumulation_steps)
            return self._pool.of(name).adapter_name

    @remote_function(dispatch="all", collect="none")
    def release_lora(self, name: str) -> None:
        """A tenant goes, with weights, optimizer, scheduler, metrics and window; its slot is as it was in the beginning.

        Raises:
            UnknownAdapter
        """
        self._model.remove_adapter(name)

    @contextmanager
    def adapter(self, name: str, disable_lora: bool = False) -> Iterator[str]:
        """Inside, verbs of this thread that name no adapter mean this tenant. Gives the name of its slot.

        Args:
            disable_lora: the tenant's session over the base model alone; what trains is refused there.
        """
        with self._model.turns.local():
            slot = self._pool.of(self._pool.known_as(name))
        with self._model.adapter(name, disable_lora=disable_lora):
            yield slot.adapter_name
