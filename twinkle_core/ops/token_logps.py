"""Log-probabilities of labels from hidden states: the one home of logps (L2).

Only rows whose label is not -100 are computed, a chunk of rows at a time: the ``[B, T, V]`` logits are never there. Logits are
taken to float32 before the softmax, whatever precision the matmul has.

    logp_t = z_t[y_t] - log sum_v exp z_t[v],   z_t = (W h_t + b) / temperature
    entropy_t = log sum_v exp z_t[v] - sum_v p_t[v] z_t[v]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinkle_core.errors import BadLabels
from twinkle_core.ops.chunks import added, compute_dtype, cuts, is_plain, taken, valid
from twinkle_core.ops.matmul import linear, times
from twinkle_core.types import IGNORE_INDEX

#: logits that are there at once, by default: 128 MiB in float32, but never fewer rows than keep a matmul busy
CHUNK_ELEMENTS, CHUNK_ROWS = 2**25, 256

Result = tuple[Tensor, Tensor | None, Tensor | None]


def check_labels(labels: Any, shape: torch.Size) -> None:
    """Labels must be whole numbers, one for each position of ``shape``: of another shape they would be read at wrong places.

    Raises:
        BadLabels
    """
    if not isinstance(labels, Tensor):
        raise BadLabels(f"they are a {type(labels).__name__}, not a tensor")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise BadLabels(
            f"they are {str(labels.dtype).removeprefix('torch.')}, not whole numbers (for a regression: set_loss('mse'))"
        )
    if labels.shape != shape:
        raise BadLabels(f"their shape is {list(labels.shape)}, and the model's outputs have {list(shape)}")


class Tempered(nn.Module):
    """An output layer whose logits are divided by a temperature. ``token_logps`` looks through it."""

    layer: nn.Module
    temperature: float

    def __init__(self, layer: nn.Module, temperature: float) -> None:
        super().__init__()
        self.layer, self.temperature = layer, temperature

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.layer(hidden)
        return logits / self.temperature


def token_logps(
    hidden: Tensor,
    output_layer: nn.Module,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropies: bool = False,
    predictions: bool = False,
    chunk_size: int | None = None,
) -> Result:
    """Log-probabilities of labels.

    A plain linear layer whose weights are frozen costs no recomputation: ``dlogp/dh = W[y] - p W`` is formed in forward, while
    the probabilities are at hand, and only scaled in backward. Trainable weights and entropies recompute a chunk's logits in
    backward. Any other output layer (with an adapter, scaled, sharded) is called itself, chunk by chunk, and recomputed.

    Args:
        hidden: ``[..., D]``, input of the output layer.
        output_layer: makes logits of hidden states.
        labels: ``[...]``, aligned; -100 is left out.
        temperature: logits are divided by it.
        entropies: also entropies in nats (differentiable).
        predictions: also the argmax.
        chunk_size: rows at a time; default such that a chunk of logits has 128 MiB, and at least 256 rows.

    Returns:
        logps ``[...]`` (0 where the label is -100), entropies ``[...]`` (0 there) or None, predictions ``[...]`` (-100 there)
        or None; float32, or float64 for such logits.

    Raises:
        BadLabels: labels are not whole numbers of the shape ``[...]``.
    """
    check_labels(labels, hidden.shape[:-1])
    if isinstance(output_layer, Tempered):
        temperature *= output_layer.temperature
        output_layer = output_layer.layer
    flat, index = hidden.reshape(-1, hidden.shape[-1]), valid(labels)
    rows = taken(flat, index)
    chosen = labels.reshape(-1).index_select(0, index)
    if not is_plain(output_layer):
        chunk = chunk_size or _chunk_rows(getattr(output_layer, "out_features", 2**17))
        return _scatter(labels, index, *_through_module(rows, output_layer, chosen, temperature, entropies, predictions, chunk))
    rows, weight, bias = compute_dtype(rows, output_layer.weight, output_layer.bias)
    chunk = chunk_size or _chunk_rows(weight.shape[0])
    graph = torch.is_grad_enabled()
    trains = graph and (weight.requires_grad or (bias is not None and bias.requires_grad))
    if trains or (graph and entropies and rows.requires_grad):
        logps, entropy, guess = _Recomputed.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, chosen, temperature, entropies, predictions, chunk
        )
    else:
        through = graph and rows.requires_grad
        logps, entropy, guess = _Frozen.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, chosen, temperature, entropies, predictions, chunk, through
        )
    return _scatter(labels, index, logps, entropy if entropies else None, guess if predictions else None)


def logps_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropies: bool = False,
    predictions: bool = False,
    chunk_size: int | None = None,
) -> Result:
    """``token_logps`` of logits that are there already: for models that scale or cap them, or whose caller wants them.

    Args:
        logits: ``[..., V]``.

    Other arguments and the result are those of ``token_logps``. Backward recomputes the softmax of a chunk; beside the gradient
    of the logits nothing of size V is kept.
    """
    check_labels(labels, logits.shape[:-1])
    chunk = chunk_size or _chunk_rows(logits.shape[-1])
    flat, index = logits.reshape(-1, logits.shape[-1]), valid(labels)
    chosen = labels.reshape(-1).index_select(0, index)
    logps, entropy, guess = _FromLogits.apply(  # type: ignore[no-untyped-call]
        flat, index, chosen, temperature, entropies, predictions, chunk
    )
    return _scatter(labels, index, logps, entropy if entropies else None, guess if predictions else None)


# ---------------------------------------------------------------------------------------------------- one chunk


def _statistics(
    z: Tensor, y: Tensor, entropies: bool, predictions: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Softmax of one chunk, in place: z ``[n, V]`` becomes exp(z - max).

    Returns:
        logps ``[n]``, the sums of exponentials ``[n, 1]``, entropies and predictions.
    """
    guess = z.argmax(1) if predictions else None
    at_label = z.gather(1, y[:, None])
    top = z.amax(1, keepdim=True)
    z.sub_(top)
    shifted = z.clamp(min=torch.finfo(z.dtype).min) if entropies else None  # masked logits are -inf, and 0 * inf is NaN
    z.exp_()
    total = z.sum(1, keepdim=True)
    log_total = total.log()
    logps = (at_label - top - log_total).squeeze(1)
    entropy = None
    if shifted is not None:
        entropy = log_total.squeeze(1) - torch.linalg.vecdot(z, shifted) / total.squeeze(1)
    return logps, total, entropy, guess


