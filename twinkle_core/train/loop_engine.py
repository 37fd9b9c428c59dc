"""Core's engine for backends that can split a step (L2): a for loop over micro-batches, torch optimizers, a gradient scaler."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.nn.utils import get_total_norm

from twinkle_core.contracts.engine import SPLIT_STEP, Batch, Engine, LossFn
from twinkle_core.mesh import DeviceMesh
from twinkle_core.ops.sharded import local
from twinkle_core.train import optim, prepare
from twinkle_core.train.session import Session
from twinkle_core.train.together import check_shared, meet
from twinkle_core.types import InputFeature


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """No gradients and no dropout inside; on leaving, the training flag of each submodule is what it was.

    ``no_grad`` and not inference mode: its outputs may be used in a later loss (reference logps), and caches that a model
    fills meanwhile (rotary tables) in later training. Inference tensors may not.
    """
    training = [m for m in module.modules() if m.training]
    for m in training:
        m.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for m in training:
            m.training = True


class Window:
    """What an engine remembers of one optimizer's window between ``finish_grads`` and ``zero_grad``."""

    __slots__ = ("finite", "norm")

    def __init__(self, norm: torch.Tensor, finite: bool) -> None:
        self.norm, self.finite = norm, finite


class LoopEngine(Engine):
    """One forward and one backward after the other. A backend overrides ``forward``, and what differs.

    Args:
        module: what is trained; its training flags are set aside in ``forward_only``. Put it in training mode yourself.
        mesh: default one rank.
        device: default that of the module's first parameter.
        scaler: a gradient scaler for fp16; an overflow then skips the update, whatever ``on_nonfinite`` says.
        on_nonfinite: what NaN or infinite gradients do: ``raise``, or ``skip`` the update.
    """

    capabilities = frozenset({SPLIT_STEP})

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        self.module = module
        self.mesh = mesh or DeviceMesh.from_sizes()
        first = next(module.parameters(), None)
        self.device = torch.device(device) if device is not None else first.device if first is not None else torch.device("cpu")
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.on_nonfinite = "skip" if self.scaler is not None else on_nonfinite
        self._windows: weakref.WeakKeyDictionary[torch.optim.Optimizer, Window] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    # ------------------------------------------------------------------------------------------------ computing

    def prepare(
        self,
        session: Session,
        rows: Sequence[InputFeature] | InputFeature,
        *,
        micro_batch_size: int | None = None,
        loss_args: Mapping[str, Any] | None = None,
    ) -> list[Batch]:
        assert session.processor is not None  # core resolves what falls back to the base before it calls an engine
        several = self.mesh.world_size > self.mesh.data_world_size  # ranks on one share of the rows
        given = prepare.fingerprint(rows, micro_batch_size, loss_args) if several else 0
        made = prepare.prepare(
            rows,
            device=self.device,
            processor=session.processor,
            loss=session.loss,
            micro_batch_size=micro_batch_size,
            loss_args=loss_args,
        )  # before ranks meet: rows that can't be used are told there
        return prepare.fill(made, self.most(len(made), given), rows, session.processor, self.device)

    def most(self, count: int, given: int) -> int:
        """How many micro-batches each data rank makes, where this one has ``count``: as the one with most. Ranks meet.

        Args:
            given: the fingerprint of the rows, the same on all ranks that compute together on one share of them.

        Raises:
            RanksApart: ranks that compute together on one share of the rows were given different ones, or loss arguments.
        """
        told = [divmod(int(each), 2**20) for each in meet(self, given * 2**20 + count)]  # exact in float64
        check_shared(self.mesh, [theirs for theirs, _ in told])
        return max(count for _, count in told)

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
        with self.mode(train):
            for i, batch in enumerate(batches):
                output = self.forward(batch, needs, train=train, temperature=temperature, task=task)
                loss = loss_fn(batch, output)
                if train:
                    del output  # its tensors are the graph's now; nothing else may keep them alive during backward
                    self.backward(loss.sum, sync=sync and i == len(batches) - 1)

    def mode(self, train: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if train else evaluating(self.module)

    def backward(self, loss_sum: torch.Tensor, *, sync: bool = True) -> None:
        scaled = loss_sum if self.scaler is None else self.scaler.scale(loss_sum)
        torch.autograd.backward(scaled)

    # ------------------------------------------------------------------------------------------------ optimizing

    def make_optimizer(
        self, cls: Any, parameters: Mapping[str, torch.nn.Parameter], kwargs: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        optimizer = optim.build(cls, parameters, kwargs)
        self.adopt_optimizer(optimizer)
        return optimizer

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.add(optimizer)

    def finish_grads(self, optimizer: torch.optim.Optimizer, scale: torch.Tensor | float) -> bool:
        grads = [local(g) for g in gradients(optimizer)]
        if self.scaler is not None and grads:
            self.unscale(optimizer)
        if grads:
            torch._foreach_mul_(grads, scale)
        norm = self.total_norm(optimizer, 2.0)
        # The one synchronisation of a window besides its weight. A norm that overflowed is not yet a gradient that did.
        finite = math.isfinite(norm.item()) or self.agree(all(bool(torch.isfinite(g).all()) for g in grads))
        self._windows[optimizer] = Window(norm, finite)
        return finite

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float) -> torch.Tensor:
        window = self._windows.get(optimizer)
        norm = window.norm if window is not None and norm_type == 2 else self.total_norm(optimizer, norm_type)
        if norm.item() > max_norm:  # known on the host already, so the usual step writes its gradients once, not twice
            # as torch's clip_grads_with_norm_, on each rank's parts
            torch._foreach_mul_([local(g) for g in gradients(optimizer)], torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the scaler's scale out of all gradients, and let it learn whether one overflowed."""
        assert self.scaler is not None
        self.scaler.unscale_(optimizer)

    def total_norm(self, optimizer: torch.optim.Optimizer, norm_type: float) -> torch.Tensor:
        """The norm of all gradients as one vector. A backend whose ranks hold parts of them adds these up."""
        return get_total_norm(gradients(optimizer), norm_type)

    def agree(self, fine: bool) -> bool:
        """Whether all is fine on every rank. Default: one rank."""
        return fine

    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        window = self._windows.get(optimizer)
        finite = window is None or window.finite
        if finite:  # asked here and not of the scaler, which has not seen what normalising made of the gradients
            optimizer.step()
        if self.scaler is not None:
            self._rescale(optimizer)
        return finite

    def _rescale(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the scaler learn from this window alone, and open windows of other optimizers follow a new scale.

        ``GradScaler.update`` judges and forgets all optimizers that it has unscaled; a second one that is between clipping and
        its step would be unscaled again. Following a new scale is exact: a power of two.
        """
        scaler = self.scaler
        assert scaler is not None
        states = scaler._per_optimizer_states
        own = states.pop(id(optimizer), None)
        if own is None or not own["found_inf_per_device"]:  # it had no gradient
            return
        others = dict(states)
        states.clear()
        states[id(optimizer)] = own
        before = scaler.get_scale()
        scaler.update()
        scaler._per_optimizer_states.update(others)
        after = scaler.get_scale()
        self._follow(after / before, optimizer)

    def _follow(self, ratio: float, but: torch.optim.Optimizer | None = None) -> None:
        """Bring the gradients of open windows, which are scaled still, to a new scale."""
        for optimizer in self._optimizers if ratio != 1 else ():
            if optimizer is not but and optimizer not in self._windows and (grads := gradients(optimizer)):
                torch._foreach_mul_(grads, ratio)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        window = self._windows.pop(optimizer, None)
        if window is not None and self.scaler is not None:
            # a window that was unscaled and then given up: the scaler must forget that it saw it
            self.scaler._per_optimizer_states.pop(id(optimizer), None)

    # ------------------------------------------------------------------------------------------------ state

    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else {"scaler": dict(self.scaler.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scaler is not None and "scaler" in state:
            before = self.scaler.get_scale()
            self.scaler.load_state_dict(dict(state["scaler"]))
            self._follow(self.scaler.get_scale() / before)  # other adapters' windows stay as they were meant

    def describe(self) -> dict[str, Any]:
        return {"model": type(self.module).__name__, "device": str(self.device)}


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients that are there."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
