"""How to compute: what a backend implements (L0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from twinkle_core.types import InputFeature, LossOutput, ModelOutput

if TYPE_CHECKING:
    import torch

    from twinkle_core.mesh import DeviceMesh
    from twinkle_core.train.session import Session

#: An engine that offers ``forward`` and ``backward`` apart; without it the verbs of the same names raise Unsupported.
SPLIT_STEP = "split_step"
#: An engine that offers ``generate``.
GENERATE = "generate"


@dataclass(slots=True)
class Batch:
    """One micro-batch on the device, ready for the model.

    ``inputs``: tensors. ``rows``: which of the caller's rows it holds, in order. ``loss_args``: the caller's, cut to these
    rows. ``dummy``: the stand-in of a rank that got no rows; its labels are all -100, its weight is 0.
    """

    inputs: InputFeature
    rows: Sequence[int]
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    dummy: bool = False


#: The one place where a loss is called. Core makes it; an engine calls it once for each micro-batch.
LossFn = Callable[[Batch, ModelOutput], LossOutput]


class Engine(ABC):
    """Nine methods that a backend writes; everything else (windows, losses, metrics, checkpoints) is core's."""

    #: the torch network that it computes with; the model gives it to patches under the same name
    module: Any
    mesh: DeviceMesh
    device: Any  # torch.device
    capabilities: frozenset[str] = frozenset()
    on_nonfinite: Literal["raise", "skip"] = "raise"
    #: over how many ranks the backend averages gradients, as DDP does over the data ranks; 1 where it sums them, or has one
    grad_divisor: int = 1
    #: coefficient of a router's auxiliary loss; what is added is coefficient x ModelOutput.aux_loss x weight of the loss
    aux_loss_coef: float = 0.0
    #: whether all ranks together read and write weights, since each holds a part of them (the store's ``state_dict``,
    #: ``load_state_dict`` and ``write`` are collective then), and the first one alone the rest of a checkpoint
    collective: bool = False
    #: whether ranks must run the model together, the same number of times. ``loss_fn`` raises nothing then: core tells all
    #: ranks of a loss that failed on one when ``run_schedule`` is through
    in_step: bool = False

    @abstractmethod
    def prepare(
        self,
        session: Session,
        rows: Sequence[InputFeature] | InputFeature,
        *,
        micro_batch_size: int | None = None,
        loss_args: Mapping[str, Any] | None = None,
    ) -> list[Batch]:
        """This data rank's rows to micro-batches on the device. ``twinkle_core.train.prepare`` does the common part."""

    @abstractmethod
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
        """Forward, loss and (``train``) backward of each micro-batch, in the backend's own order.

        Backward goes through ``LossOutput.sum``, unscaled by any count: gradients accumulate as sums until ``finish_grads``.
        ``sync``: whether gradients must be reduced over data ranks with the last backward (the window may close after it).
        """

    def forward(
        self, batch: Batch, needs: frozenset[str], *, train: bool, temperature: float = 1.0, task: str = "causal_lm"
    ) -> ModelOutput:
        """Forward of one micro-batch with (``train``) or without a graph. Needs the capability SPLIT_STEP."""
        raise TypeError(f"{type(self).__name__} has no split step")

    def backward(self, loss_sum: torch.Tensor, *, sync: bool = True) -> None:
        """Backward through a loss sum. Needs the capability SPLIT_STEP."""
        raise TypeError(f"{type(self).__name__} has no split step")

    def mode(self, train: bool) -> AbstractContextManager[Any]:
        """The model's flags (dropout) and gradients as in a forward of this mode. ``calculate_loss`` computes inside: a loss
        may run the output layer itself. On leaving: what was found. Default: nothing."""
        return nullcontext()

    @abstractmethod
    def make_optimizer(
        self, cls: Any, parameters: Mapping[str, torch.nn.Parameter], kwargs: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """An optimizer over named parameters; ``twinkle_core.train.optim.build`` does the common part (decay groups)."""

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  (optional)
        """Take note of an optimizer that the user made; called once it is known to cover the adapter's parameters."""

    @abstractmethod
    def finish_grads(self, optimizer: torch.optim.Optimizer, scale: torch.Tensor | float) -> bool:
        """Reduce, unscale, and multiply by ``scale``. Core calls it once for each window.

        Returns:
            Whether all gradients are finite, on all ranks.
        """

    @abstractmethod
    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip to a global norm; returns the norm before clipping (0-d tensor)."""

    @abstractmethod
    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        """One optimizer update. Core calls it also after ``finish_grads`` said False and ``on_nonfinite`` is ``skip``: then it
        must leave weights and optimizer alone (a gradient scaler backs off) and return False."""

    @abstractmethod
    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients of this optimizer's parameters, and whatever the engine remembers of their window."""

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """What has been gathered for a parameter in its window. Default: its ``grad``."""
        return parameter.grad

    def set_gradient(self, parameter: torch.nn.Parameter, value: torch.Tensor | None) -> None:
        """Put back ``gradient``."""
        parameter.grad = value

    def window_gradients(self, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        """For a checkpoint: what an open window has gathered, as one process would hold it that had all ranks' rows. All ranks
        call it. Default: of one rank.

        Raises:
            CheckpointUnfit: it lies apart on several.
        """
        from twinkle_core.errors import CheckpointUnfit

        if self.mesh.world_size > 1:
            why = f"its gradients lie apart on {self.mesh.world_size} ranks; save after an update, or flush() first"
            raise CheckpointUnfit("an accumulation window that is open", why)
        found = {name: self.gradient(p) for name, p in parameters.items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def set_window_gradients(self, parameters: Mapping[str, torch.nn.Parameter], gradients: Mapping[str, torch.Tensor]) -> None:
        """Put back ``window_gradients``: ranks together hold these afterwards, and nothing for what is not there."""
        for name, parameter in parameters.items():
            self.set_gradient(parameter, gradients.get(name))

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and plain data for a checkpoint. The first rank writes them; tensors that lie apart (DTensors) all together.
        Default: all of the state, by parameter."""
        from twinkle_core.train import optim

        return optim.state_by_name(optimizer, parameters)

    def prepare_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        tensors: Mapping[str, torch.Tensor],
        data: Mapping[str, Any],
        folder: Path,
    ) -> dict[str, Any]:
        """What ``optimizer.load_state_dict`` takes, checked; changes nothing. Raises CheckpointMismatch."""
        from twinkle_core.train import optim

        return optim.prepare_state(optimizer, parameters, tensors, data, str(folder / "optimizer.json"))

    def write_shards(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:  # noqa: B027  (optional)
        """What ranks hold of an optimizer's state, written by all of them into the folder of a checkpoint."""

    def loss_scale(self) -> float:
        """What gradients that ``finish_grads`` has not seen are multiplied by: a gradient scaler's scale, else 1."""
        return 1.0

    def all_reduce(self, x: torch.Tensor, over: str = "dp") -> torch.Tensor:
        """Sum over ranks: ``dp``, those that have different rows, or ``world``, all of the mesh. Default: one rank."""
        return x

    def gather_objects(self, obj: Any, over: str = "dp") -> list[Any]:
        """The objects of the ranks of ``dp`` or ``world``, in rank order. Default: one rank."""
        return [obj]

    def gather_numbers(self, numbers: Sequence[float | torch.Tensor]) -> list[list[float]]:
        """The numbers (0-d tensors too) of all ranks of the mesh, in rank order; as many on each. Each verb in which ranks meet
        begins with it. Default: by ``gather_objects``."""
        return self.gather_objects([float(number) for number in numbers], "world")

    def ranks(self, over: str = "dp") -> Any:
        """The ranks of a mesh dimension as losses gather over them: a ``twinkle_core.ops.gather.Ranks``. Default, and for None:
        one rank."""
        return None

    def from_last_stage(self, x: torch.Tensor) -> torch.Tensor:
        """A value that only the last pipeline stage knows, on every stage. Default: one stage."""
        return x

    def generate(self, rows: Sequence[InputFeature], **kwargs: Any) -> list[list[int]]:
        """Ids of one completion for each encoded prompt, without the prompt and without the end token. Needs the capability
        GENERATE; core encodes and decodes by the session's template.

        An engine that has a keyword ``keep_end`` leaves the end token on where it is True: what completions as rows to train
        on (``generate(…, return_rows=True)``) need.
        """
        raise TypeError(f"{type(self).__name__} does not generate")

    def state_dict(self) -> dict[str, Any]:
        """State beyond weights and optimizers (the gradient scaler): numbers, strings, lists, tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (optional)
        """Put back ``state_dict()``."""

    def describe(self) -> dict[str, Any]:
        """Facts for ``get_train_configs``: model class, precision, device, strategy, checkpointing."""
        return {}
