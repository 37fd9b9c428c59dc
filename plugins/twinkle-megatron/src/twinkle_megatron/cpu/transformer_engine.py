"""What Megatron-Core and mcore-bridge use of ``transformer_engine``, in plain PyTorch. No fp8; attention is torch's own."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from twinkle_megatron.cpu.attention import DotProductAttention

VERSION = "2.2.0"


def _mappings() -> Any:
    from megatron.core.tensor_parallel import mappings

    return mappings


def _mark(parameter: Any, dim: int | None) -> None:
    parameter.tensor_model_parallel, parameter.partition_stride = dim is not None, 1
    parameter.partition_dim = -1 if dim is None else dim


def _split(*parameters: Any, over_sequence: bool) -> None:
    """Say whether gradients of these are of a part of the sequence alone."""
    for parameter in parameters:
        if parameter is not None:
            parameter.sequence_parallel = over_sequence


class Linear(nn.Module):
    """A linear layer, split over tensor ranks by its rows (``column``) or columns (``row``), or not at all."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode, self.tp_size, self.tp_group = parallel_mode, tp_size, tp_group
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.sequence_parallel = bool(sequence_parallel and tp_size > 1 and parallel_mode)
        self.use_bias, self.return_bias = bias, return_bias
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.init_method = init_method
        self.weight: Any
        self.bias: Any
        self._allocate(bias, params_dtype)

    def _weight(self, dtype: torch.dtype, dim: int | None) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=dtype))
        _mark(weight, dim)
        random: Any = contextlib.nullcontext()
        if self.get_rng_state_tracker is not None:
            names = (self.rng_tracker_name,) if self.rng_tracker_name else ()
            random = self.get_rng_state_tracker().fork(*names)
        if self.init_method is not None:
            with random, torch.no_grad():
                self.init_method(weight)
        return weight

    def _dim(self) -> int | None:
        return {"column": 0, "row": 1}.get(self.parallel_mode or "")

    def _allocate(self, bias: bool, dtype: torch.dtype) -> None:
        dim = self._dim()
        self.weight = self._weight(dtype, dim)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(self.out_features, dtype=dtype))
            _mark(self.bias, 0 if dim == 0 else None)
            if dim == 1 and self.sequence_parallel:
                self.bias.sequence_parallel = True

    def _gathered(self, x: Any) -> Any:
        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        mappings = _mappings()
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
        return mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def _reduced(self, x: Any) -> Any:
        y = F.linear(x, self.weight.to(x.dtype))
        if self.parallel_mode == "row" and self.tp_size > 1:
            mappings = _mappings()
            if self.sequence_parallel:
                y = mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
            else:
                y = mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y if self.bias is None or self.return_bias else y + self.bias

    def forward(self, x: Any, is_first_microbatch: Any = None, **unused: Any) -> Any:
        y = self._reduced(self._gathered(x))
        return (y, self.bias) if self.return_bias else y

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group


def _normalised(x: Any, weight: Any, bias: Any, eps: float, kind: str, zero_centered: bool) -> Any:
    weight = weight + 1 if zero_centered else weight
    if kind == "RMSNorm":
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (weight.float() * wide).to(x.dtype)
    return F.layer_norm(x, (x.size(-1),), weight, bias, eps)


