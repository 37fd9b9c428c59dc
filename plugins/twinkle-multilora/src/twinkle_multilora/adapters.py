"""Whose weights: tenants' LoRA adapters in slots beside the linear layers of one frozen base model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer

from twinkle_core.contracts.adapters import BASE
from twinkle_core.errors import BadAdapter, FailedElsewhere
from twinkle_core.isolation import attempt
from twinkle_core.ops.lora_linear import dropout_seed
from twinkle_multilora.backend import needed
from twinkle_multilora.layers import Draws, Selection, SlotLinear, Span, Taking
from twinkle_multilora.options import check_options, check_ranks, check_targets
from twinkle_multilora.pool import LoraTenant, SlotPool

if TYPE_CHECKING:
    from twinkle_transformers import checkpoint, rehearse, rules, tree
    from twinkle_transformers.parallel import WORLD
    from twinkle_transformers.precision import Precision
    from twinkle_transformers.rehearse import Trial
    from twinkle_transformers.store import ModelStore
else:
    ModelStore = needed("twinkle_transformers.store", "transformers", "SlotAdapters").ModelStore
    checkpoint, rehearse, rules, tree = (
        needed(f"twinkle_transformers.{name}", "transformers", "SlotAdapters")
        for name in ("checkpoint", "rehearse", "rules", "tree")
    )
    WORLD = needed("twinkle_transformers.parallel", "transformers", "SlotAdapters").WORLD

#: what peft calls an adapter in the copies that configs are tried on
_INNER = "twinkle"
#: how PEFT's keys begin
_PREFIX = "base_model.model."


class SlotAdapters(ModelStore):
    """Up to ``max_loras`` adapters over one model whose tree never changes again.

    A layer with slots stands in for each target from the beginning on, before anything wraps the model. peft says what a
    tenant's config means (targets, patterns, scaling, the first weights and their random numbers) on a copy of the plain
    tree; what came out is then copied into a free slot. So a tenant begins as a fresh adapter of plain peft would, and its
    parameters have its own rank.

    The base model is frozen for good: it belongs to all tenants. At rest no adapter takes part. Switching to one sets one
    field, whatever the number of layers and tenants.

    Args:
        module: the model.
        precision, tokenizer: see ``ModelStore``.
        max_loras: how many tenants at once.
        max_r: the highest rank of each.
        target_modules: where slots are, as peft's ``LoraConfig`` takes it.

    Raises:
        BadArgument, BadAdapter: no slots can be made of these.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        precision: Precision | None = None,
        tokenizer: Callable[[], Any] = lambda: None,
        *,
        max_loras: int = 5,
        max_r: int = 32,
        target_modules: Any = "all-linear",
    ) -> None:
        super().__init__(module, precision, tokenizer)
        planned = LoraConfig(r=max_r, target_modules=target_modules)
        self.pool = SlotPool(max_loras, planned)
        self.selection = Selection()
        self.layers: dict[str, SlotLinear] = {}
        self._parameters: dict[str, dict[str, torch.nn.Parameter]] = {}  # by tenant
        self._draws: dict[int, Draws] = {}  # by slot
        first = self.pool.slots[0].adapter_name
        planned = rules.check_config(first, planned, module, [])
        copied = partial(tree.skeleton, module)
        places = self._places(first, rehearse.rehearse(first, copied, _INNER, planned, type(module).__name__))
        base = set(module.parameters())
        for number, (key, place) in enumerate(places.items()):
            sizes = (place.in_features, place.out_features)
            layer = SlotLinear(module.get_submodule(key), sizes, self.selection, max_loras, max_r, number)
            parent, _, child = key.rpartition(".")
            setattr(module.get_submodule(parent), child, layer)
            self.layers[key] = layer
        for parameter in base:
            parameter.requires_grad_(False)
        self.precision.freeze(base - self.kept_wide())

    # ------------------------------------------------------------------------------------------------ names

    def names(self) -> list[str]:
        return self.pool.names

    def known_as(self, name: str) -> str:
        return self.pool.known_as(name)

    def slot(self, name: str) -> LoraTenant:
        """The slot of a tenant."""
        return self.pool.of(name)

    def config(self, name: str) -> LoraConfig:
        return self.pool.of(name).tenant_config

    @property
    def rests(self) -> bool:
        return True

    # ------------------------------------------------------------------------------------------------ acquire, release

    def acquire(self, name: str, config: Any) -> str:
        """A tenant's adapter in the first free slot. Returns the slot's name. On several ranks: the same on all.

        Args:
            config: a ``LoraConfig``, or where an adapter is saved (a folder, ``ms://``, ``hf://``).

        Raises:
            DuplicateAdapter, SlotsFull, RankTooLarge. BadAdapter: the name, or an option that slots can't serve. What reading
            a folder raises. FailedElsewhere: another rank raised it. Nothing was changed.
        """
        made = self._together(name, lambda: self._acquire(name, config))
        return made.adapter_name

    def _together(self, name: str, acquire: Callable[[], LoraTenant]) -> LoraTenant:
        """Acquire on all ranks or on none, with the first weights, and the dropout, that rank 0 has."""
        meeting = self.layout.meeting if self.layout is not None else None
        if meeting is None or meeting.mesh.world_size == 1:
            return acquire()
        self.rest_shards()
        state = torch.get_rng_state()
        done = attempt(acquire)
        seed = self._draws[done.value.index].seed if done.value is not None else None
        told = meeting.gather_objects((seed, done.why), WORLD)
        failed = next((rank for rank, (_, why) in enumerate(told) if why), None)
        if failed is not None:
            if done.error is not None:
                raise done.error
            self.release(name)
            torch.set_rng_state(state)
            raise FailedElsewhere(f"to make adapter '{name}'", failed, told[failed][1])
        assert done.value is not None
        draws = self._draws[done.value.index]
        draws.seed, draws.rank = told[0][0], meeting.mesh.data_rank
        meeting.agree(self._parameters[name].values())
        return done.value

    def _acquire(self, name: str, config: Any) -> LoraTenant:
        rules.check_name(name)
        self.pool.check_new(name)
        state: dict[str, torch.Tensor] | None = None
        if isinstance(config, (str, Path)):
            config, state = self.from_folder(name, config)
        if isinstance(config, LoraConfig):
            check_options(name, config)  # first: another check may say how to mend what no slot serves
        config = rules.check_config(name, config, self.module, [])
        check_options(name, config)
        check_ranks(name, config, self.pool.max_r)
        with _unmoved():
            made = self._try_out(name, config, fresh=state is None)
            check_targets(name, self._places(name, made), self.layers)
            if state is not None:
                checkpoint.check_keys(made.tensors, state, f"adapter '{name}'")
        slot = self.pool.next_free()
        try:
            self._fill(name, slot, made, config)
            if state is not None:
                self.load_adapter(name, state)
        except BaseException:  # what no rehearsal shows, such as a device that is full
            self._empty(name, slot)
            raise
        self.pool.take(slot, name, config)
        return slot

    def release(self, name: str) -> None:
        slot = self.pool.of(name)
        self._empty(name, slot)
        self.pool.give_back(name)

    def _plain(self) -> Any:
        """A copy of the tree as it is without slots, over the same weights."""
        copied = tree.skeleton(self.module, weightless=False)
        tree.unwrap(copied)
        return copied

    def _try_out(self, name: str, config: LoraConfig, fresh: bool) -> Trial:
        """What plain peft would make of a config, numbers and all, on a copy of the tree that shares the base's weights.

        Args:
            fresh: whether its first numbers will be used.
        """
        base = tree.plain_parameters(self.module)
        state = torch.get_rng_state()
        reads: dict[str, torch.nn.Parameter] = {}
        with rehearse.refusals(name, type(self.module).__name__):
            with self.precision.as_stored(base.values(), ()), tree.stand_ins(copied := self._plain()):
                made = rehearse.inject(copied, _INNER, config, weightless=False)
            if fresh:
                rehearse.check_not_rounded(name, {key: base[key] for key in made.reads}, self.precision)
            reads = {key: base[key] for key in made.reads if base[key] in self.precision.narrowed}
            if reads and fresh:  # it began from values that were left out
                torch.set_rng_state(state)
                with self.precision.as_stored(base.values(), set(reads.values())):
                    made = rehearse.inject(self._plain(), _INNER, config, weightless=False)
        return made

    def _places(self, name: str, trial: Trial) -> dict[str, Linear]:
        """What peft puts beside the base model's layers, by the layers' names.

        Raises:
            BadAdapter: it is more than a plain ``B A x``, or beside something else than a linear layer.
        """
        found, layers = {}, dict(trial.tree.get_base_model().named_modules())
        for key, layer in layers.items():
            if not isinstance(layer, BaseTunerLayer) or _INNER not in layer._get_available_adapters():
                continue
            if type(layer) is not Linear:
                what = type(layer.get_base_layer()).__name__
                ends = sorted({other.rpartition(".")[2] for other, linear in layers.items() if type(linear) is Linear})
                way = "slots are beside linear layers alone"
                way += f": MultiLoraTransformersModel(..., target_modules={ends})" if ends else "; leave it out"
                raise BadAdapter(name, f"target_modules mean {key}, a {what}; {way}")
            if layer.lora_variant:
                variant = type(layer.lora_variant[_INNER]).__name__
                raise BadAdapter(name, f"its options make {variant} of it, which is more than the A and B that a slot holds")
            found[key] = layer
        return found

    def _fill(self, name: str, slot: LoraTenant, made: Trial, config: LoraConfig) -> None:
        parameters: dict[str, torch.nn.Parameter] = {}
        draws = self._draws[slot.index] = Draws(_seed(name))
        for key, source in self._places(name, made).items():
            layer = self.layers[key]
            dropout = getattr(source.lora_dropout[_INNER], "p", 0.0)
            weights = (source.lora_A[_INNER].weight.detach(), source.lora_B[_INNER].weight.detach())
            scaling = source.scaling[_INNER]
            layer.fill(slot.index, slot.adapter_name, *weights, scaling=scaling, dropout=dropout, draws=draws)
            part = layer.parts[slot.index]
            for which, parameter in (("lora_A", part.A), ("lora_B", part.B)):
                parameter.requires_grad_(not config.inference_mode)
                parameters[f"{_PREFIX}{key}.{which}.weight"] = parameter
        self._parameters[name] = parameters

    def _empty(self, name: str, slot: LoraTenant) -> None:
        self._parameters.pop(name, None)
        self._draws.pop(slot.index, None)
        for layer in self.layers.values():
            layer.clear(slot.index, slot.adapter_name)

    # ------------------------------------------------------------------------------------------------ activate

    @contextmanager
    def activate(self, name: str) -> Iterator[None]:
        index = None if name == BASE else self.pool.of(name).index
        with self.selection.kept():
            self.selection.now = Taking(index, self._forward_of(index))
            yield

    @contextmanager
    def share(self, spans: Sequence[Span], *, apart: bool = False, train: bool = False) -> Iterator[None]:
        """Inside, each span's rows of a batch are its slot's. On leaving, also by an exception: what was found.

        Args:
            apart: one matmul of the base layer for each span.
            train: the tenants' dropout draws anew; a pass that fails takes that back.
        """
        with self._begun([span.slot for span in spans] if train else []), self.selection.kept():
            known = [replace(span, forward=self._forward_of(span.slot)) for span in spans]
            self.selection.now = Taking(spans=known, apart=apart)
            yield

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Inside, a training forward of the active adapter runs: its dropout draws anew. One that fails takes that back."""
        active = self.selection.now.active
        with self._begun([active]), self.selection.kept():
            self.selection.now = Taking(active, self._forward_of(active))
            yield

    @contextmanager
    def _begun(self, slots: Sequence[int | None]) -> Iterator[None]:
        counted = [self._draws[slot] for slot in slots if slot in self._draws]
        for draws in counted:
            draws.passes += 1
        try:
            yield
        except BaseException:
            for draws in counted:
                draws.passes -= 1
            raise

    def _forward_of(self, slot: int | None) -> int:
        """Which of a slot's training forwards was the last that began."""
        return self._draws[slot].passes if slot in self._draws else 0

    def training_state(self, name: str) -> dict[str, Any]:
        if self.known(name) == BASE:
            return {}
        draws = self._draws[self.pool.of(name).index]
        return {"seed": draws.seed, "passes": draws.passes}

    def load_training_state(self, name: str, state: Mapping[str, Any]) -> None:
        if name != BASE and {"seed", "passes"} <= state.keys():
            draws = self._draws[self.pool.of(name).index]
            draws.seed, draws.passes = state["seed"], state["passes"]

    # ------------------------------------------------------------------------------------------------ tensors

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Of a tenant: under PEFT's keys, in the tenant's own rank. Of the base model: none, it is not trained."""
        if self.known(name) == BASE or self.config(name).inference_mode:
            return {}
        return dict(self._parameters[name])

    def adapter_state(self, name: str) -> dict[str, torch.Tensor]:
        return {key: parameter.detach() for key, parameter in self._parameters[name].items()}

    def load_adapter(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for key, parameter in self._parameters[name].items():
                parameter.copy_(state[key])

    def targets(self, name: str) -> list[str]:
        index = self.pool.of(name).index
        return [key for key, layer in self.layers.items() if index in layer.parts]

    def describe(self, name: str) -> dict[str, Any]:
        facts = super().describe(name)
        return {**facts, "slot": f"{self.slot(name).adapter_name} of {len(self.pool.slots)}"} if facts else facts


@contextmanager
def _unmoved() -> Iterator[None]:
    """An exception inside leaves torch's random state as it was."""
    state = torch.get_rng_state()
    try:
        yield
    except BaseException:
        torch.set_rng_state(state)
        raise


def _seed(name: str) -> int:
    """A number that the tenant's name and the present random state give. That state isn't moved: what is drawn after a tenant
    came is the same as after an adapter of plain peft's came."""
    with torch.random.fork_rng(devices=[]):
        return dropout_seed(name, int(torch.randint(2**62, ())))
