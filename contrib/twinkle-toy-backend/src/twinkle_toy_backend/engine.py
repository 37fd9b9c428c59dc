"""How to compute: one forward, and how data ranks meet. The loop, optimizers and clipping are core's LoopEngine's."""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed as dist

from twinkle_core.contracts.engine import Batch
from twinkle_core.errors import NotComputed, UnknownOption
from twinkle_core.mesh import DeviceMesh
from twinkle_core.ops.from_hidden import FROM_HIDDEN, from_hidden
from twinkle_core.ops.gather import Ranks
from twinkle_core.train.loop_engine import LoopEngine
from twinkle_core.train.together import leave
from twinkle_core.types import ModelOutput


class ToyEngine(LoopEngine):
    """Plain PyTorch on the CPU. It can split a step and can't generate: ``capabilities`` is what LoopEngine says.

    Args:
        module: gives hidden states, and has an ``output_layer``.
        mesh: data ranks alone; each holds all weights.
    """

    def __init__(self, module: torch.nn.Module, *, mesh: DeviceMesh | None = None) -> None:
        super().__init__(module, mesh=mesh)
        if self.mesh.sizes["dp"] != self.mesh.world_size:
            raise UnknownOption("device_mesh", self.mesh, None, ["a mesh of dp_size alone"])
        if self.mesh.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")  # by torchrun's environment
            atexit.register(leave)

    def forward(
        self, batch: Batch, needs: frozenset[str], *, train: bool, temperature: float = 1.0, task: str = "causal_lm"
    ) -> ModelOutput:
        """What ``needs`` names, and nothing else. What can't be done is refused before anything is computed."""
        if task != "causal_lm":
            raise UnknownOption("task", task, None, ["causal_lm"])
        if unknown := sorted(needs - FROM_HIDDEN):
            raise NotComputed("ToyModel", unknown[0], "it is a language model, with logits and what is made of them")
        # logits only where they are asked for; else at labelled tokens alone, and never all at once
        return from_hidden(self.module(batch.inputs), self.module.output_layer, batch.inputs, needs, temperature)

    def all_reduce(self, x: torch.Tensor, over: str = "dp") -> torch.Tensor:
        """Here: sums gradients."""
        if self.mesh.world_size > 1:
            dist.all_reduce(x := x.clone())
        return x

    def gather_objects(self, obj: Any, over: str = "dp") -> list[Any]:
        """Ranks meet with it in each verb: they tell what they call, how many micro-batches they have, what a window weighs;
        core merges the states of metrics with it."""
        found = [obj] * self.mesh.world_size
        if len(found) > 1:
            dist.all_gather_object(found, obj)
        return found

    def ranks(self, over: str = "dp") -> Any:
        """A loss that compares rows of all ranks gathers with it."""
        return Ranks() if self.mesh.world_size > 1 else None

    def finish_grads(self, optimizer: torch.optim.Optimizer, scale: torch.Tensor | float) -> bool:
        """The window has closed: sum its gradients over ranks (each rank holds sums over its own tokens), then as ever.

        A rank that had no row in a whole window has no gradients; it takes part with zeros.
        """
        if self.mesh.world_size > 1:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            anyone = self.all_reduce(torch.tensor([float(p.grad is not None) for p in parameters]))
            for p in (p for p, some in zip(parameters, anyone.tolist(), strict=True) if some):
                p.grad = self.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad)
        return super().finish_grads(optimizer, scale)
