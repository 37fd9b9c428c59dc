"""What a runtime is (L0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_core.mesh import DeviceGroup, DeviceMesh


class Runtime(ABC):
    """Where components live: this process (``local``), or workers elsewhere (``ray``, by twinkle-ray)."""

    #: whether this process is itself a rank of the meshes that its components are given, and so has a share of the rows
    takes_part = True

    @abstractmethod
    def start(
        self,
        *,
        nproc_per_node: int | None,
        groups: Sequence[DeviceGroup],
        mesh: DeviceMesh | None,
        seed: int,
        full_determinism: bool,
    ) -> None:
        """Begin. Called once by ``initialize``, which seeds this process itself."""

    def check(self) -> None:
        """Raise what ``start`` would raise of what lies outside of its arguments, as far as that can be told in a moment and
        without changing anything: so that nobody loads data for a runtime that can't begin. Default: nothing is known."""
        return

    @abstractmethod
    def create(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], remote_group: str) -> Any:
        """A proxy of an instance of ``cls`` on that group's workers; None: it is to be constructed here."""

    def default_mesh(self) -> DeviceMesh | None:
        """The mesh of components that are made in this process and given none. Default: they have none."""
        return None

    @abstractmethod
    def placement(self) -> str:
        """Who sits where, as a drawing."""

    @abstractmethod
    def shutdown(self) -> None:
        """End what ``start`` began."""
