"""The sum of cross entropies from hidden states, its gradients formed in the forward (L2).

``token_logps`` gives a number for each token, whose gradient is not known before backward, so trainable weights cost a second
matmul there. Of a **sum** it is known up to one factor: all gradients are formed while a chunk's probabilities are at hand.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from twinkle_core.errors import NeedsLibrary
from twinkle_core.ops.chunks import added, compute_dtype, cuts, is_plain, valid
from twinkle_core.ops.matmul import times
from twinkle_core.ops.token_logps import Tempered, check_labels, linear_logits, softmax_in_place, token_logps

#: rows at a time through frozen weights, and where they train: fewer make matmuls slower, more take more memory
FROZEN, TRAINED = 256, 192
BACKENDS = ("auto", "torch", "liger")


def linear_cross_entropy(
    hidden: Tensor, output_layer: nn.Module, labels: Tensor, *, chunk_size: int | None = None, backend: str = "auto"
) -> Tensor:
    """``- sum_t log p(y_t)`` over labels that are not -100, a scalar (float32, or float64 for such inputs).

    Args:
        hidden: ``[..., D]``, input of the output layer.
        output_layer: a linear layer, tempered or not; any other is called itself, chunk by chunk (``token_logps``).
        labels: ``[...]``, aligned.
        chunk_size: rows at a time; default 256, or 192 where the weight trains.
        backend: one of ``BACKENDS``.

    Raises:
        BadLabels. NeedsLibrary: ``backend`` is liger, and Liger Kernel is not installed.
    """
    check_labels(labels, hidden.shape[:-1])
    temperature, layer = 1.0, output_layer
    if isinstance(layer, Tempered):
        temperature, layer = layer.temperature, layer.layer
    if not is_plain(layer):
        return -token_logps(hidden, output_layer, labels, chunk_size=chunk_size)[0].sum()
    index = valid(labels)
    flat, weight, bias = compute_dtype(hidden.reshape(-1, hidden.shape[-1]), layer.weight, layer.bias)
    if weight.dtype == torch.float16:
        # it does not hold the small probabilities of a large vocabulary before the loss scale is in, which is in backward
        return -token_logps(hidden, output_layer, labels, chunk_size=chunk_size)[0].sum()
    chosen = labels.reshape(-1).index_select(0, index)
    chunk = chunk_size or (TRAINED if weight.requires_grad else FROZEN)
    if temperature == 1.0 and len(index) and _takes_liger(backend, flat):
        return _liger(flat.index_select(0, index), weight, bias, chosen)
    return _Fused.apply(flat, index, weight, bias, chosen, temperature, chunk)  # type: ignore[no-untyped-call,no-any-return]


def _takes_liger(backend: str, rows: Tensor) -> bool:
    if backend == "torch" or (backend == "auto" and not rows.is_cuda):
        return False
    if find_spec("liger_kernel") is not None:
        return True
    if backend == "liger":
        raise NeedsLibrary("FusedLinearCrossEntropyLoss(backend='liger')", "liger_kernel", "liger-kernel", sys.prefix)
    return False


def _liger(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, rows, labels, bias)  # type: ignore[no-any-return]


class _Fused(torch.autograd.Function):
    """Gradients wait in the context, and are handed over by the first backward; a second one forms them anew.

    Rows are taken out of ``flat`` and put back here: autograd's backward of ``index_select`` takes as long as a matmul on a
    CPU.
    """

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float,
        chunk: int,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(flat, index, weight, bias, labels)
        ctx.settings = (temperature, chunk)
        total, ctx.gradients = _Fused.computed(ctx, flat, index, weight, bias, labels)
        return total

    @staticmethod
    def computed(
        ctx: Any, flat: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The sum, and the gradients that are wanted."""
        wanted = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        rows = flat.index_select(0, index)
        temperature, chunk = ctx.settings
        total, (d_rows, *others) = _sum_and_gradients(rows, weight, bias, labels, temperature, chunk, wanted)
        d_flat = None if d_rows is None else torch.zeros_like(flat).index_copy_(0, index, d_rows)
        return total, [d_flat, *others]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (upstream,) = grads
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = _Fused.computed(ctx, *ctx.saved_tensors)
        # of a sum that is the loss itself the factor is 1; on a device one would wait to learn that
        if upstream.device.type != "cpu" or float(upstream) != 1.0:
            gradients = [None if g is None else g.mul_(upstream) for g in gradients]
        d_flat, d_weight, d_bias = gradients
        return d_flat, None, d_weight, d_bias, None, None, None


def _softmax_in_place(z: Tensor) -> Tensor:
    """In place. On the CPU torch's own kernel reads a row before it writes it, and passes over memory once."""
    return torch.softmax(z, 1, out=z) if z.device.type == "cpu" else softmax_in_place(z)


def _sum_and_gradients(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, chunk: int, wanted: Any
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum, and its gradients by rows, weight and bias, where wanted. dL/dz = (p - onehot(y)) / temperature."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=wide, device=rows.device)
    d_rows = torch.empty_like(rows) if wanted[0] else None
    # sums over chunks in float32, rounded to the weights' precision once
    d_weight: Tensor | None = None  # the first chunk's, to which others are added
    d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
    for cut in cuts(rows.shape[0], chunk):
        y = labels[cut][:, None]
        z = linear_logits(rows[cut], weight, bias, temperature)  # of one's own: changed in place from here on
        at_label, top = z.gather(1, y), z.amax(1, keepdim=True)
        p = _softmax_in_place(z)
        # the likeliest word has p = 1 / sum exp(z - top): from it the normaliser, whose own logarithm can't underflow
        total += (top - p.amax(1, keepdim=True).log() - at_label).sum()
        # one number a row: scatter_add_ on the CPU takes as long as a matmul for it
        places = torch.arange(len(p), device=p.device) * p.shape[1] + labels[cut]
        p.view(-1).index_add_(0, places, torch.full_like(top[:, 0], -1.0))
        dz = p if temperature == 1.0 else p.div_(temperature)
        if d_bias is not None:
            d_bias += dz.sum(0)
        dz = dz.to(weight.dtype)
        if d_rows is not None:
            times(dz, weight, out=d_rows[cut])
        if wanted[1]:
            d_weight = added(d_weight, dz, rows[cut], wide)
        del z, p, dz  # or the next chunk's logits would come beside these
    if wanted[1]:
        d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
    d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
    return total, [d_rows, d_weight, d_bias]
