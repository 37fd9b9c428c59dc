"""Whose weights and whose dropout: tenants' LoRA adapters in slots beside Megatron's layers. Megatron is imported here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig

from twinkle_core.contracts.adapters import BASE
from twinkle_core.contracts.engine import Batch, LossFn
from twinkle_core.ops.lora_linear import dropout_seed
from twinkle_core.train.prepare import check_length
from twinkle_core.train.session import Session
from twinkle_core.types import InputFeature, ModelOutput
from twinkle_multilora.backend import needed
from twinkle_multilora.layers import Draws
from twinkle_multilora.options import check_ranks, check_targets
from twinkle_multilora.pool import LoraTenant, SlotPool

if TYPE_CHECKING:
    from twinkle_megatron.adapters import MegatronAdapters
    from twinkle_megatron.cpu.runtime import RUNTIME
    from twinkle_megatron.draws import drawing_from
    from twinkle_megatron.engine import MegatronEngine
    from twinkle_megatron.load import Built
    from twinkle_megatron.parallel import Layout
    from twinkle_megatron.targets import checked, parts_of
else:
    MegatronAdapters = needed("twinkle_megatron.adapters", "megatron", "MultiLoraMegatronModel").MegatronAdapters
    _targets = needed("twinkle_megatron.targets", "megatron", "MultiLoraMegatronModel")
    checked, parts_of = _targets.checked, _targets.parts_of
    MegatronEngine = needed("twinkle_megatron.engine", "megatron", "MultiLoraMegatronModel").MegatronEngine
    RUNTIME = needed("twinkle_megatron.cpu.runtime", "megatron", "MultiLoraMegatronModel").RUNTIME
    drawing_from = needed("twinkle_megatron.draws", "megatron", "MultiLoraMegatronModel").drawing_from


class MegatronSlots(MegatronAdapters):
    """Up to ``max_loras`` adapters over one frozen model.

    Each target has room of rank ``max_r`` for every slot from the beginning on, before anything wraps the model. A tenant who
    comes gets a slot's room in the tenant's own rank, beside the tenant's own targets; what is over is given back until the
    slot is free again. Gradients and optimizer state are in buffers of the tenant's own (see ``MegatronEngine``), so that
    nobody's are reduced, decayed or saved with another's.

    At rest no adapter takes part, and nothing is trainable.

    Args:
        built, layout, changed, gone: see ``MegatronAdapters``.
        max_loras: how many tenants at once.
        max_r: the highest rank of each.
        target_modules: where slots are, as ``MegatronAdapters`` takes it.

    Raises:
        BadArgument, BadAdapter: no slots can be made of these.
    """

    def __init__(
        self,
        built: Built,
        layout: Layout,
        changed: Callable[[Mapping[str, Any]], None],
        gone: Callable[[Mapping[str, Any]], None],
        *,
        max_loras: int,
        max_r: int,
        target_modules: Any,
    ) -> None:
        super().__init__(built, layout, changed, gone)
        config = LoraConfig(r=max_r, target_modules=target_modules)
        self._planned = checked("lora_0", config, self.family, layout)
        self.pool = SlotPool(max_loras, self._plain(self._planned))
        self._active = BASE
        self._draws: dict[str, Draws] = {}  # by slot
        for parameter in self._base:
            parameter.requires_grad_(False)
        for slot in self.pool.slots:
            self._make_room(slot.adapter_name)

    # ------------------------------------------------------------------------------------------------ names

    def known_as(self, name: str) -> str:
        return self.pool.known_as(name)

    def slot(self, name: str) -> LoraTenant:
        """The slot of a tenant."""
        return self.pool.of(name)

    # ------------------------------------------------------------------------------------------------ acquire, release

    def acquire(self, name: str, config: Any) -> str:
        """A tenant's adapter in the first free slot. Returns the slot's name.

        Raises:
            DuplicateAdapter, SlotsFull, RankTooLarge. BadAdapter: the name, or an option that slots can't serve. What reading
            a folder raises. Nothing was changed.
        """
        slot = self.pool.next_free() if self.pool.free else None
        super().acquire(name, config)
        assert slot is not None
        self.pool.take(slot, name, self._plain(self._configs[name]))
        return slot.adapter_name

    def release(self, name: str) -> None:
        self.pool.of(name)
        super().release(name)
        self.pool.give_back(name)

    def check_new(self, name: str) -> None:
        self.pool.check_new(name)

    def check_room(self, name: str, config: LoraConfig) -> None:
        check_ranks(name, config, self.pool.max_r)
        check_targets(name, parts_of(config, self.layers), parts_of(self._planned, self.layers))

    def next_place(self) -> str:
        return self.pool.next_free().adapter_name

    def inject(self, inner: str, config: LoraConfig) -> None:
        """The slot's room becomes what the tenant's config says."""
        super().eject(inner)
        super().inject(inner, config)
        self._rest()

    def eject(self, inner: str) -> None:
        """The slot is room again: nothing of a tenant stays."""
        super().eject(inner)
        self._draws.pop(inner, None)
        self._make_room(inner)

    def _make_room(self, inner: str) -> None:
        super().inject(inner, copy.deepcopy(self._planned))
        self._rest()

    def _rest(self) -> None:
        for layer in self._layers():
            layer._disable_adapters = True
            for parameter in (*layer.lora_A.parameters(), *layer.lora_B.parameters()):
                parameter.requires_grad_(False)

    def start(self, name: str, seed: int) -> None:
        super().start(name, seed)
        self._draws[self._inner[name]] = Draws(dropout_seed(name, seed))

    # ------------------------------------------------------------------------------------------------ activate

    @contextmanager
    def activate(self, name: str) -> Iterator[None]:
        found = self._active
        with super().activate(name):
            self._active = name
            try:
                yield
            finally:
                self._active = found

    @contextmanager
    def drawing(self, train: bool, device: torch.device) -> Iterator[Any]:
        """Inside, a training pass of the active tenant draws random numbers of the tenant's own: a function of the tenant, of
        which of its passes it is, and of the rank. Gives what they are drawn from, or None: it is no tenant's training. The
        process's are as they were afterwards, and a pass that fails is none.
        """
        draws = self._draws.get(self._inner.get(self._active, "")) if train else None
        if draws is None:
            yield None
            return
        draws.passes += 1
        try:
            with RUNTIME.active(), drawing_from(self.layout, dropout_seed(draws.seed, draws.passes) >> 16, device) as own:
                yield own
        except BaseException:
            draws.passes -= 1
            raise

    def training_state(self, name: str) -> dict[str, Any]:
        return {} if self._known(name) == BASE else asdict(self._draws[self._inner[name]])

    def load_training_state(self, name: str, state: Mapping[str, Any]) -> None:
        if name != BASE and {"seed", "passes"} <= state.keys():
            self._draws[self._inner[self._known(name)]] = Draws(state["seed"], state["passes"])

    # ------------------------------------------------------------------------------------------------ tensors

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Of a tenant: as ``MegatronAdapters`` names them, in the tenant's own rank. Of the base model: none, it is not
        trained."""
        return {} if self._known(name) == BASE else super().parameters(name)

    def _plain(self, config: LoraConfig) -> LoraConfig:
        """A config as PEFT would have it of the Hugging Face model."""
        config = copy.deepcopy(config)
        config.target_modules = parts_of(config, self.layers)
        return config

    def describe(self, name: str) -> dict[str, Any]:
        facts = super().describe(name)
        return {**facts, "slot": f"{self.slot(name).adapter_name} of {len(self.pool.slots)}"} if facts else facts


