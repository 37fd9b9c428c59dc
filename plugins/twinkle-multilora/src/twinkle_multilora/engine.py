"""How a model with slots computes: rows without padding, those of several tenants in one pass where they keep apart."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from twinkle_core.contracts.adapters import BASE
from twinkle_core.contracts.engine import Batch, LossFn
from twinkle_core.errors import FailedElsewhere
from twinkle_core.errors.adapters import whose
from twinkle_core.isolation import attempt, describe
from twinkle_core.ops.matmul import kernel
from twinkle_core.ops.token_logps import Tempered, token_logps
from twinkle_core.train.loop_engine import evaluating
from twinkle_core.types import IGNORE_INDEX, LossOutput, ModelOutput
from twinkle_multilora.backend import needed
from twinkle_multilora.layers import InForward, SlotLinear, Span
from twinkle_multilora.packing import Pack, Piece, at_least, pack, piece_of
from twinkle_multilora.probe import Sharing, configs_of, sharing_of
from twinkle_multilora.seams import Seam, added, cut_off

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinkle_multilora.adapters import SlotAdapters
    from twinkle_transformers.attention import by_row
    from twinkle_transformers.engine import TOKEN_NEEDS, TransformersEngine, training
    from twinkle_transformers.parallel import WORLD
else:
    by_row = needed("twinkle_transformers.attention", "transformers", "SlotEngine").by_row
    _engine = needed("twinkle_transformers.engine", "transformers", "SlotEngine")
    TOKEN_NEEDS, TransformersEngine, training = _engine.TOKEN_NEEDS, _engine.TransformersEngine, _engine.training
    WORLD = needed("twinkle_transformers.parallel", "transformers", "SlotEngine").WORLD

T = TypeVar("T")

#: rows of logits at a time: so few that they stay near the processor, and enough to keep a matmul busy
CHUNK = 128
#: what a packed pass can compute
_NEEDS = frozenset({"logps", "entropies", "predictions", "hidden", "logits"})


@dataclass(slots=True)
class Share:
    """One tenant's batch in a pass, what its loss is, and what came of it: a loss, or what that raised."""

    slot: int
    batch: Batch
    needs: frozenset[str]
    loss_fn: LossFn
    loss: LossOutput | None = None
    error: BaseException | None = None


