"""How a model may be shared: asked by running rows alone and in company, and comparing bits."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from twinkle_core.ops.chunks import is_plain
from twinkle_core.ops.row_invariance import rows_invariant
from twinkle_core.ops.token_logps import token_logps
from twinkle_core.types import IGNORE_INDEX
from twinkle_multilora.backend import needed
from twinkle_multilora.layers import SlotLinear, Span
from twinkle_multilora.packing import Piece, pack
from twinkle_multilora.pointwise import Watch

if TYPE_CHECKING:
    from twinkle_multilora.adapters import SlotAdapters
    from twinkle_transformers.attention import by_row
else:
    by_row = needed("twinkle_transformers.attention", "transformers", "SlotEngine").by_row

#: ``shared``: one matmul for all tenants' rows. ``apart``: one a tenant, all else in one pass. ``turns``: one tenant a pass.
Way = Literal["shared", "apart", "turns"]
T = TypeVar("T")
_ELSEWHERE = "another rank found so"
#: lengths of the rows that are tried
_ROWS = (5, 9, 21)
#: tokens of others in the largest pass that is tried, for a model of so few parameters that it takes no second; and of a row
_MANY, _NUMBERS, _LONG = 2000, 10**10, 256
#: largest difference, relative to the largest number, that rounding makes between one packed pass and a plain one
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


@dataclass(frozen=True, slots=True)
class Sharing:
    """How passes are shared, and why not better. ``widths``: see ``pointwise``."""

    way: Way
    why: str = ""
    widths: tuple[int, ...] = ()

    def __str__(self) -> str:
        return {
            "shared": "tenants share a pass (fast path: rows do not depend on their company)",
            "apart": f"tenants share a pass, with one matmul each ({self.why})",
            "turns": f"tenants take turns ({self.why})",
        }[self.way]


def sharing_of(
    module: Any,
    slots: SlotAdapters,
    autocast: Callable[[], Any],
    device: torch.device,
    *,
    around: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    agree: Callable[[bool], bool] = bool,
) -> Sharing:
    """The best way in which rows of tenants keep apart to the last bit.

    Runs the model without adapters on a few tokens, and on as many as passes have where that takes no second. Nothing is drawn
    from the global generator, and nothing is left changed.

    Args:
        autocast: gives the context of the model's forwards.
        around: what runs weights of the model runs inside.
        agree: whether something is so on every rank. All ranks try, and go by the one with the least.
    """
    reason = _out_of_the_question(module)
    if reason:
        return Sharing("turns", reason)
    trial = _Trial(module, slots, autocast, device, around)
    watch, why = trial.made(trial.watched)
    plain, failed = trial.made(trial.plain)
    why = why or failed or (watch.why if watch is not None else "")
    if not agree(not why):
        return Sharing("turns", why or _ELSEWHERE)
    assert watch is not None
    trial.widths = watch.widths
    for way in ("shared", "apart"):
        seen, why = trial.made(functools.partial(trial.tried, apart=way == "apart"))
        if not agree(not why):
            return Sharing("turns", why or _ELSEWHERE)
        assert seen is not None and plain is not None
        if not agree(all(_close(a, b) for a, b in zip(seen.alone, plain, strict=True))):
            return Sharing("turns", "a packed row gives other numbers than the row alone in the plain model")
        same = agree(seen.same)
        if way == "shared":
            mixing = "" if same else "rows of one matmul depend on one another"
            mixing = mixing or _weights(module, slots, autocast, device)
            if agree(not mixing):
                return Sharing("shared", widths=trial.widths)
        elif same:
            return Sharing("apart", mixing or _ELSEWHERE, trial.widths)
    return Sharing("turns", "rows change with their company")


def configs_of(module: nn.Module) -> list[Any]:
    """The configs that a model's modules ask how attention is computed, each once."""
    found = {id(m.config): m.config for m in module.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")}
    return list(found.values())


def _out_of_the_question(module: Any) -> str:
    """What rules a shared pass out without trying."""
    how = {config._attn_implementation for config in configs_of(module)}
    if how != {"sdpa"}:
        return f"its attention is {' and '.join(sorted(map(str, how))) or 'not known'}, and only sdpa can be cut into rows"
    body = getattr(module, "base_model", None)
    takes = inspect.signature(body.forward).parameters if body is not None else {}
    if body is module or not {"inputs_embeds", "position_ids", "input_ids"} <= set(takes):
        return "its body takes no inputs_embeds and position_ids"
    if isinstance(module.get_output_embeddings(), SlotLinear):
        return "slots are beside its output layer, which sees labelled tokens alone and not the pass"
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules()):
        return "it has dropout of its own, drawn for all rows at once"
    if any(getattr(config, "attention_dropout", 0) for config in configs_of(module)):
        return "its attention has dropout, drawn for all rows at once"
    return ""


def _weights(module: Any, slots: SlotAdapters, autocast: Callable[[], Any], device: torch.device) -> str:
    """Try matmuls of the model's own shapes, with as many rows as passes have."""
    layers = [layer.base_layer for layer in slots.layers.values()]
    head = module.get_output_embeddings()
    with autocast():
        narrow = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    shapes = {(*layer.weight.shape, narrow or layer.weight.dtype, 2048) for layer in layers if isinstance(layer, nn.Linear)}
    if is_plain(head):
        shapes.add((*head.weight.shape, narrow or head.weight.dtype, 512))
    for out, inner, dtype, most in sorted(shapes, key=str):
        if not rows_invariant(out, inner, dtype, device, [n for n in (16, 23, 64, 200, 512, 2048) if n <= most]):
            return f"matmuls of [{out}, {inner}] give a row other bits in another company"
    return ""


