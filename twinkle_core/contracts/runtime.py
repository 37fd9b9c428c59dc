"""What a runtime is (L0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_core.mesh import DeviceGroup, DeviceMesh


class Runtime(ABC):
    """Where components live: this process (``local``), or workers elsewhere (``ray``, by twinkle-ray)."""

    @abstractmethod
    def start(self, *, nproc_per_node: int | None, groups: Sequence[DeviceGroup], mesh: DeviceMesh | None) -> None:
        """Begin. Called once by ``initialize``."""

    @abstractmethod
    def create(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], remote_group: str | None) -> Any:
        """An instance of ``cls``, or a proxy of one."""

    def default_mesh(self) -> DeviceMesh | None:
        """The mesh of components that are made in this process and given none. Default: they have none."""
        return None

    @abstractmethod
    def placement(self) -> str:
        """Who sits where, as a drawing."""

    @abstractmethod
    def shutdown(self) -> None:
        """End what ``start`` began."""