class SlotEngine(TransformersEngine):
    """TransformersEngine whose forward has no padding, so that rows of several tenants are one batch to the model.

    A tenant's numbers are those of its own rows: attention is computed row by row, adapters and their gradients tenant by
    tenant, and what is one matmul for all is only so where a trial has shown that its rows do not depend on their company. So
    alone and in any company they are the same bits. Models, batches and needs for which there is no packed pass go by
    TransformersEngine, one tenant at a time.
    """

    slots: SlotAdapters | None = None
    fast = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sharing: dict[Any, Sharing] = {}
        self._configs = configs_of(self.module)
        self._by_itself = False
        self._packs: dict[Any, bool] = {}

    # ------------------------------------------------------------------------------------------------ what can be shared

    @property
    def sharing(self) -> Sharing:
        """How passes are shared. Asked of the model once for each attention, type (an autocast around may set it), number of
        threads and kernel."""
        assert self.slots is not None
        if not self.fast:
            return Sharing("turns", "fast=False")
        how = tuple(str(config._attn_implementation) for config in self._configs)
        threads = 0 if self.several else torch.get_num_threads()  # ranks ask together, whatever the threads of each
        kind = self.device.type
        around = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (how, self.precision.compute or around, threads, kernel())
        if key not in self._sharing:
            autocast = functools.partial(self.precision.autocast, self.device)
            # it may be asked in the middle of a tenant's call, or of an evaluation
            with self.slots.activate(BASE), torch.inference_mode(False):
                self._sharing[key] = sharing_of(
                    self.module, self.slots, autocast, self.device, around=self.around, agree=self.agree
                )
        return self._sharing[key]

    def piece(self, batch: Batch, needs: frozenset[str], task: str = "causal_lm") -> Piece | None:
        """A batch as it goes into a packed pass; None: it doesn't."""
        if self.slots is None or task != "causal_lm" or not needs <= _NEEDS or not self.packs:
            return None
        return piece_of(batch.inputs, self._takes)

    @property
    def packs(self) -> bool:
        """Whether the model has packed passes. Asked of it by all ranks at once, whatever rows they have."""
        if self.sharing.way == "turns":
            return False
        few = {"input_ids": torch.arange(8, device=self.device)[None]}
        if not self.in_step:
            return self._output_layer(few) is not None
        key = (id(self.module.get_output_embeddings()), getattr(self.module.forward, "__func__", self.module.forward))
        if key not in self._packs:
            with torch.no_grad():
                self._packs[key] = self.around(lambda: self._output_layer(few) is not None)
        return self._packs[key]

    # ------------------------------------------------------------------------------------------------ several ranks

    @property
    def several(self) -> bool:
        """Whether several ranks compute together."""
        return self.mesh.world_size > 1

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Inside, ``prepare`` asks no other rank how many micro-batches it has; where there are no rows it makes one that
        trains nothing."""
        self._by_itself = True
        try:
            yield
        finally:
            self._by_itself = False

    def most(self, count: int, given: int) -> int:
        return max(count, 1) if self._by_itself else super().most(count, given)

    def tell(self, what: Any) -> Any:
        """What rank 0 gives, on all ranks."""
        box = [what]
        torch.distributed.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def fail_together(self, errors: Sequence[BaseException | None], what: Sequence[str]) -> list[BaseException | None]:
        """What went wrong with each of several things, on whatever rank: all ranks give up what one can't do.

        Args:
            errors: of this rank. All ranks ask for the same things.
            what: in words.
        """
        if not self.several:
            return list(errors)
        here = torch.tensor([float(error is not None) for error in errors], device=self.device)
        if not self.meeting.all_reduce(here, WORLD).any():
            return list(errors)
        told = self.gather_objects([None if error is None else describe(error) for error in errors], "world")
        found: list[BaseException | None] = []
        for i, error in enumerate(errors):
            rank = next((rank for rank, texts in enumerate(told) if texts[i] is not None), None)
            found.append(error if error is not None or rank is None else FailedElsewhere(what[i], rank, told[rank][i]))
        return found

    # ------------------------------------------------------------------------------------------------ one tenant

    def forward(
        self, batch: Batch, needs: frozenset[str], *, train: bool, temperature: float = 1.0, task: str = "causal_lm"
    ) -> ModelOutput:
        if self.slots is None:
            return super().forward(batch, needs, train=train, temperature=temperature, task=task)
        piece = self.piece(batch, needs, task)
        if piece is None:
            with self.slots.begun() if train else contextlib.nullcontext():
                output = super().forward(batch, needs, train=train, temperature=temperature, task=task)
                return self._remembered(output) if train else output
        packed = pack([piece], self.sharing.widths)
        with self._made_ready(packed, [self.slots.selection.now.active], train):
            _, (output,) = self._outputs(packed, [needs], temperature, train)
        return output

    def _remembered(self, output: ModelOutput) -> ModelOutput:
        """An output that knows in backward whose it is."""
        assert self.slots is not None
        selection = self.slots.selection
        known = ModelOutput({k: selection.remembered(v) if isinstance(v, torch.Tensor) else v for k, v in output.items()})
        if self._beside_the_head and "output_layer" in known:
            known["output_layer"] = InForward(known["output_layer"], selection)
        return known

    def backward(self, loss_sum: torch.Tensor, *, sync: bool = True) -> None:
        """See ``Engine.backward``. Layers that are computed anew here are told by the graph whose rows they have."""
        with self.slots.selection.kept() if self.slots is not None else contextlib.nullcontext():
            super().backward(loss_sum, sync=sync)

    @property
    def _beside_the_head(self) -> bool:
        return isinstance(getattr(self.module, "get_output_embeddings", lambda: None)(), SlotLinear)

    def describe(self) -> dict[str, Any]:
        known = list(self._sharing.values()) if self.fast else [self.sharing]
        return {**super().describe(), "passes": str(known[-1]) if known else "not tried yet whether tenants can share them"}

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
        slot = self.slots.selection.now.active if self.slots is not None else None
        pieces = [self.piece(batch, needs, task) if train else None for batch in batches]
        if slot is None or any(piece is None for piece in pieces):
            super().run_schedule(batches, needs, loss_fn, train=train, sync=sync, temperature=temperature, task=task)
            return
        for batch in batches:
            share = Share(slot, batch, needs, loss_fn)
            self.run_shared([share], temperature=temperature, alone=True)
            if share.error is not None:
                raise share.error

    # ------------------------------------------------------------------------------------------------ several

    def run_shared(self, shares: Sequence[Share], *, temperature: float = 1.0, alone: bool = False) -> None:
        """Forward, losses and backward of batches of different tenants in one pass. Each must have a ``piece``.

        A loss that raises leaves ``error`` in its share, and its tenant without gradients; the others go on.

        Args:
            alone: it is one tenant's, and core tells other ranks what is raised.
        """
        pieces = [piece for share in shares if (piece := self.piece(share.batch, share.needs)) is not None]
        assert len(pieces) == len(shares)
        slots = [share.slot for share in shares]
        seams: list[list[Seam]] = [[] for _ in shares]
        needs = [share.needs for share in shares]
        packed = pack(pieces, self.sharing.widths)
        with self._made_ready(packed, slots, True):
            hidden, outputs = self._all_or_none(lambda: self._outputs(packed, needs, temperature, True, seams), alone)
        for share in shares:
            # a tenant's own code, forward and backward: its fault is its own. Outputs are handed over one by one: none outlives
            # its loss. No pass is open here, so a loss may call the model.
            share.error = attempt(functools.partial(self._loss_of, share, outputs.pop(0))).error
        errors = [share.error for share in shares]
        if not alone:
            errors = self.fail_together(errors, [self._whose(share.slot) for share in shares])
        for share, own, error in zip(shares, seams, errors, strict=True):
            if error is not None:
                share.error, share.loss = error, None
                own.clear()
        reached = [(seam.root, seam.leaf.grad) for own in seams for seam in own if seam.leaf.grad is not None]
        failed = [share.slot for share in shares if share.error is not None]
        if self.in_step and len(failed) < len(shares):  # ranks go back through the model together, whatever their rows gave
            reached.append((hidden, torch.zeros_like(hidden)))
        del hidden
        if reached:
            roots, given = zip(*reached, strict=True)
            assert self.slots is not None
            trained = self._parameters_of(slots)
            with by_row(self.module), self.slots.selection.kept(), added(trained, failed), training(self.module):
                torch.autograd.backward(roots, given)

    def _all_or_none(self, call: Callable[[], T], alone: bool) -> T:
        """``call()``, which fails on all ranks or on none. (Where ranks are in step, one that stops stops in the middle of a
        pass, and the others with it.)"""
        if alone or not self.several or self.in_step:
            return call()
        done = attempt(call)
        (error,) = self.fail_together([done.error], ["a pass that tenants share"])
        if error is not None:
            raise error
        return done.value  # type: ignore[return-value]

    def _whose(self, slot: int) -> str:
        assert self.slots is not None
        return f"forward_backward of {whose(self.slots.pool.slots[slot].tenant_adapter_name or '')}"

    def _loss_of(self, share: Share, output: ModelOutput) -> None:
        """A tenant's loss, and its gradients as far as the outputs. What it does to the grad mode ends with it."""
        with torch.enable_grad():
            share.loss = share.loss_fn(share.batch, output)
            super().backward(share.loss.sum)

    def _parameters_of(self, slots: Sequence[int]) -> dict[int, list[torch.nn.Parameter]]:
        """Of the tenants that hold these slots."""
        assert self.slots is not None
        names = {slot: self.slots.pool.slots[slot].tenant_adapter_name for slot in slots}
        return {slot: list(self.slots.parameters(name).values()) for slot, name in names.items() if name is not None}

    @contextmanager
    def _made_ready(self, packed: Pack, slots: Sequence[int | None], train: bool) -> Iterator[None]:
        """Inside, the model knows whose rows are whose, and where they end."""
        assert self.slots is not None
        spans = [Span(slot, piece.count) for slot, piece in zip(slots, packed.pieces, strict=True)]
        if packed.filler:
            spans.append(Span(None, packed.filler))
        apart = self.sharing.way == "apart"
        with by_row(self.module, packed.lengths), self.slots.share(spans, apart=apart, train=train):
            yield

    def _outputs(
        self,
        packed: Pack,
        needs: Sequence[frozenset[str]],
        temperature: float,
        train: bool,
        seams: Sequence[list[Seam]] | None = None,
    ) -> tuple[torch.Tensor, list[ModelOutput]]:
        """The last hidden states of a pass, and what each piece needs, in its batch's layout. ``seams``: gets where each
        piece's graph is cut off the pass."""
        assert self.slots is not None
        layer, remembered = self._output_layer({"input_ids": packed.ids}), self.slots.selection.remembered
        outputs: list[ModelOutput] = []

        def compute() -> list[torch.Tensor]:
            """Gives what backward may begin from: where weights lie apart, they are fetched when it does."""
            body = self.module.base_model(input_ids=packed.ids, position_ids=packed.positions, use_cache=False)
            hidden = remembered(body.last_hidden_state)
            tokens, known = self._tokens(packed, needs, hidden, layer, temperature)
            shown = layer if temperature == 1.0 else Tempered(layer, temperature)
            cuts: Sequence[list[Seam] | None] = seams or [None] * len(needs)
            for piece, own, want, found, cut in zip(packed.pieces, packed.parts(hidden), needs, tokens, cuts, strict=True):
                output = ModelOutput({k: cut_off(v, cut) for k, v in found.items() if k in want})
                if want & {"hidden", "logits"}:
                    rows = cut_off(piece.spread(own, 0.0), cut)
                    if "hidden" in want:
                        output["hidden"], output["output_layer"] = rows, shown
                    if "logits" in want:
                        output["logits"] = shown(rows)
                outputs.append(output)
            return [hidden, *known]

        mode = training(self.module) if train else evaluating(self.module)
        with mode, self.precision.autocast(self.device):
            return self.around(compute)[0], outputs

    def make_optimizer(
        self, cls: Any, parameters: Mapping[str, torch.nn.Parameter], kwargs: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """See ``Engine.make_optimizer``. Many tenants have many small tensors: where torch has an update that is one kernel for
        all of a tenant's, it is used, unless ``fused`` or ``foreach`` is given."""
        if cls in (torch.optim.Adam, torch.optim.AdamW) and not {"fused", "foreach"} & kwargs.keys():
            kwargs = {**kwargs, "fused": True}
        return super().make_optimizer(cls, parameters, kwargs)

    def _tokens(
        self, packed: Pack, needs: Sequence[frozenset[str]], hidden: torch.Tensor, layer: Any, temperature: float
    ) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
        """logps, entropies and predictions of each piece, and all of these as they were before they were cut. Those who want
        entropies are computed apart from those who don't: another formula gives their logps' gradients."""
        assert self.slots is not None
        found: list[dict[str, torch.Tensor]] = [{} for _ in needs]
        seen: list[torch.Tensor] = []
        for entropies in (False, True):
            mine = [bool(want & TOKEN_NEEDS) and ("entropies" in want) == entropies for want in needs]
            if not any(mine):
                continue
            labels = packed.labels
            if not all(mine):
                others = [torch.full_like(p.labels, IGNORE_INDEX) for p in packed.pieces]
                kept = [p.labels if own else other for p, own, other in zip(packed.pieces, mine, others, strict=True)]
                labels = torch.cat([*kept, labels[0, labels.shape[1] - packed.filler :]])[None]
            predictions = any("predictions" in want for want, own in zip(needs, mine, strict=True) if own)
            asked = at_least(labels)
            values = token_logps(
                hidden, layer, asked, entropies=entropies, predictions=predictions, temperature=temperature, chunk_size=CHUNK
            )
            for name, value, fill in zip(("logps", "entropies", "predictions"), values, (0.0, 0.0, IGNORE_INDEX), strict=True):
                if value is None:
                    continue
                value = self.slots.selection.remembered(value)
                seen.append(value)
                known = value.masked_fill(labels == IGNORE_INDEX, fill)
                for piece, part, own, into in zip(packed.pieces, packed.parts(known), mine, found, strict=True):
                    if own:
                        into[name] = piece.spread(part, fill)
        return found, seen