class LayerNormLinear(Linear):
    """A norm and a linear layer in one."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight: Any = nn.Parameter(start(in_features, dtype=self.weight.dtype))
        self.layer_norm_bias: Any = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, dtype=self.weight.dtype))
        _split(self.layer_norm_weight, self.layer_norm_bias, over_sequence=self.sequence_parallel)

    def forward(self, x: Any, is_first_microbatch: Any = None, **unused: Any) -> Any:
        normed = _normalised(
            x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.normalization, self.zero_centered_gamma
        )
        gathered = self._gathered(normed)
        results = [self._reduced(gathered)]
        if self.return_bias:
            results.append(self.bias)
        if self.return_layernorm_output:
            results.append(gathered if self.return_layernorm_output_gathered else normed)
        return results[0] if len(results) == 1 else tuple(results)


class GroupedLinear(Linear):
    """One linear layer for each expert; rows come sorted by expert."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **kwargs: Any) -> None:
        self.num_gemms = num_gemms
        super().__init__(in_features, out_features, **kwargs)

    def _allocate(self, bias: bool, dtype: torch.dtype) -> None:
        for i in range(self.num_gemms):
            setattr(self, f"weight{i}", self._weight(dtype, self._dim()))
            if bias:
                setattr(self, f"bias{i}", nn.Parameter(torch.zeros(self.out_features, dtype=dtype)))

    def forward(  # type: ignore[override]  # as Transformer Engine's own
        self, x: Any, m_splits: Any, is_first_microbatch: Any = None, **unused: Any
    ) -> Any:
        sizes = m_splits.tolist() if torch.is_tensor(m_splits) else list(m_splits)
        biases = [getattr(self, f"bias{i}") if self.use_bias else None for i in range(self.num_gemms)]
        parts = [
            F.linear(part, getattr(self, f"weight{i}").to(part.dtype), None if self.return_bias else biases[i])
            for i, part in enumerate(x.split(sizes))
        ]
        y = torch.cat(parts)
        return (y, biases) if self.return_bias else y


class RMSNorm(nn.Module):
    """A norm whose weights may be marked for sequence parallelism."""

    kind = "RMSNorm"

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype = torch.float32,
        hidden_size: int | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        size = normalized_shape if normalized_shape is not None else hidden_size
        assert size is not None
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight: Any = nn.Parameter((torch.zeros if zero_centered_gamma else torch.ones)(size, dtype=params_dtype))
        self.bias: Any = nn.Parameter(torch.zeros(size, dtype=params_dtype)) if self.kind == "LayerNorm" else None
        _split(self.weight, self.bias, over_sequence=sequence_parallel)

    def forward(self, x: Any) -> Any:
        return _normalised(x, self.weight, self.bias, self.eps, self.kind, self.zero_centered_gamma)


class LayerNorm(RMSNorm):
    """The one with a mean and a bias."""

    kind = "LayerNorm"


MODULES = (
    *("", ".common", ".common.recipe", ".pytorch", ".pytorch.fp8", ".pytorch.distributed", ".pytorch.attention"),
    *(".pytorch.attention.rope", ".pytorch.utils", ".pytorch.float8_tensor", ".pytorch.tensor", ".pytorch.ops"),
)


def _named(*names: str) -> dict[str, type]:
    """Empty modules by name: Megatron names them in annotations, PEFT asks with isinstance."""
    return {name: type(name, (nn.Module,), {}) for name in names}


def install() -> None:
    """Put it into ``sys.modules``."""
    from torch.utils.checkpoint import checkpoint

    modules: dict[str, Any] = {name: types.ModuleType("transformer_engine" + name) for name in MODULES}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        sys.modules[module.__name__] = module
        if name:
            parent, _, last = name.rpartition(".")
            setattr(modules[parent], last, module)
    modules[""].__version__ = VERSION

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    pytorch = modules[".pytorch"]
    for layer in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention):
        setattr(pytorch, layer.__name__, layer)
    vars(pytorch).update(_named("LayerNormMLP"))
    pytorch.fp8_model_init = pytorch.fp8_autocast = nothing
    vars(modules[".pytorch.ops"]).update(
        _named("Sequential", "BasicLinear", "Bias", "LayerNorm", "RMSNorm", "Linear", "FusibleOperation")
    )
    fp8, distributed, recipe = modules[".pytorch.fp8"], modules[".pytorch.distributed"], modules[".common.recipe"]
    fp8.fp8_model_init = fp8.fp8_autocast = nothing
    fp8.FP8GlobalStateManager = type("FP8GlobalStateManager", (), {"is_fp8_enabled": staticmethod(lambda: False)})
    recipe.DelayedScaling, recipe.Format = type("DelayedScaling", (), {}), type("Format", (), {})
    modules[".pytorch.tensor"].QuantizedTensor = type("QuantizedTensor", (torch.Tensor,), {})
    modules[".pytorch.float8_tensor"].Float8Tensor = type("Float8Tensor", (torch.Tensor,), {})
    distributed.CudaRNGStatesTracker = type("CudaRNGStatesTracker", (), {})
    distributed.activation_recompute_forward, distributed.checkpoint = nothing, checkpoint
