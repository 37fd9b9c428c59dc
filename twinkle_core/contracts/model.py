"""What a model is: the 23 verbs of the training loop, and four more (L0).

Dispatch and collect of each verb are declared here, once; a runtime builds its remote proxy from these declarations. A loss
travels as (sum, weight) and a metric as state, so that collecting is never a mean of means.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import UnknownAdapter, Unsupported
from twinkle_core.runtime.dispatch import remote_function
from twinkle_core.types import InputFeature, ModelOutput, Trajectory

if TYPE_CHECKING:
    import torch

#: Encoded rows, one collated batch, or raw trajectories (then the session's template encodes them); groups give their rows.
Inputs = Sequence[InputFeature] | InputFeature | Sequence[Trajectory] | Trajectory


class TwinkleModel(ABC):
    """A model together with the state of its training.

    Every verb takes ``adapter_name``. When it is not given: the enclosing ``adapter()`` context, else the only adapter, else
    the base model (``''``). More than one adapter and none named is an error that lists them.
    """

    @remote_function(dispatch="slice_dp", collect="rows")
    @abstractmethod
    def forward(
        self,
        inputs: Inputs,
        *,
        adapter_name: str | None = None,
        return_logits: bool = True,
        temperature: float = 1.0,
        task: str = "causal_lm",
    ) -> ModelOutput:
        """Forward with gradients; kept for ``calculate_loss`` and ``backward`` of the same adapter."""

    @remote_function(dispatch="slice_dp", collect="rows")
    @abstractmethod
    def forward_only(
        self,
        inputs: Inputs,
        *,
        adapter_name: str | None = None,
        disable_lora: bool = False,
        return_logits: bool = True,
        temperature: float = 1.0,
        task: str = "causal_lm",
        micro_batch_size: int | None = None,
        **loss_args: Any,
    ) -> ModelOutput:
        """Inference mode: no graph, no dropout; training flags are put back. Micro-batches are joined in row order."""

    @remote_function(dispatch="along", collect="loss")
    @abstractmethod
    def calculate_loss(self, *, adapter_name: str | None = None, **loss_args: Any) -> float:
        """The loss (mean per item) of this adapter's last training forward; of its last ``forward_only`` if there is none."""

    @remote_function(dispatch="all", collect="none")
    @abstractmethod
    def backward(self, *, adapter_name: str | None = None) -> None:
        """Gradients of the last calculated loss. Counts one towards the accumulation window."""

    @remote_function(dispatch="slice_dp", collect="loss")
    @abstractmethod
    def forward_backward(
        self,
        inputs: Inputs,
        *,
        adapter_name: str | None = None,
        micro_batch_size: int | None = None,
        gradient_accumulation_steps: int | None = None,
        temperature: float = 1.0,
        task: str = "causal_lm",
        **loss_args: Any,
    ) -> torch.Tensor | float:
        """Forward, loss and backward. Counts one towards the window, however many pieces ``micro_batch_size`` cuts it into.

        Returns:
            Mean loss per item over the rows given: a detached 0-d tensor (no device synchronisation).
        """

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> float | None:
        """At the end of a window: normalise, then clip. Returns the norm before clipping; None inside a window."""

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def step(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> bool:
        """At the end of a window: update the weights. Returns whether it did."""

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def zero_grad(
        self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None, drop: bool = False
    ) -> bool:
        """At the end of a window: drop its gradients. ``drop=True`` gives up an open window too. Returns whether it did."""

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def lr_step(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> bool:
        """At the end of a window, after an update: advance the scheduler by one. Returns whether it did."""

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> float | None:
        """clip_grad_norm, step, zero_grad, lr_step. Returns the norm before clipping; None inside a window."""

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def flush(self, max_grad_norm: float = 1.0, norm_type: float = 2, *, adapter_name: str | None = None) -> float | None:
        """Close a short window (the end of an epoch), on all ranks together: clip, step, zero_grad, lr_step. None if empty."""

    @remote_function(dispatch="all", collect="none")
    @abstractmethod
    def set_loss(self, loss_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """A Loss, its class, its name, or a callable ``(inputs, outputs, **loss_args)`` that returns a mean or LossOutput."""

    @remote_function(dispatch="all", collect="none")
    @abstractmethod
    def set_optimizer(self, optimizer_cls: Any = "adamw", *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """An optimizer, its class or its name. Defaults: lr 1e-5, weight decay 0.01, none on biases and norms."""

    @remote_function(dispatch="all", collect="none")
    @abstractmethod
    def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """A scheduler, its class or its name. Its steps are optimizer updates, never micro-batches."""

    @remote_function(dispatch="all", collect="none")
    @abstractmethod
    def set_template(self, template_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """A Template, its class or its name."""

    @remote_function(dispatch="all", collect="none")
    @abstractmethod
    def set_processor(self, processor_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """A Processor, its class or its name."""

    @remote_function(dispatch="all", collect="none")
    @abstractmethod
    def add_metric(
        self, metric_cls: Any, is_training: bool | None = None, *, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """A Metric, its class or its name. ``is_training`` None: one for training and one for ``forward_only``."""

    @remote_function(dispatch="all", collect="metric")
    @abstractmethod
    def calculate_metric(self, is_training: bool = True, *, adapter_name: str | None = None) -> dict[str, float]:
        """Reduce over ranks, return, reset."""

    @remote_function(dispatch="all", collect="none")
    @abstractmethod
    def apply_patch(self, patch_cls: Any, **kwargs: Any) -> None:
        """A Patch, its class or its name; model-wide."""

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int | None = None
    ) -> None:
        """A new adapter from a config, or from a folder that holds one."""

    @remote_function(dispatch="all", collect="none")
    @abstractmethod
    def remove_adapter(self, adapter_name: str) -> None:
        """Remove an adapter with all its state: weights, optimizer, scheduler, metrics, window."""

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def save(
        self,
        name: str,
        output_dir: str | Path | None = None,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int | None = None,
        sharded: bool = False,
    ) -> str:
        """Write a checkpoint folder, whole or not at all; ``sharded``: all weights as they lie on ranks. Returns its path."""

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def load(self, name: str, output_dir: str | Path | None = None, *, adapter_name: str | None = None) -> dict[str, Any]:
        """Load the weights of ``output_dir/name`` into the adapter (or the base model)."""

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def resume_from_checkpoint(
        self, checkpoint_dir: str | Path, *, adapter_name: str | None = None, resume_only_model: bool = False
    ) -> dict[str, Any]:
        """Restore weights, optimizer, scheduler, scaler and random state.

        Returns:
            ``{'cur_step', 'consumed_train_samples', 'gradient_accumulation_steps'}``.
        """

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
        """Tensors under plain keys."""

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """A table to print: model, parameters, mesh, precision, loss, optimizer, scheduler, template, metrics, plugins."""

    @remote_function(dispatch="slice_dp", collect="flatten", cut_beside=False)
    @abstractmethod
    def generate(
        self,
        inputs: Inputs,
        *,
        adapter_name: str | None = None,
        disable_lora: bool = False,
        return_rows: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Completions: one text for each row, or with ``return_rows`` prompt and completion as a row to train on."""

    # ------------------------------------------------------------------------------------------------ asked by runtimes

    @remote_function(dispatch="all", execute="first", collect="first")
    def grouping(
        self, *, adapter_name: str | None = None
    ) -> tuple[str, Callable[[Sequence[InputFeature]], Sequence[int]] | None, bool]:
        """For who divides a batch over data ranks: which adapter a call means, and how to find which rows belong together.

        Returns:
            The adapter's name; a function from rows to the sizes of consecutive groups, as a loss's ``groups`` (None: each row
            is by itself); whether rows are padded on the left.
        """
        return adapter_name or "", None, False

    @remote_function(dispatch="all", execute="first", collect="first")
    def groupings(
        self, adapter_names: Sequence[str]
    ) -> dict[str, tuple[str, Callable[[Sequence[InputFeature]], Sequence[int]] | None, bool]]:
        """``grouping`` of several adapters, by the names that were given; those that nobody has are left out."""
        found = {}
        for name in adapter_names:
            with contextlib.suppress(UnknownAdapter):
                found[name] = self.grouping(adapter_name=name)
        return found

    def share(self, collect: str, answer: Any, *, adapter_name: str | None = None) -> Any:
        """What a verb has just answered on this data rank, in a form that is exact when those of several are brought together.

        Args:
            collect: ``loss``: as (sum, weight) of this rank's items, two floats; ``rows``: as ``runtime.calls.Rows``.
            answer: what the verb returned here.

        Raises:
            Unsupported: the model can't be trained through a remote runtime.
        """
        raise Unsupported("share", type(self).__name__, "a model that derives from SessionModel")


LossCallable = Callable[..., Any]
