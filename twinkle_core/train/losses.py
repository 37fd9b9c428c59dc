"""Calling a loss: what it needs, what it may be given, what it must return (L2)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from twinkle_core import arguments
from twinkle_core.contracts.engine import Batch
from twinkle_core.contracts.loss import Loss
from twinkle_core.contracts.metric import Metric
from twinkle_core.errors import (
    BadArgument,
    BadLossResult,
    BadNeeds,
    LabelsMissing,
    MissingArgument,
    NotDeclared,
    ReservedArgument,
    TwinkleError,
)
from twinkle_core.log import get_logger
from twinkle_core.names import closest
from twinkle_core.train import normalise
from twinkle_core.train.limits import is_number
from twinkle_core.types import InputFeature, LossOutput, ModelOutput

#: outputs that are computed from labels
FROM_LABELS = frozenset({"logps", "entropies", "predictions"})
#: outputs that core itself adds, for metrics
OF_CORE = frozenset({"loss", "num_items", "loss_metrics", "labels"})
#: outputs that a loss may declare
NEEDED = frozenset(ModelOutput.KEYS) - OF_CORE - {"output_layer"}
#: what ``needs`` may name: outputs, and what comes with them
READABLE = NEEDED | {"labels", "output_layer"}
#: tasks: what a model is asked for when nothing else is said, and what ``embeddings`` imply
CAUSAL_LM, EMBEDDING = "causal_lm", "embedding"
#: what is told once of a function that returns a bare number on one of several ranks
ONE_EACH = (
    "%s returns a mean, so each rank counts alike, however many labelled tokens it has: the update is not that of one process "
    "on the same rows. Return LossOutput(sum, weight), or LossOutput(mean, 1) to have it so without this warning"
)
#: the needs of a function that declares none
BY_DEFAULT = frozenset({"logits"})


class FunctionLoss(Loss):
    """A plain function ``(inputs, outputs, **loss_args)`` as a loss.

    It returns a scalar tensor, which counts as the mean of a micro-batch (weight 1, scope ``batch``), or ``LossOutput``. It may
    carry the attributes ``needs``, ``scope``, ``token_local``, ``masked_args`` and ``groups`` of a Loss; without ``needs`` it
    gets ``logits``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.means = self.warned = False  # whether it has returned a bare number, and that was told
        needs = getattr(function, "needs", BY_DEFAULT)
        self.needs = frozenset(needs) if isinstance(needs, (list, tuple)) else needs  # type: ignore[misc]
        self.scope = getattr(function, "scope", "batch")  # type: ignore[misc]
        self.token_local = bool(getattr(function, "token_local", False))  # type: ignore[misc]
        self.masked_args = frozenset(getattr(function, "masked_args", ()))  # type: ignore[misc]
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def groups(self, rows: Any) -> list[int]:
        grouping = getattr(self.function, "groups", None)
        return grouping(rows) if grouping is not None else [1] * len(rows)

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, **loss_args: Any) -> LossOutput:
        result = self.function(inputs, outputs, **loss_args)
        if isinstance(result, torch.Tensor) and result.dim() == 0:
            self.means = True
            return LossOutput(result, 1.0)
        return result  # type: ignore[no-any-return]  # checked where it is called


def grouping(loss: Loss) -> Callable[[Any], list[int]] | None:
    """How a loss finds which rows belong together; None: to it each is by itself."""
    if type(loss) is FunctionLoss:
        return getattr(loss.function, "groups", None)
    return None if type(loss).groups is Loss.groups else loss.groups


