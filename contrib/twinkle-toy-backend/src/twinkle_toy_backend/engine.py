"""How to compute: one forward, and how data ranks meet. The loop, optimizers and clipping are core's LoopEngine's."""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed as dist

from twinkle_core.contracts.engine import Batch
from twinkle_core.errors import NotComputed, UnknownOption
from twinkle_core.mesh import DeviceMesh
from twinkle_core.ops.gather import Ranks
from twinkle_core.ops.token_logps import Tempered, token_logps
from twinkle_core.train.loop_engine import LoopEngine
from twinkle_core.types import ModelOutput

#: what ``forward`` can be asked for
GIVES = frozenset({"logits", "logps", "entropies", "predictions", "hidden"})


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
        self.alone = self.mesh.world_size == 1
        if not self.alone and not dist.is_initialized():
            dist.init_process_group("gloo")  # by torchrun's environment
            atexit.register(_leave)

    def forward(
        self, batch: Batch, needs: frozenset[str], *, train: bool, temperature: float = 1.0, task: str = "causal_lm"
    ) -> ModelOutput:
        """What ``needs`` names, and nothing else. What can't be done is refused before anything is computed."""
        if task != "causal_lm":
            raise UnknownOption("task", task, None, ["causal_lm"])
        if unknown := sorted(needs - GIVES):
            raise NotComputed("ToyModel", unknown[0], "it is a language model, with logits and what is made of them")
        hidden = self.module(batch.inputs)
        layer = Tempered(self.module.output_layer, temperature)
        output = ModelOutput(hidden=hidden, output_layer=layer)
        if "logits" in needs:
            output.logits = layer(hidden)
        if needs & {"logps", "entropies", "predictions"}:  # only at labelled tokens, and never all logits at once
            wanted = {"entropies": "entropies" in needs, "predictions": "predictions" in needs}
            found = token_logps(hidden, layer, batch.inputs["labels"], **wanted)
            output |= dict(zip(("logps", "entropies", "predictions"), found, strict=True))
        return ModelOutput({k: v for k, v in output.items() if k in needs or (k == "output_layer" and "hidden" in needs)})

    def all_reduce(self, x: torch.Tensor, over: str = "dp") -> torch.Tensor:
        """Core sums the weight of a window with it: the one divisor of all ranks' gradients."""
        if not self.alone:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def gather_objects(self, obj: Any, over: str = "dp") -> list[Any]:
        """Core merges the states of metrics with it, and agrees on the number of micro-batches."""
        found: list[Any] = [obj] * self.mesh.world_size
        if not self.alone:
            dist.all_gather_object(found, obj)
        return found

    def ranks(self, over: str = "dp") -> Any:
        """A loss that compares rows of all ranks gathers with it."""
        return None if self.alone else Ranks()

    def finish_grads(self, optimizer: torch.optim.Optimizer, scale: torch.Tensor | float) -> bool:
        """The window has closed: sum its gradients over ranks (each rank holds sums over its own tokens), then as ever.

        A rank that had no row in a whole window has no gradients; it takes part with zeros.
        """
        if not self.alone:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            anyone = self.all_reduce(torch.tensor([float(p.grad is not None) for p in parameters]))
            for p in (p for p, some in zip(parameters, anyone.tolist(), strict=True) if some):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
        return super().finish_grads(optimizer, scale)


def _leave() -> None:
    """Threads of a process group that is left open can abort a process that has done its work."""
    if dist.is_initialized():
        dist.destroy_process_group()
