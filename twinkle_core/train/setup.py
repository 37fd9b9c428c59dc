"""The verbs that set a session up, and those that tell about it (L2)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from twinkle_core import arguments, plugins, registry
from twinkle_core.contracts.adapters import BASE
from twinkle_core.contracts.loss import Loss
from twinkle_core.contracts.metric import Metric
from twinkle_core.contracts.patch import Patch
from twinkle_core.contracts.processor import Processor
from twinkle_core.contracts.template import Template
from twinkle_core.errors import (
    BadAdapter,
    BadArgument,
    BadScheduler,
    DuplicateAdapter,
    NoOptimizer,
    NoTrainableParameters,
    WindowNotStepped,
)
from twinkle_core.log import get_logger
from twinkle_core.train import base_values, checkpoint, folder, losses, optim, report, schedulers
from twinkle_core.train.session import Session
from twinkle_core.train.sessions import Sessions, one_at_a_time
from twinkle_core.train.together import meet, together, until_met


class SetupVerbs(Sessions):
    """set_*, add_metric, calculate_metric, apply_patch, adapters, get_train_configs."""

    @one_at_a_time
    def set_loss(self, loss_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """A Loss, its class, its name, or a callable ``(inputs, outputs, **loss_args)`` that returns a mean or LossOutput.

        A callable gets ``outputs.logits`` and nothing else, unless it declares what it reads, before it is given here::

            def nll(inputs, outputs):
                return -outputs.logps.sum() / (inputs["labels"] != -100).sum()

            nll.needs = {"logps"}

        Args:
            kwargs: for its constructor; checked here, not at the first step.

        Raises:
            WrongArgument, NotA. BadNeeds: it declares to read what no model gives.
        """
        session = self._session(adapter_name)
        spec = registry.resolve("loss", loss_cls)
        plain = callable(spec) and not inspect.isclass(spec) and not isinstance(spec, Loss)
        built = registry.build("loss", spec if plain else loss_cls, kwargs, contract=None if plain else Loss)
        loss = losses.FunctionLoss(built) if plain else built
        losses.check_needs(losses.name_of(loss), loss.needs, losses.READABLE)
        session.loss = loss
        for waiting in session.pending.values():
            for part in waiting:
                part.loss = None

    @one_at_a_time
    def set_optimizer(self, optimizer_cls: Any = "adamw", *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """An optimizer over this adapter's trainable parameters.

        Args:
            optimizer_cls: a name, a class, a function ``(parameters, **kwargs)``, or an optimizer over its parameters.
            kwargs: for it. Defaults: lr 1e-5, weight_decay 0.01, none on biases and norms.

        Raises:
            WrongArgument, BadArgument, NoTrainableParameters, BadOptimizer. NotInOptimizer: a window is open, and its gradients
            lack a parameter that has been unfrozen since.
        """
        session = self._session(adapter_name)
        if session.window.normalised and not session.window.finished:
            raise WindowNotStepped(session.window.count)
        spec = registry.resolve("optimizer", optimizer_cls)
        parameters = self.adapters.parameters(session.name)
        if session.window.open and session.optimizer is not None:
            optim.check_same(session.name, parameters, session.named, session.window.count)
        if callable(spec) and not hasattr(spec, "param_groups"):
            optim.check_kwargs(spec, kwargs)
            if not parameters:
                raise NoTrainableParameters(session.name)
            with self.adapters.activate(session.name):
                built = self.engine.make_optimizer(spec, parameters, kwargs)
        else:
            built = registry.build("optimizer", spec, kwargs)
            optim.check_usable(built)
            optim.check_covers(built, parameters)
            self.engine.adopt_optimizer(built)
        if session.scheduler is not None:
            get_logger().warning("the scheduler belonged to the optimizer before; call set_lr_scheduler again")
            session.scheduler = None
        session.optimizer, session.named, session.optimizer_age = built, dict(parameters), 0
        left = optim.left_out(built, parameters)
        if left:
            names = ", ".join(list(left)[:3]) + (", ..." if len(left) > 3 else "")
            text = "%d trainable parameter(s) are not in the optimizer and stay as they are: %s"
            get_logger().warning(text, len(left), names)
        if not session.window.open:  # what an optimizer of fewer parameters may have left on the others
            for parameter in parameters.values():
                parameter.grad = None

    @one_at_a_time
    def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """A scheduler, its class or its name. Its steps are optimizer updates, never micro-batches.

        Raises:
            NoOptimizer: set_optimizer comes first. WrongArgument, BadScheduler.
        """
        session = self._session(adapter_name)
        if session.optimizer is None:
            raise NoOptimizer("set_lr_scheduler", session.name, self.sessions[BASE].optimizer is not None)
        spec = registry.resolve("scheduler", scheduler_cls)
        schedulers.check_usable(spec)
        if inspect.isclass(spec) or (callable(spec) and not hasattr(spec, "get_last_lr")):
            schedulers.check_makeable(spec, kwargs)
            arguments.check(spec, kwargs, positional=1, complete=True)
            schedulers.rehearse(spec, session.optimizer, kwargs)
            session.scheduler = spec(session.optimizer, **kwargs)
            return
        built = registry.build("scheduler", spec, kwargs)
        if getattr(built, "optimizer", None) is not session.optimizer:
            raise BadScheduler(type(built).__name__, "it was made for another optimizer; give its class, with its arguments")
        session.scheduler = built

    @one_at_a_time
    def set_template(self, template_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """A Template, its class or its name."""
        session = self._session(adapter_name)
        session.template = registry.build("template", template_cls, kwargs, contract=Template)

    @one_at_a_time
    def set_processor(self, processor_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """A Processor, its class or its name."""
        session = self._session(adapter_name)
        session.processor = registry.build("processor", processor_cls, kwargs, contract=Processor)

    @one_at_a_time
    def add_metric(
        self, metric_cls: Any, is_training: bool | None = None, *, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """A Metric, its class or its name.

        A metric of training counts what was computed: each ``forward_backward`` (or ``backward``) that succeeded, when it did.
        What becomes of the gradients afterwards takes nothing out: calls of a window that is dropped later
        (``zero_grad(drop=True)``, NonFiniteGradients) or whose update is skipped stay counted, since the numbers may have
        been read and reset within the window. A call that fails counts nothing. ``on_step`` tells a metric which windows
        led to an update (``skipped`` of ``train``).

        Args:
            is_training: True: of training calls; False: of ``forward_only``; None: one for each (of an instance, a copy).

        Raises:
            BadArgument, WrongArgument, NotA. BadNeeds: it declares to read what no model gives.
        """
        if is_training is not None and not isinstance(is_training, bool):
            raise BadArgument("is_training", is_training, "True, False or None")
        session = self._session(adapter_name)
        metric: Metric = registry.build("metric", metric_cls, kwargs, contract=Metric)
        losses.check_needs(type(metric).__name__, metric.needs, losses.READABLE | losses.OF_CORE)
        if is_training is not False:
            session.metrics[True].append(metric)
        if is_training is not True:
            session.metrics[False].append(copy.deepcopy(metric) if is_training is None else metric)

    @one_at_a_time
    def calculate_metric(self, is_training: bool = True, *, adapter_name: str | None = None) -> dict[str, float]:
        """Numbers of all metrics of a mode: states are reduced over data ranks, computed, and reset.

        Raises:
            BadMetricResult: a metric gave something else than numbers by name.
        """
        if not isinstance(is_training, bool):
            raise BadArgument("is_training", is_training, "True (training) or False (evaluation)")
        session = self._session(adapter_name)
        metrics, numbers = session.metrics[is_training], dict[str, float]()
        for metric, states in zip(metrics, self._states_of(metrics), strict=True):
            metric.reset()
            for state in states:
                metric.merge(state)
            numbers |= report.numbers_of(type(metric).__name__, metric.calculate())
            metric.reset()
        seen = MappingProxyType(dict(numbers))  # what a listener does to it is not the caller's, nor the other way round
        plugins.hooks().twinkle_metrics_logged(step=session.cur_step, metrics=seen, session=session, is_training=is_training)
        return numbers

    def _states_of(self, metrics: Sequence[Metric]) -> Iterable[tuple[Any, ...]]:
        """The states of each metric, on all data ranks. Ranks meet."""
        with until_met(self.engine, bool(metrics)):
            states = [metric.state() for metric in metrics]
            if metrics:
                meet(self.engine, about=f" with {', '.join(type(metric).__name__ for metric in metrics)}")
        return zip(*self.engine.gather_objects(states), strict=True) if metrics else ()

    @one_at_a_time
    def apply_patch(self, patch_cls: Any, **kwargs: Any) -> None:
        """A Patch, its class or its name; model-wide."""
        with until_met(self.engine):
            patch = registry.build("patch", patch_cls, kwargs, contract=Patch)
            meet(self.engine, about=f": {type(patch).__name__}")
        with together(self.engine, None):
            patch.apply(self)
        self.patches.append(patch)

    @one_at_a_time
    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int | None = None
    ) -> None:
        """A new adapter from a config, or from a folder that holds one.

        Raises:
            DuplicateAdapter: the live one is untouched. BadAdapter, BadWindowSize: nothing was made.
        """
        with until_met(self.engine):
            if not isinstance(adapter_name, str) or not adapter_name:
                raise BadAdapter(str(adapter_name), "a name is a text of at least one character ('' is the base model)")
            if adapter_name in self.sessions:
                raise DuplicateAdapter(adapter_name)
            session = Session(adapter_name)
            session.window.resize(gradient_accumulation_steps)
            state = None
            if isinstance(config_or_dir, (str, Path)) and (Path(config_or_dir) / folder.STATE_FILE).is_file():
                state = checkpoint.read_state(Path(config_or_dir), hashes=False)
        self.adapters.acquire(adapter_name, config_or_dir)
        try:
            meet(self.engine, about=checkpoint.said(state))
        except BaseException:
            self.adapters.release(adapter_name)
            raise
        self.sessions[adapter_name] = session
        if state is not None:
            base_values.check(self, session, state, Path(config_or_dir), strict=False)

    @one_at_a_time
    def remove_adapter(self, adapter_name: str) -> None:
        """Remove an adapter with all its state: weights, optimizer, scheduler, metrics, window. All ranks call it together."""
        with until_met(self.engine):
            if adapter_name == BASE:
                raise BadAdapter(adapter_name, "the base model can't be removed")
            session = self._session(adapter_name)
        if session.optimizer is not None:
            self.engine.zero_grad(session.optimizer)
        self.adapters.release(session.name)
        del self.sessions[session.name]

    @one_at_a_time
    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """A table to print: model, parameters, mesh, precision, loss, optimizer, scheduler, template, metrics, plugins.
        One rank may ask for it alone."""
        session = self._session(adapter_name)
        return report.table(self, session)
