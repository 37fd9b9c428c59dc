"""The verbs that close an accumulation window: normalise, clip, update, clear, schedule (L2)."""

from __future__ import annotations

import math
from typing import Any

import torch

from twinkle_core import plugins
from twinkle_core.contracts.adapters import BASE
from twinkle_core.contracts.metric import StepResult
from twinkle_core.errors import BadLossWeight, NonFiniteGradients, NoOptimizer
from twinkle_core.log import get_logger
from twinkle_core.ops.sharded import whole
from twinkle_core.train import limits, losses, normalise, optim
from twinkle_core.train.forward import ForwardVerbs
from twinkle_core.train.session import Session
from twinkle_core.train.sessions import one_at_a_time
from twinkle_core.train.together import meet, telling
from twinkle_core.train.window import CLIP, LR, STEP, ZERO


class UpdateVerbs(ForwardVerbs):
    """clip_grad_norm, step, zero_grad, lr_step, clip_grad_and_step, flush.

    Each acts once on a window that is due, and does nothing otherwise. Whichever of clip_grad_norm and step comes first
    normalises the gradients; the other does not repeat it.
    """

    @one_at_a_time
    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> float | None:
        """At the end of a window: normalise, then clip to a global norm.

        Args:
            max_grad_norm: the norm that is left at most, above 0; ``float('inf')`` measures without clipping.
            norm_type: of which norm, above 0; 2 is the usual one.
            gradient_accumulation_steps: becomes the session's.

        Returns:
            The norm before clipping (infinite where gradients overflowed and are to be skipped); None inside a window, a second
            time on the same window, and where nothing was labelled.

        Raises:
            BadArgument, NoOptimizer, WindowSizeChanged. NonFiniteGradients, BadLossWeight: weights and optimizer are
            unchanged, the window is dropped.
        """
        session = self._closing(CLIP, adapter_name, gradient_accumulation_steps, max_grad_norm, norm_type)
        return self._clip(session, max_grad_norm, norm_type)

    @one_at_a_time
    def step(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> bool:
        """At the end of a window: update the weights.

        Returns:
            Whether it did: False inside a window, a second time, where nothing was labelled, and where gradients that are not
            finite are skipped.

        Raises:
            NoOptimizer, WindowSizeChanged; NonFiniteGradients, BadLossWeight as for ``clip_grad_norm``.
        """
        session = self._closing(STEP, adapter_name, gradient_accumulation_steps)
        result = self._step(session)
        self._tell(session, result)
        return result is not None and result.acted

    @one_at_a_time
    def zero_grad(
        self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None, drop: bool = False
    ) -> bool:
        """At the end of a window: drop its gradients.

        Args:
            drop: give up an open window too. Metrics keep what they took in of its calls: they say what was computed.

        Returns:
            Whether it did.
        """
        session = self._session(adapter_name)
        if drop:
            held = session.window.count > 0
            session.window.reset()
            self._clear(session)
            session.window.resize(gradient_accumulation_steps)
            return held
        session.window.resize(gradient_accumulation_steps)
        return self._zero(session)

    @one_at_a_time
    def lr_step(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> bool:
        """At the end of a window, after an update: advance the scheduler by one.

        Returns:
            Whether it did: False before ``step``, where the update was skipped, and without a scheduler.
        """
        session = self._session(adapter_name)
        session.window.resize(gradient_accumulation_steps)
        return self._lr(session)

    @one_at_a_time
    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> float | None:
        """clip_grad_norm, step, zero_grad, lr_step. Arguments, returns and errors are those of ``clip_grad_norm``."""
        session = self._closing("clip_grad_and_step", adapter_name, gradient_accumulation_steps, max_grad_norm, norm_type)
        return self._close(session, max_grad_norm, norm_type)

    @one_at_a_time
    def flush(self, max_grad_norm: float = 1.0, norm_type: float = 2, *, adapter_name: str | None = None) -> float | None:
        """Close a short window (the end of an epoch): clip, step, zero_grad, lr_step, divided by what it really held.

        All data ranks call it together; one whose window is empty takes part while another's is not. It clips to a norm of 1
        unless told otherwise, as ``clip_grad_and_step`` does.

        Returns:
            The norm before clipping; None if no rank's window is open.
        """
        session = self._closing("flush", adapter_name, None, max_grad_norm, norm_type)
        window = session.window
        if not any(meet(self.engine, float(window.open))):
            return None
        if not window.open:
            window.reset()
        window.close()
        return self._close(session, max_grad_norm, norm_type)

    # ------------------------------------------------------------------------------------------------ inside

    def _closing(self, verb: str, adapter_name: str | None, size: int | None, *clip: Any) -> Session:
        """The session whose window a verb may close, checked. ``clip``: as ``limits.check_clip`` takes it."""
        with telling(self.engine):
            if clip:
                limits.check_clip(*clip)
            session = self._session(adapter_name)
            if session.optimizer is None:
                raise NoOptimizer(verb, session.name, self.sessions[BASE].optimizer is not None)
            session.window.resize(size)
        return session

    def _close(self, session: Session, max_grad_norm: float, norm_type: float) -> float | None:
        norm = self._clip(session, max_grad_norm, norm_type)
        result = self._step(session)
        self._zero(session)
        self._lr(session)
        self._tell(session, result)  # last: what a metric or hook raises must not cost the schedule its step
        return norm

    def _clip(self, session: Session, max_norm: float, norm_type: float) -> float | None:
        window = session.window
        about = f", clipped to a norm of {float(max_norm):g} (norm_type {float(norm_type):g})"
        if not window.acts(CLIP) or not self._finish(session, about):
            return None
        assert session.optimizer is not None
        if window.finite:
            norm: torch.Tensor | float = self.engine.clip(session.optimizer, max_norm, norm_type)
        else:
            norm = math.inf
        window.mark(CLIP)
        window.grad_norm = float(norm)
        return window.grad_norm

    def _step(self, session: Session) -> StepResult | None:
        """What became of the window, for ``_tell``; None where there was nothing to do."""
        window = session.window
        if not window.acts(STEP) or not self._finish(session):
            return None
        assert session.optimizer is not None
        plugins.hooks().twinkle_before_step(session=session)
        lr = _lr_of(session)
        window.updated = self.engine.update(session.optimizer)
        window.mark(STEP)
        if window.updated:
            session.cur_step += 1
            session.optimizer_age += 1
        else:
            session.skipped_steps += 1
            get_logger().warning("update skipped: gradients were not finite (%d skipped so far)", session.skipped_steps)
        if window.updated:
            session.pending.clear()  # they belong to weights that have changed
        session.pending.pop(True, None)
        return StepResult(window.updated, session.cur_step, window.grad_norm, lr, float(window.weight))

    def _zero(self, session: Session) -> bool:
        if not session.window.acts(ZERO):
            return False
        self._clear(session)
        session.window.mark(ZERO)
        return True

    def _lr(self, session: Session) -> bool:
        if not session.window.acts(LR) or session.scheduler is None:
            return False
        session.scheduler.step()
        session.window.mark(LR)
        return True

    def _finish(self, session: Session, about: str = "") -> bool:
        """Normalise the gradients of a due window, once. False: it held no item, and is closed without an update.

        Args:
            about: what is to be done with them, the same on all ranks, in words.
        """
        window = session.window
        if window.normalised:
            return True
        assert session.optimizer is not None
        try:
            several = self.engine.mesh.world_size > 1
            if several:
                made = f"{optim.rule(session.optimizer)} after {session.optimizer_age} updates"
                about = f" with {made}, {losses.name_of(self._loss(session))}{about}"
            weight = normalise.window_weight(self.engine, window.weight, about)
        except BadLossWeight:
            self._clear(session)
            window.reset()
            raise
        window.weight = weight
        if weight == 0:
            self._give_up(session)
            return False
        window.normalised = True
        window.finite = self.engine.finish_grads(session.optimizer, normalise.gradient_scale(self.engine, weight))
        if not window.finite and self.engine.on_nonfinite == "raise":
            error = self._nonfinite(session)
            self._clear(session)
            window.reset()
            raise error
        return True

    def _give_up(self, session: Session) -> None:
        """Close a window without any labelled item: no update, no lr_step, gradients cleared, one warning."""
        window = session.window
        get_logger().warning(
            "no item in this accumulation window has a label that is trained (all are -100): no update is made"
        )
        self._clear(session)
        window.normalised = True
        for verb in (CLIP, STEP, ZERO):
            window.mark(verb)
        session.skipped_steps += 1
        self._tell(session, StepResult(False, session.cur_step, None, _lr_of(session), 0.0))

    def _tell(self, session: Session, result: StepResult | None) -> None:
        """Metrics and hooks learn what became of a window."""
        if result is None:
            return
        for metric in session.metrics[True]:
            metric.on_step(result)
        plugins.hooks().twinkle_after_step(session=session, result=result)

    def _nonfinite(self, session: Session) -> NonFiniteGradients:
        found = {name: self.engine.gradient(p) for name, p in self._named(session).items()}
        grads = {name: whole(grad) for name, grad in found.items() if grad is not None}
        bad = [name for name, grad in grads.items() if not bool(torch.isfinite(grad).all())]
        loss = None if session.last_loss is None else float(session.last_loss)
        return NonFiniteGradients(session.name, bad[:3], max(0, len(bad) - 3), loss)


def _lr_of(session: Session) -> float:
    """The learning rate of the first parameter group; 0 where it has none."""
    assert session.optimizer is not None
    return float(session.optimizer.param_groups[0].get("lr", 0.0))