def linear_logits(rows: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Logits of rows, at least float32, divided by the temperature: a tensor of one's own."""
    z = linear(rows, weight, bias)
    z = z if z.dtype in (torch.float32, torch.float64) else z.float()
    return z if temperature == 1.0 else z.div_(temperature)


def softmax_in_place(z: Tensor) -> Tensor:
    """In place: ``torch.softmax`` would need memory for a second chunk."""
    z.sub_(z.amax(1, keepdim=True)).exp_()
    return z.div_(z.sum(1, keepdim=True))


def _logits_gradient(p: Tensor, y: Tensor, temperature: float, g_logps: Tensor, g_entropies: Tensor | None) -> Tensor:
    """Gradient of one chunk's logits, in place of their probabilities ``p``.

    dlogp/dz = onehot(y) - p;  dH/dz = -p (log p + H).
    """
    if g_entropies is None:
        dz = p.mul_(-g_logps[:, None])
    else:
        log_p = p.log().clamp_(min=torch.finfo(p.dtype).min)  # 0 log 0 is 0
        entropy = -torch.linalg.vecdot(p, log_p)
        dz = p.mul_(-(g_logps[:, None] + g_entropies[:, None] * (log_p + entropy[:, None])))
    dz.scatter_add_(1, y[:, None], g_logps[:, None].to(dz.dtype))
    return dz if temperature == 1.0 else dz.div_(temperature)


# ---------------------------------------------------------------------------------------------------- three roads


class _Frozen(torch.autograd.Function):
    """logps through frozen weights: the gradient is formed in forward, a row of D numbers for each token."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, entropies: bool,
        predictions: bool, chunk: int, through: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        found: list[list[Any]] = [[], [], []]
        gradient = torch.empty_like(rows) if through else None
        factors = []
        for cut in cuts(rows.shape[0], chunk):
            y = labels[cut]
            z = linear_logits(rows[cut], weight, bias, temperature)
            logps, total, entropy, guess = _statistics(z, y, entropies, predictions)
            for kept, value in zip(found, (logps, entropy, guess), strict=True):
                kept.append(value)
            if gradient is not None:
                # (onehot - p) W, with p = e / total: the one number at the label is changed before the matmul, where float32
                # still holds 1 - p exactly, and the division comes after it, on one number instead of V
                z.scatter_add_(1, y[:, None], -total)
                if weight.dtype == torch.float16:  # which neither holds a total of a large vocabulary nor a tiny 1 - p
                    margin = z.gather(1, y[:, None]).neg_().clamp_(min=torch.finfo(z.dtype).tiny)
                    z.div_(margin)
                    total = total / margin
                times(z.to(weight.dtype), weight, out=gradient[cut])
                factors.append(-1 / (total * temperature))
        exact = torch.float64 if rows.dtype == torch.float64 else torch.float32
        logps, entropy, guess = _joined(found, labels, exact, entropies, predictions)
        if gradient is not None:
            ctx.save_for_backward(gradient, torch.cat(factors) if factors else gradient.new_zeros(0, 1))
        ctx.mark_non_differentiable(*(t for t in (entropy, guess) if t is not None))
        return logps, entropy, guess

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient, factors = ctx.saved_tensors
        # one factor a row, in float32: a loss scale of 65536 is infinite in float16
        return ((gradient * (grads[0][:, None] * factors)).to(gradient.dtype), *[None] * 8)


class _Recomputed(torch.autograd.Function):
    """logps and entropies through weights that may train: backward makes each chunk's logits once more.

    Where one chunk is all there is, it is kept instead: the memory is bounded by a chunk either way.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, entropies: bool,
        predictions: bool, chunk: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        found: list[list[Any]] = [[], [], []]
        odds = total = None
        for cut in cuts(rows.shape[0], chunk):
            z = linear_logits(rows[cut], weight, bias, temperature)
            logps, total, entropy, guess = _statistics(z, labels[cut], entropies, predictions)
            odds = z.div_(total) if rows.shape[0] <= chunk and any(ctx.needs_input_grad) else None
            for kept, value in zip(found, (logps, entropy, guess), strict=True):
                kept.append(value)
        exact = torch.float64 if rows.dtype == torch.float64 else torch.float32
        logps, entropy, guess = _joined(found, labels, exact, entropies, predictions)
        ctx.save_for_backward(rows, weight, bias, labels, odds)
        ctx.settings = (temperature, chunk)
        ctx.set_materialize_grads(False)
        if guess is not None:
            ctx.mark_non_differentiable(guess)
        return logps, entropy, guess

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weight, bias, labels, odds = ctx.saved_tensors
        temperature, chunk = ctx.settings
        g_logps, g_entropies = grads[0], grads[1]
        if g_logps is None:
            g_logps = torch.zeros_like(g_entropies) if g_entropies is not None else None
        if g_logps is None:
            return (None,) * 8
        d_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        # sums over chunks in float32, rounded to the weights' precision once
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        d_weight: Tensor | None = None  # the first chunk's, to which others are added
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for cut in cuts(rows.shape[0], chunk):
            p = odds.clone() if odds is not None else softmax_in_place(linear_logits(rows[cut], weight, bias, temperature))
            dz = _logits_gradient(p, labels[cut], temperature, g_logps[cut], None if g_entropies is None else g_entropies[cut])
            if d_bias is not None:
                d_bias += dz.sum(0)
            dz = dz.to(weight.dtype)
            if d_rows is not None:
                times(dz, weight, out=d_rows[cut])
            if ctx.needs_input_grad[1]:
                d_weight = added(d_weight, dz, rows[cut], wide)
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_rows, d_weight, d_bias, None, None, None, None, None


class _FromLogits(torch.autograd.Function):
    """logps of logits that are there: backward fills one gradient of their size, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, index: Tensor, labels: Tensor, temperature: float, entropies: bool, predictions: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        found: list[list[Any]] = [[], [], []]
        for cut in cuts(index.shape[0], chunk):
            z = _picked(logits, index[cut], temperature)
            logps, _, entropy, guess = _statistics(z, labels[cut], entropies, predictions)
            for kept, value in zip(found, (logps, entropy, guess), strict=True):
                kept.append(value)
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logps, entropy, guess = _joined(found, labels, exact, entropies, predictions)
        ctx.save_for_backward(logits, index, labels)
        ctx.settings = (temperature, chunk)
        ctx.set_materialize_grads(False)
        if guess is not None:
            ctx.mark_non_differentiable(guess)
        return logps, entropy, guess

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, index, labels = ctx.saved_tensors
        temperature, chunk = ctx.settings
        g_logps, g_entropies = grads[0], grads[1]
        if g_logps is None and g_entropies is None:
            return (None,) * 7
        if g_logps is None:
            g_logps = torch.zeros_like(g_entropies)
        gradient = torch.zeros_like(logits)
        for cut in cuts(index.shape[0], chunk):
            p = softmax_in_place(_picked(logits, index[cut], temperature))
            dz = _logits_gradient(p, labels[cut], temperature, g_logps[cut], None if g_entropies is None else g_entropies[cut])
            gradient.index_copy_(0, index[cut], dz.to(gradient.dtype))
        return gradient, None, None, None, None, None, None


def _picked(logits: Tensor, index: Tensor, temperature: float) -> Tensor:
    """Rows of logits as floats of one's own, divided by the temperature."""
    z = logits.index_select(0, index)
    z = z if z.dtype in (torch.float32, torch.float64) else z.float()
    return z if temperature == 1.0 else z.div_(temperature)


def _through_module(
    rows: Tensor, layer: nn.Module, labels: Tensor, temperature: float, entropies: bool, predictions: bool, chunk: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Any output layer: called itself for each chunk, and once more in backward."""

    def one(part: Tensor, y: Tensor) -> Result:
        return logps_from_logits(
            layer(part), y, temperature=temperature, entropies=entropies, predictions=predictions, chunk_size=chunk
        )

    call: Callable[..., Result] = one
    if torch.is_grad_enabled():
        call = lambda part, y: checkpoint(one, part, y, use_reentrant=False)  # noqa: E731
    # without a row the layer is still called, so that its parameters are in the graph on every rank
    pieces = list(cuts(rows.shape[0], chunk)) or [slice(0, 0)]
    found = [call(rows[cut], labels[cut]) for cut in pieces]
    logps = torch.cat([f[0] for f in found])
    entropy = torch.cat([f[1] for f in found if f[1] is not None]) if entropies else None
    guess = torch.cat([f[2] for f in found if f[2] is not None]) if predictions else None
    return logps, entropy, guess


# ---------------------------------------------------------------------------------------------------- helpers


def _chunk_rows(vocabulary: int) -> int:
    return max(CHUNK_ROWS, CHUNK_ELEMENTS // vocabulary)


def _joined(
    found: list[list[Any]], labels: Tensor, exact: torch.dtype, entropies: bool, predictions: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What the chunks gave, put together; empty tensors where there was no row."""
    floats = torch.empty(0, dtype=exact, device=labels.device)
    logps = torch.cat(found[0]) if found[0] else floats
    entropy = (torch.cat(found[1]) if found[1] else floats.clone()) if entropies else None
    guess = (torch.cat(found[2]) if found[2] else labels.new_empty(0)) if predictions else None
    return logps, entropy, guess


def _scatter(labels: Tensor, index: Tensor, logps: Tensor, entropy: Tensor | None, guess: Tensor | None) -> Result:
    """Values of the rows that count, in the shape of the labels. Without any row, zeros that still have a graph."""
    count = labels.numel()

    def spread(x: Tensor, fill: float) -> Tensor:
        if index.shape[0] == count:
            return x.reshape(labels.shape)
        return x.new_full((count,), fill).index_copy(0, index, x).reshape(labels.shape)

    return (
        spread(logps, 0.0),
        None if entropy is None else spread(entropy, 0.0),
        None if guess is None else spread(guess, IGNORE_INDEX),
    )