class MegatronSlotEngine(MegatronEngine):
    """MegatronEngine whose tenants' dropout is their own, and whose rows have a greatest length."""

    slots: MegatronSlots
    max_length: int

    def prepare(
        self,
        session: Session,
        rows: Sequence[InputFeature] | InputFeature,
        *,
        micro_batch_size: int | None = None,
        loss_args: Mapping[str, Any] | None = None,
    ) -> list[Batch]:
        check_length(rows, self.max_length)
        return super().prepare(session, rows, micro_batch_size=micro_batch_size, loss_args=loss_args)

    def run_schedule(
        self,
        batches: Sequence[Batch],
        needs: frozenset[str],
        loss_fn: LossFn,
        *,
        train: bool = True,
        sync: bool = True,
        temperature: float = 1.0,
        task: str = "causal_lm",
    ) -> None:
        with self._drawing(train):
            super().run_schedule(batches, needs, loss_fn, train=train, sync=sync, temperature=temperature, task=task)

    def forward(
        self, batch: Batch, needs: frozenset[str], *, train: bool, temperature: float = 1.0, task: str = "causal_lm"
    ) -> ModelOutput:
        with self._drawing(train):
            return super().forward(batch, needs, train=train, temperature=temperature, task=task)

    @contextmanager
    def _drawing(self, train: bool) -> Iterator[None]:
        found = self.draws
        with self.slots.drawing(train, self.device) as own:
            self.draws = own or found
            try:
                yield
            finally:
                self.draws = found

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "passes": "tenants take turns (in Megatron a pass is of one adapter)",
        }
