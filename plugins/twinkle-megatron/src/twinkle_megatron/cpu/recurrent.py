"""Linear attention in torch, where flash-linear-attention's kernels, which need a GPU, are asked for.

Functions of mcore-bridge's and Megatron's modules are replaced, and no package ``fla`` is made up: transformers would find it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def mend() -> None:
    """Replace them. Once, after mcore-bridge has been imported."""
    import mcore_bridge.model.modules.gated_delta_net as bridge
    import megatron.core.ssm.gated_delta_net as core

    core.HAVE_FLA = True
    for module in (core, bridge):
        module.l2norm, module.chunk_gated_delta_rule = _l2norm, _chunk_gated_delta_rule
    bridge.causal_conv1d = _causal_conv1d


def _l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)


def _rows(x: torch.Tensor, cuts: Any) -> list[torch.Tensor]:
    """The rows of a packed sequence ``[1, T, …]``."""
    if cuts is None:
        return [x]
    sizes = (cuts[1:] - cuts[:-1]).tolist()
    return [row for row in torch.split(x, sizes, dim=1) if row.shape[1]]


def _causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any = None,
    activation: str | None = None,
    cu_seqlens: Any = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """``x`` ``[B, T, D]``, ``weight`` ``[D, W]``."""
    found = []
    for row in _rows(x, cu_seqlens):
        padded = F.pad(row.transpose(1, 2), (weight.size(1) - 1, 0))
        y = F.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.size(0)).transpose(1, 2)
        found.append(F.silu(y) if activation in ("silu", "swish") else y)
    return torch.cat(found, 1), None


def _chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    found = []
    for parts in zip(*(_rows(x, cu_seqlens) for x in (q, k, v, g, beta)), strict=True):
        y, _ = torch_chunk_gated_delta_rule(
            *parts[:3],
            g=parts[3],
            beta=parts[4],
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        found.append(y)
    return torch.cat(found, 1), None
