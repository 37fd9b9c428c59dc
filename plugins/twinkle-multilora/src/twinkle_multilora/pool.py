"""Who holds which slot. Names alone: no tensor, no backend."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass

from peft import LoraConfig

from twinkle_core.errors import BadAdapter, DuplicateAdapter, SlotsFull, UnknownAdapter
from twinkle_core.names import closest
from twinkle_core.train import limits

#: what slots are called, and tenants therefore not
_SLOT = re.compile(r"lora_\d+")


@dataclass
class LoraTenant:
    """A slot, and who holds it."""

    index: int  # 0 to max_loras - 1
    adapter_name: str  # the slot's own name, "lora_0"
    config: LoraConfig  # what it was allocated for (rank max_r)
    tenant_adapter_name: str | None = None  # the tenant's name; None: free
    tenant_config: LoraConfig | None = None  # the tenant's own config; None: free


class SlotPool:
    """A fixed number of slots, given out in order of their index.

    Args:
        max_loras: how many.
        config: what each is allocated for; ``config.r`` is the highest rank of a tenant.

    Raises:
        BadArgument
    """

    def __init__(self, max_loras: int, config: LoraConfig) -> None:
        limits.check_count("max_loras", max_loras, least=1)
        limits.check_count("max_r", config.r, least=1)
        self.max_r: int = config.r
        self.slots = [LoraTenant(i, f"lora_{i}", copy.deepcopy(config)) for i in range(max_loras)]
        self._held: dict[str, LoraTenant] = {}  # by tenant, in order of arrival

    @property
    def names(self) -> list[str]:
        """Tenants in order of arrival."""
        return list(self._held)

    @property
    def free(self) -> int:
        """How many slots nobody holds."""
        return len(self.slots) - len(self._held)

    def known_as(self, name: str) -> str:
        """The tenant that holds the slot of this name; any other name as it is."""
        held = (slot.tenant_adapter_name for slot in self.slots if slot.adapter_name == name)
        return next(held, None) or name

    def of(self, tenant: str) -> LoraTenant:
        """The slot that a tenant holds.

        Raises:
            UnknownAdapter
        """
        slot = self._held.get(tenant)
        if slot is None:
            raise UnknownAdapter(tenant, closest(tenant, self.names), self.names)
        return slot

    def check_new(self, tenant: str) -> None:
        """Whether a tenant of this name may come.

        Raises:
            BadAdapter: the name belongs to a slot. DuplicateAdapter, SlotsFull.
        """
        if _SLOT.fullmatch(tenant):
            raise BadAdapter(tenant, "'lora_' and a number is what slots are called; choose another name")
        if tenant in self._held:
            raise DuplicateAdapter(tenant)
        if not self.free:
            raise SlotsFull(tenant, len(self.slots), self.names)

    def next_free(self) -> LoraTenant:
        """The slot that the next tenant gets."""
        return next(slot for slot in self.slots if slot.tenant_adapter_name is None)

    def take(self, slot: LoraTenant, tenant: str, config: LoraConfig) -> None:
        """Note who holds a slot."""
        slot.tenant_adapter_name, slot.tenant_config = tenant, config
        self._held[tenant] = slot

    def give_back(self, tenant: str) -> None:
        """A tenant's slot is free again."""
        slot = self._held.pop(tenant)
        slot.tenant_adapter_name = slot.tenant_config = None
