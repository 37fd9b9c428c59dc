"""Gradients and optimizers in Megatron's buffers: what is gathered in a window, and what becomes of it when it closes."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32

from twinkle_core.mesh import DeviceMesh
from twinkle_core.train import optim
from twinkle_core.train.loop_engine import LoopEngine, Window
from twinkle_megatron import checkpoint
from twinkle_megatron.cpu.runtime import computes
from twinkle_megatron.load import Built
from twinkle_megatron.optim import MegatronDistributedOptimizer


class BufferEngine(LoopEngine):
    """What an engine does with gradients: sums in Megatron's buffers until a window closes, with buffers and an optimizer of
    each adapter's own. Then they are reduced once, over data and context ranks, and divided by the window's weight, as Megatron
    does with ``num_tokens``.

    Args:
        built: the chunks of this rank.
        mesh, device: where it computes.
        on_nonfinite: see LoopEngine; fp16 always skips.
    """

    def __init__(
        self, built: Built, mesh: DeviceMesh, device: torch.device, on_nonfinite: Literal["raise", "skip"] = "raise"
    ) -> None:
        module = built.chunks[0] if len(built.chunks) == 1 else torch.nn.ModuleList(built.chunks)
        super().__init__(module, mesh=mesh, device=device, on_nonfinite="skip" if built.config.fp16 else on_nonfinite)
        self.built, self.chunks, self.config = built, built.chunks, built.config
        self._ddps: dict[int, list[Any]] = {}  # parameter -> the buffers that hold its gradient
        self._owners: weakref.WeakValueDictionary[int, MegatronDistributedOptimizer] = weakref.WeakValueDictionary()

    def _grad_scale(self) -> Any:
        """What multiplies a loss before its backward: the scaler of whoever owns the parameters that take part."""
        owner = next((self._owners.get(id(p)) for p in self.module.parameters() if p.requires_grad), None)
        return owner.inner.scale_loss if owner is not None and self.config.fp16 else None

    @computes
    def make_optimizer(
        self, cls: Any, parameters: Mapping[str, torch.nn.Parameter], kwargs: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """One set of buffers and one optimizer for these parameters; buffers of an optimizer before are used again."""
        optimizer = optim.build(cls, parameters, kwargs)
        assert isinstance(optimizer, MegatronDistributedOptimizer)
        optimizer.wrap(self._buffers(parameters, optimizer.distributed), self.config.params_dtype)
        scale = float(optimizer.inner.get_loss_scale()) if self.config.fp16 else 1.0
        for parameter in parameters.values():
            self._owners[id(parameter)] = optimizer
            if parameter.grad is not None:  # of an open window that began before there was an optimizer
                self.set_gradient(parameter, parameter.grad * scale)
                parameter.grad = None
        self.adopt_optimizer(optimizer)
        return optimizer

    def _buffers(self, parameters: Mapping[str, torch.nn.Parameter], distributed: bool) -> list[Any]:
        """Buffers for what is trainable now, those that are there if they hold just that: a parameter has one ``main_grad``."""
        found = [self._ddps.get(id(p)) for p in parameters.values()]
        first = found[0]
        held = {id(p) for ddp in first or () for p in ddp.params_with_grad}
        same = first is not None and all(ddps is first for ddps in found) and held == {id(p) for p in parameters.values()}
        if first is not None and same and first[0].ddp_config.use_distributed_optimizer == distributed:
            return first
        ddps = []
        for chunk in self.chunks:
            config = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
            ddps.append(DistributedDataParallel(self.config, config, chunk))
        self._ddps.update((id(p), ddps) for p in parameters.values())
        return ddps

    def forget(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Drop the buffers of an adapter that is gone."""
        for parameter in parameters.values():
            self._ddps.pop(id(parameter), None)
            self._owners.pop(id(parameter), None)

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        if id(parameter) in self._owners:
            return parameter.main_grad  # type: ignore[attr-defined,no-any-return]
        return parameter.grad

    def set_gradient(self, parameter: torch.nn.Parameter, value: torch.Tensor | None) -> None:
        if id(parameter) not in self._owners:
            parameter.grad = value
        elif value is None:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
        else:
            parameter.main_grad.copy_(value)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def _alone(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Only this optimizer's parameters are trainable: Megatron reduces again what it finds trainable, whosever it is."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        flags = [(p, p.requires_grad) for p in self.module.parameters()]
        try:
            for p, _ in flags:
                p.requires_grad_(id(p) in own)
            yield
        finally:
            for p, flag in flags:
                p.requires_grad_(flag)

    @computes
    def finish_grads(self, optimizer: Any, scale: torch.Tensor | float) -> bool:
        with self._alone(optimizer):
            finalize_model_grads(optimizer.ddps, None)
        for ddp in optimizer.ddps:
            ddp.scale_gradients(float(scale))
        overflow = bool(optimizer.inner.prepare_grads())
        norm = float(optimizer.inner.get_grad_norm())
        finite = not overflow and math.isfinite(norm)
        self._windows[optimizer] = Window(torch.tensor(norm, dtype=torch.float64), finite)
        return finite

    @computes
    def clip(self, optimizer: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        parts = [part for part in optimizer.inner.chained_optimizers if part.get_parameters()]
        window = self._windows[optimizer]
        norm = float(window.norm) if norm_type == 2 else self._norm(optimizer, norm_type)
        if norm > max_norm:
            for part in parts:
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=max_norm, total_norm=norm)
        return torch.tensor(norm, dtype=torch.float64)

    @staticmethod
    def _norm(optimizer: Any, norm_type: float) -> float:
        norms = [
            float(
                get_grad_norm_fp32(
                    part.get_main_grads_for_grad_norm(),
                    norm_type=norm_type,
                    grad_stats_parallel_group=part.get_grad_stats_parallel_group(),
                )
            )
            for part in optimizer.inner.chained_optimizers
        ]
        return max(norms) if math.isinf(norm_type) else sum(n**norm_type for n in norms) ** (1 / norm_type)

    @computes
    def update(self, optimizer: Any) -> bool:
        window = self._windows.get(optimizer)
        if window is not None and not window.finite:
            return False
        return bool(optimizer.step())

    @computes
    def zero_grad(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        self._windows.pop(optimizer, None)

    def optimizer_state(
        self, optimizer: Any, parameters: Mapping[str, torch.nn.Parameter]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {}, checkpoint.describe(optimizer)

    def prepare_optimizer_state(
        self,
        optimizer: Any,
        parameters: Mapping[str, torch.nn.Parameter],
        tensors: Mapping[str, torch.Tensor],
        data: Mapping[str, Any],
        folder: Path,
    ) -> dict[str, Any]:
        state = checkpoint.prepare(optimizer, self._slot(optimizer), data, folder)
        return {**state, "read": computes(state["read"])}

    @computes
    def write_shards(self, optimizer: Any, folder: Path) -> None:
        checkpoint.write(optimizer, self._slot(optimizer), folder)

    def _slot(self, optimizer: Any) -> str | None:
        """The slot of the adapter whose optimizer it is, by which its parameters are called."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = (name for chunk in self.chunks for name, p in chunk.named_parameters() if id(p) in own)
        _, mark, rest = next(names, "").partition(".lora_")
        return rest.split(".")[1] if mark else None

    def reload(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Weights have been set from outside: the optimizer's fp32 copies follow."""
        for optimizer in {id(o): o for p in parameters.values() if (o := self._owners.get(id(p))) is not None}.values():
            optimizer.inner.reload_model_params()
