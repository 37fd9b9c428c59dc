"""Whose weights: the store of adapters of one model (L0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: The name of the base model itself.
BASE = ""


class AdapterStore(ABC):
    """Adapters by name. ``BASE`` ('') is the model without any adapter and is always there.

    Every method validates before it changes anything, and an unknown name raises UnknownAdapter with did-you-mean.
    """

    @abstractmethod
    def names(self) -> list[str]:
        """Live adapters in order of creation, without BASE."""

    @abstractmethod
    def acquire(self, name: str, config: Any) -> str:
        """Create an adapter from a config or from a folder that holds one (then with its weights).

        Returns:
            The store's own name for it (the same name, or a slot's).

        Raises:
            DuplicateAdapter, BadAdapter: nothing was changed.
        """

    @abstractmethod
    def release(self, name: str) -> None:
        """Remove it with all its weights."""

    @abstractmethod
    def activate(self, name: str) -> AbstractContextManager[None]:
        """Inside: ``name`` alone takes part (BASE: none), and its parameters are trainable as they were configured. On leaving,
        also by an exception: exactly what was found on entry (active adapters, requires_grad, training flags). Nests."""

    @abstractmethod
    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Trainable parameters by plain name (no wrapper, slot or tenant in it)."""

    @abstractmethod
    def state_dict(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors under plain keys: PEFT's for an adapter, the model's own for BASE. Live tensors; copy to keep."""

    def outline(self, name: str) -> Mapping[str, torch.Tensor]:
        """``state_dict`` of which only keys, shapes and types are read: a store whose tensors lie apart on ranks may give
        tensors of the device ``meta``. Default: ``state_dict``."""
        return self.state_dict(name)

    def stream(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The items of ``state_dict``, one after the other: a store whose tensors lie apart on ranks need not hold them all at
        once. Go to its end, on all ranks. Default: ``state_dict``."""
        yield from self.state_dict(name).items()

    @abstractmethod
    def load_state_dict(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        """Strict: a missing, unknown or misshapen key raises CheckpointMismatch, which names it, before anything changes."""

    @abstractmethod
    def write(self, name: str, folder: Path) -> None:
        """Write plain files that PEFT (an adapter) or the model's own library (BASE) loads."""

    @abstractmethod
    def read(self, name: str, folder: Path) -> dict[str, torch.Tensor]:
        """The tensors that ``write`` wrote, for ``load_state_dict``. Changes nothing."""

    def sharded_state(self, name: str) -> dict[str, torch.Tensor] | None:
        """What ``save(sharded=True)`` writes, as it lies on ranks: the tensors of ``state_dict``, a tied one under one name.
        None, and by default: these weights are always plain files."""
        return None

    def write_beside(self, name: str, folder: Path) -> None:  # noqa: B027  (optional)
        """What ``write`` writes beside the weights, where those are in shards."""

    def known_as(self, name: str) -> str:
        """The name of the live adapter that is also called so (by its slot's name, where a store has slots); ``name`` itself
        where there is no such adapter."""
        return name

    def gathered(self, name: str) -> AbstractContextManager[None]:
        """All ranks enter it before the first of them calls ``write``: a store whose tensors lie apart on ranks brings them
        together. Default: they do not."""
        return nullcontext()

    def check_compatible(self, name: str, folder: Path) -> None:  # noqa: B027  (optional)
        """Raise CheckpointMismatch if the weights in ``folder`` would compute something else in this adapter than in the one
        they were saved from, though keys and shapes are the same (a scale, a method). Called before anything is loaded."""

    def training_state(self, name: str) -> dict[str, Any]:
        """What training of an adapter goes on from, beside its weights: plain numbers (a count of random draws). It is saved
        with the optimizer."""
        return {}

    def load_training_state(self, name: str, state: Mapping[str, Any]) -> None:  # noqa: B027  (optional)
        """Put back ``training_state``. ``state`` may be of another kind of store, or of none: take what is known."""

    def describe(self, name: str) -> dict[str, Any]:
        """Facts for ``get_train_configs``: rank, alpha, targets."""
        return {}

    def size(self) -> tuple[int, str]:
        """How many numbers the base model has, and in words of what; for ``get_train_configs``, which one rank may ask for
        alone. Default: of the whole ``outline``. A store whose outline ranks make together counts what this rank has."""
        return sum(tensor.numel() for tensor in self.outline(BASE).values()), "in the base model"
