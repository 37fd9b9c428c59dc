"""The few symbols of Megatron-Core that are CUDA-only where the answer on a CPU is plain, and faults of its fallback Adam."""

from __future__ import annotations

import logging
from typing import Any

import torch


def mend() -> None:
    """Replace them. Once, where there is no CUDA."""
    _random_state()
    _experts()
    _norm()
    _distributed_optimizer()


def _random_state() -> None:
    from megatron.core.tensor_parallel import random

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)  # the original calls torch._C

    random._set_cuda_rng_state = set_state
    # it warns of a CPU state that changes while the GPU's is another; here they are one
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor  # the original converts what is on CUDA

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_cpu
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 leaves the name unbound without Transformer Engine
        moe_utils.te_general_gemm = None


def _norm() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        """It asserts that there is no sequence parallelism; what it lacks for it is the mark on its weights."""
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = parallel
        for parameter in norm.parameters() if parallel else ():
            parameter.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = new


def _distributed_optimizer() -> None:
    """Without Transformer Engine and apex, Megatron's Adam is torch's, which keeps a ``step`` tensor for each parameter. Its
    checkpoints mishandle that in four places, one of them in silence."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    set_states, load, sharded = (
        Optimizer._set_main_param_and_optimizer_states,
        Optimizer.load_state_dict,
        Optimizer.sharded_state_dict,
    )

    def with_step(self: Any, model_param: Any, tensors: Any) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            tensors.setdefault("step", state["step"])  # copied onto itself
        return set_states(self, model_param, tensors)

    def with_own_steps(self: Any, state_dict: Any) -> Any:
        """After a load all parameters share one tensor, so that each update would count once for each of them."""
        result = load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
        return result

    def with_states(self: Any, model_state: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Before the first update there is no state, which the original takes for granted, to save and to load."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return sharded(self, model_state, is_loading, *args, **kwargs)

    Optimizer._set_main_param_and_optimizer_states = with_step
    Optimizer.load_state_dict = with_own_steps
    Optimizer.sharded_state_dict = with_states