class _Asked(ModelOutput):
    """An output as a loss sees it: a copy, which remembers what was read."""

    @property
    def read(self) -> list[str]:
        """In the order of reading. Kept beside the output's keys, which is what its attributes are."""
        return list(dict.fromkeys(self.__dict__.get("read_keys", ())))

    def __getattr__(self, key: str) -> Any:
        self._note(key)
        return super().__getattr__(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def _note(self, key: str) -> None:
        self.__dict__.setdefault("read_keys", []).append(key)


#: what code raises that takes a tensor where there is None, or no such key
_WITHOUT = (AttributeError, TypeError, LookupError, ValueError, RuntimeError)


def name_of(loss: Loss) -> str:
    """How errors and tables call a loss."""
    return str(getattr(loss, "__name__", type(loss).__name__))


def _target(loss: Loss) -> Callable[..., Any]:
    return loss.function if type(loss) is FunctionLoss else loss


def check_args(loss: Loss, loss_args: Mapping[str, Any]) -> None:
    """Raise WrongArgument, ReservedArgument or MissingArgument before anything runs; BadArgument for what is not a number."""
    if loss.collective and "ranks" in loss_args:
        raise ReservedArgument(name_of(loss), "ranks")
    arguments.check(_target(loss), loss_args, name_of(loss), positional=2, complete=True)
    missing = sorted(name for name in loss.required_args if loss_args.get(name) is None)
    if missing:
        raise MissingArgument(name_of(loss), missing)
    for name, value in loss_args.items():
        found = _no_number(value, -math.inf if name in loss.masked_args else None)
        if found is not None and math.isnan(found[1]):
            raise BadArgument(name, math.nan, f"numbers, and entry {found[0]} is none")
        if found is not None and (isinstance(value, (list, tuple)) or len(getattr(value, "shape", "")) > 0):  # alone: a bound
            way = "" if found[1] > 0 else "; a loss that takes -inf names the argument in its masked_args"
            raise BadArgument(name, found[1], f"finite numbers, and entry {found[0]} is not{way}")


def _no_number(value: Any, right: float | None) -> tuple[int, float] | None:
    """The first entry that holds a NaN or an infinite number other than ``right``, and that one; of a tensor, array or list in
    the host's memory: to ask a device would stop it."""
    if isinstance(value, (list, tuple)):
        inner = ((k, _no_number(entry, right)) for k, entry in enumerate(value))
        return next(((k, found[1]) for k, found in inner if found is not None), None)
    if isinstance(value, float):
        return None if math.isfinite(value) or value == right else (0, value)
    if getattr(getattr(value, "dtype", None), "kind", "f") != "f" or not hasattr(value, "dtype"):  # an array of something else
        return None
    found = torch.as_tensor(value)
    if found.device.type != "cpu" or not found.is_floating_point() or not found.numel():
        return None
    if bool(found.isfinite().all()) if right is None else float(found.max()) < math.inf:  # the greatest of a NaN is a NaN
        return None
    wrong = ~found.isfinite() if right is None else ~found.isfinite() & (found != right)
    place = wrong.nonzero()[0].tolist()
    return (place[0] if place else 0), float(found[tuple(place)])


def check_needs(owner: str, needs: Any, known: frozenset[str]) -> None:
    """Raise BadNeeds unless a loss or metric declares a set of names that there are."""
    if not isinstance(needs, (set, frozenset)) or not all(isinstance(name, str) for name in needs):
        raise BadNeeds.kind(owner, needs)
    for name in sorted(needs - known):
        raise BadNeeds.unknown(owner, name, closest(name, known), sorted(known))


def complete_without_args(loss: Loss) -> bool:
    """Whether a loss can be called with inputs and outputs alone."""
    if loss.required_args:
        return False
    try:
        parameters = list(inspect.signature(_target(loss)).parameters.values())[2:]
    except (ValueError, TypeError):
        return True
    return all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def engine_needs(
    loss: Loss | None,
    metrics: Iterable[Metric],
    *,
    task: str = CAUSAL_LM,
    logits: bool = False,
    labelled: bool = True,
    aux: bool = False,
) -> frozenset[str]:
    """The union of what loss and metrics read, and nothing else; without labels, nothing that is computed from them.

    The task ``embedding`` gives embeddings in place of logits, for which its models may have no layer. ``aux``: a router's
    auxiliary loss is added, where there are logits.
    """
    needs = set(loss.needs if loss is not None else ())
    for metric in metrics:
        needs |= metric.needs
    if EMBEDDING in (task, task_of(task, needs)):
        needs.add("embeddings")
    else:
        needs |= ({"logits"} if logits else set()) | ({"aux_loss"} if aux else set())
    return frozenset(needs - OF_CORE) - (frozenset() if labelled else FROM_LABELS)


def task_of(task: str, needs: Iterable[str]) -> str:
    """The task that needs imply where no other was said."""
    return EMBEDDING if task == CAUSAL_LM and "embeddings" in needs else task


def of_task(loss: Loss, task: str) -> Loss | None:
    """The loss, if a forward of this task has anything to do with it: one on logits has nothing to say of embeddings."""
    return loss if task != EMBEDDING or "embeddings" in loss.needs else None


def check_labels(loss: Loss, rows: Any) -> None:
    """Raise LabelsMissing if the loss is computed from labels and some row has none."""
    if not loss.needs & (FROM_LABELS | {"labels"}):
        return
    for row in [rows] if isinstance(rows, Mapping) else rows:
        if row.get("labels") is None:
            raise LabelsMissing(name_of(loss), sorted(row))


def not_computed(loss: Loss, output: Mapping[str, Any]) -> list[str]:
    """What a loss reads and an output does not have: it was made for another loss."""
    return sorted(loss.needs - OF_CORE - output.keys())


def has_labels(rows: Any) -> bool:
    """Whether all rows carry labels."""
    return all(row.get("labels") is not None for row in ([rows] if isinstance(rows, Mapping) else rows))


def call(
    loss: Loss, batch: Batch, output: ModelOutput, *, train: bool = False, ranks: Any = None, aux_coef: float = 0.0
) -> LossOutput:
    """The loss of one micro-batch, checked. The stand-in of a rank without rows has weight 0 and still a graph.

    Args:
        train: a backward follows, so it must have a graph.
        ranks: for a ``collective`` loss: the data ranks that it meets.
        aux_coef: of the router's auxiliary loss, which is added unless the loss itself reads it.

    Raises:
        BadLossResult. NotDeclared: it failed after it had read an output that is not among its ``needs``.
    """
    if batch.dummy and not loss.collective:
        return LossOutput(zero(output), 0.0)
    seen = _Asked(output)
    own = {"ranks": ranks} if loss.collective else {}
    try:
        result: Any = loss(batch.inputs, seen, **batch.loss_args, **own)
    except TwinkleError:
        raise
    except _WITHOUT as error:
        read = [key for key in seen.read if key in NEEDED]
        missing = next((key for key in read if key not in loss.needs and key not in output), None)
        if missing is not None:
            plain = type(loss) is FunctionLoss
            raise NotDeclared(name_of(loss), missing, read, loss.needs, error, plain=plain) from error
        raise
    if ranks is not None and type(loss) is FunctionLoss and loss.means and not loss.warned:
        loss.warned = True
        get_logger().warning(ONE_EACH, name_of(loss))
    if not isinstance(result, LossOutput):  # a Loss of a third party may return anything
        what = f"a tensor {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise BadLossResult(name_of(loss), what)
    if not isinstance(result.sum, torch.Tensor) or result.sum.dim() != 0:
        shape = f"a tensor {list(result.sum.shape)}" if isinstance(result.sum, torch.Tensor) else type(result.sum).__name__
        raise BadLossResult(name_of(loss), f"LossOutput whose sum is {shape}, not a scalar tensor")
    if train and not result.sum.requires_grad:
        raise BadLossResult(name_of(loss), "LossOutput whose sum has no graph, so there is nothing to go back through")
    result = LossOutput(result.sum, _checked_weight(name_of(loss), result.weight), result.metrics)
    added = aux_coef and "aux_loss" in output and "aux_loss" not in loss.needs
    return _with_aux(result, output["aux_loss"], aux_coef) if added else result


def _with_aux(loss: LossOutput, aux: torch.Tensor, coefficient: float) -> LossOutput:
    """The mean grows by coefficient x aux, whatever the weight: what a router adds is no sum over items."""
    share = aux * loss.weight
    metrics = {**(loss.metrics or {}), "aux_loss": (share.detach(), loss.weight)}
    return LossOutput(loss.sum + (coefficient * share).to(loss.sum.device), loss.weight, metrics)


def _checked_weight(name: str, weight: Any) -> Any:
    """A number of items, or BadLossResult. Looking into a device's tensor would wait for the device: there it is marked."""
    if isinstance(weight, torch.Tensor):
        if weight.dim() != 0:
            raise BadLossResult(name, f"LossOutput whose weight is a tensor {list(weight.shape)}, not a scalar")
        if weight.device.type != "cpu":
            return marked(weight)
        number: Any = float(weight.detach())
    else:
        number = weight
    if not is_number(number):
        raise BadLossResult(name, f"LossOutput whose weight is {number!r}, not a number")
    if not 0 <= number < math.inf:
        raise BadLossResult(name, f"LossOutput whose weight is {number!r}, which is no count of items")
    return weight


def marked(weight: torch.Tensor) -> torch.Tensor:
    """The weight, and NaN where it is no count: other calls' weights outweigh a negative number, but not a NaN, so the window
    that it is added to is refused when it closes. Does not synchronise."""
    exact = normalise.as_scalar(weight, weight.device)
    return torch.where((exact >= 0) & exact.isfinite(), exact, math.nan)


def detached(loss: LossOutput) -> LossOutput:
    """Its numbers without its graph."""

    def bare(value: Any) -> Any:
        return value.detach() if isinstance(value, torch.Tensor) else value

    own = {name: (bare(total), bare(weight)) for name, (total, weight) in (loss.metrics or {}).items()}
    return LossOutput(loss.sum.detach(), bare(loss.weight), own)


def zero(output: ModelOutput) -> torch.Tensor:
    """0 with a graph through every output that has one, so that collectives inside backward meet on all ranks. (A sum times 0
    is NaN where a number in it is not finite, and its gradient is 0 all the same.)"""
    parts = [v.sum() * 0 for v in output.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    return torch.stack([p.float() for p in parts]).sum() if parts else torch.zeros(())