@dataclass(frozen=True, slots=True)
class _Seen:
    alone: list[Tensor]  # last hidden state of each row, alone in its pass
    same: bool  # whether each row, and all gradients, were the same bits in every company


@dataclass(slots=True)
class _Trial:
    """Passes of a few rows. See ``sharing_of``."""

    module: Any
    slots: SlotAdapters
    autocast: Callable[[], Any]
    device: torch.device
    around: Callable[[Callable[[], Any]], Any]
    widths: tuple[int, ...] = ()

    def made(self, call: Callable[[], T]) -> tuple[T | None, str]:
        """What came of a trial, or why it can't be made."""
        try:
            with self.autocast():
                return call(), ""
        except (TypeError, ValueError, RuntimeError, NotImplementedError, KeyError, IndexError) as error:
            return None, f"a packed pass can't be made: {error}"

    def tried(self, *, apart: bool) -> _Seen:
        """The rows alone and in company."""
        rows = range(len(_ROWS))
        alone = [self._pass([row], apart)[row] for row in rows]
        same = True
        many = min(_MANY, _NUMBERS // max(sum(p.numel() for p in self.module.parameters()), 1))
        for company, others in (([0, 1, 2], 0), ([2, 1, 0], many), ([1, 0], 0)):
            found = self._pass(company, apart, others)
            same &= all(torch.equal(a, b) for row in company for a, b in zip(found[row], alone[row], strict=True))
        return _Seen([numbers[0] for numbers in alone], same)

    def watched(self) -> Watch:
        """A pass in which each function is tried."""
        watch = Watch(sum(_ROWS))
        with watch:
            self._pass(range(len(_ROWS)), False)
        return watch

    def _pass(self, company: Sequence[int], apart: bool, others: int = 0) -> dict[int, tuple[Tensor, ...]]:
        """Hidden state, logps, and the gradient of the embeddings, of each row of a packed pass. ``others``: tokens besides."""
        lengths = [*(_ROWS[row] for row in company), *(min(_LONG, others - at) for at in range(0, others, _LONG))]
        rows = itertools.chain(company, itertools.count(len(_ROWS)))
        packed = pack([_piece(self.module, *row, self.device) for row in zip(rows, lengths, strict=False)], self.widths)
        spans = [Span(None, n) for n in (*lengths, packed.filler) if n]
        leaves = []

        def forward() -> tuple[Tensor, Tensor]:
            leaves.append(self.module.get_input_embeddings()(packed.ids).detach().requires_grad_())
            result = self.module.base_model(inputs_embeds=leaves[0], position_ids=packed.positions, use_cache=False)
            hidden, head = result.last_hidden_state, self.module.get_output_embeddings()
            if is_plain(head):
                return hidden, token_logps(hidden, head, packed.labels.clamp(min=0))[0]
            return hidden, torch.zeros_like(packed.labels, dtype=torch.float32)

        with (
            _at_rest(self.module),
            torch.enable_grad(),
            by_row(self.module, packed.lengths),
            self.slots.share(spans, apart=apart, train=False),
        ):
            hidden, logps = self.around(forward)
            line = torch.linspace(-1, 1, hidden.shape[-1], device=self.device, dtype=torch.float64)
            (gradient,) = torch.autograd.grad((hidden.double() * line).sum() + logps.double().sum(), leaves)
        cut = [packed.parts(t.detach()) for t in (hidden, logps, gradient)]
        return {row: tuple(part[i] for part in cut) for i, row in enumerate(company)}

    def plain(self) -> list[Tensor]:
        """Hidden states of the rows, one by one, as the model computes them itself."""

        def forward(piece: Piece) -> Tensor:
            embedded = self.module.get_input_embeddings()(piece.ids[None])
            result = self.module.base_model(inputs_embeds=embedded, position_ids=piece.positions[None], use_cache=False)
            return result.last_hidden_state[0]  # type: ignore[no-any-return]

        with _at_rest(self.module), torch.no_grad():
            pieces = [_piece(self.module, row, count, self.device) for row, count in enumerate(_ROWS)]
            return [self.around(functools.partial(forward, piece)) for piece in pieces]


def _piece(module: Any, row: int, count: int, device: torch.device) -> Piece:
    vocabulary = int(module.get_input_embeddings().weight.shape[0])
    ids = (torch.arange(count, device=device) * 7 + 13 * row + 1) % vocabulary
    places = torch.arange(count, device=device)
    labels = torch.where(places % 3 == 0, IGNORE_INDEX, ids)
    return Piece(ids, places, labels, [count], places, torch.Size([1, count]))


@contextmanager
def _at_rest(module: nn.Module) -> Iterator[None]:
    """Without dropout and checkpointing."""
    flags = [m for m in module.modules() if m.training]
    for m in flags:
        m.training = False
    try:
        yield
    finally:
        for m in flags:
            m.training = True


def _close(a: Tensor, b: Tensor) -> bool:
    gap = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))
    return gap <= _ROUNDING.get(a.dtype, 1e-4)
