"""Who sits where: the mesh of ranks and the groups of workers, in plain Python (L0)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from twinkle_core import settings
from twinkle_core.errors import BadMesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

#: the dimensions, slowest first: neighbours in the last one are neighbours in rank
ORDER = ("fsdp", "pp", "dp", "cp", "tp")


@dataclass(frozen=True, repr=False)
class DeviceMesh:
    """Sizes in, coordinates out. Make one with :meth:`from_sizes`.

    ``ulysses`` is no dimension of its own: that many neighbouring data ranks share their rows and split the sequence. ``ep``
    and ``etp`` (experts) are laid over the ranks of one pipeline stage. ``vpp`` cuts a stage's layers into chunks; no ranks.
    """

    sizes: dict[str, int]
    ulysses_size: int = 1
    ep_size: int = 1
    etp_size: int = 1
    vpp_size: int = 1
    sequence_parallel: bool = False
    device_type: str | None = None
    _rank: int | None = field(default=None, compare=False)

    @classmethod
    def from_sizes(
        cls,
        *,
        world_size: int | None = None,
        dp_size: int = 1,
        fsdp_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        cp_size: int | None = None,
        ulysses_size: int | None = None,
        ep_size: int | None = None,
        etp_size: int | None = None,
        vpp_size: int | None = None,
        sequence_parallel: bool = False,
        device_type: str | None = None,
    ) -> DeviceMesh:
        """A mesh from the sizes of its dimensions; one that is absent has size 1.

        Args:
            world_size: all ranks; by default torchrun's WORLD_SIZE, else the product of the sizes. Where it is a multiple of
                the product and ``dp_size`` was left at 1, data parallelism takes what is over.
            device_type: ``cuda``, ``cpu``, …; by default the accelerator that is there.

        Raises:
            BadMesh: a size below 1, a device that is no name, or sizes whose product does not fit the world size; the text
                shows the arithmetic.
        """
        given = {"dp": dp_size, "fsdp": fsdp_size, "tp": tp_size, "pp": pp_size, "cp": cp_size}
        beside = {"ulysses": ulysses_size, "ep": ep_size, "etp": etp_size, "vpp": vpp_size}
        for name, size in {**given, **beside, "world": world_size}.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise BadMesh.size(f"{name}_size", size)
        if device_type is not None and not isinstance(device_type, str):
            raise BadMesh.device(device_type)
        sizes = {name: given[name] or 1 for name in ORDER}
        product = math.prod(sizes.values())
        if world_size is None:
            world_size = settings.world_size() if settings.world_size() > 1 else product
        if world_size % product or (world_size != product and sizes["dp"] != 1):
            raise BadMesh.product(sizes, world_size)
        sizes["dp"] *= world_size // product
        extra = {name: size or 1 for name, size in beside.items()}
        data = sizes["dp"] * sizes["fsdp"]
        if data % extra["ulysses"]:
            raise BadMesh.divides("ulysses_size", extra["ulysses"], "dp_size × fsdp_size", data)
        stage = world_size // sizes["pp"]
        if stage % (extra["ep"] * extra["etp"]):
            raise BadMesh.divides("ep_size × etp_size", extra["ep"] * extra["etp"], "the ranks of one pipeline stage", stage)
        return cls(
            sizes=sizes,
            ulysses_size=extra["ulysses"],
            ep_size=extra["ep"],
            etp_size=extra["etp"],
            vpp_size=extra["vpp"],
            sequence_parallel=sequence_parallel,
            device_type=device_type,
        )

    @property
    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.sizes.values())

    @property
    def rank(self) -> int:
        """This process's rank: torchrun's, else 0."""
        return settings.rank() if self._rank is None else self._rank

    def at(self, rank: int) -> DeviceMesh:
        """The same mesh seen from another rank."""
        self.coordinates(rank)
        return replace(self, _rank=rank)

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """The place of a rank (default: this one) in each dimension."""
        rank = self.rank if rank is None else rank
        if not 0 <= rank < self.world_size:
            raise BadMesh.rank(rank, self.world_size)
        place: dict[str, int] = {}
        for name in reversed(ORDER):
            rank, place[name] = divmod(rank, self.sizes[name])
        return {name: place[name] for name in ORDER}

    def ranks(self, *dims: str, rank: int | None = None) -> list[int]:
        """The peers of a rank along dimensions: those that differ from it in these alone, itself included, in order."""
        mine = self.coordinates(rank)
        fixed = [name for name in ORDER if name not in dims]
        everyone = ((r, self.coordinates(r)) for r in range(self.world_size))
        return [r for r, place in everyone if all(place[name] == mine[name] for name in fixed)]

    @property
    def data_world_size(self) -> int:
        """How many different shares of the rows there are."""
        return self.sizes["dp"] * self.sizes["fsdp"] // self.ulysses_size

    @property
    def data_rank(self) -> int:
        """Which share of the rows this process gets: (dp · F + fsdp) // ulysses."""
        place = self.coordinates()
        return (place["dp"] * self.sizes["fsdp"] + place["fsdp"]) // self.ulysses_size

    @property
    def streams(self) -> list[int]:
        """Of each rank, which random numbers it draws: the same as another where both compute on the same rows (``tp``), others
        where rows or parts of them differ."""
        places = [self.coordinates(rank) for rank in range(self.world_size)]
        return [place["dp"] * self.sizes["fsdp"] + place["fsdp"] for place in places]

    @property
    def leads(self) -> bool:
        """Whether this process is the first of those that get its share of the rows."""
        if self.world_size == 1:
            return True  # whatever RANK says: there may be other processes, with models of their own
        place = self.coordinates()
        part = (place["dp"] * self.sizes["fsdp"] + place["fsdp"]) % self.ulysses_size
        return not part and not any(at for name, at in place.items() if name not in ("dp", "fsdp"))

    def to_torch(self) -> TorchDeviceMesh:
        """A torch DeviceMesh with the dimensions of size over 1 (all of size 1: ``dp``). Needs an initialised process group."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        names = tuple(name for name in ORDER if self.sizes[name] > 1) or ("dp",)
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device_type = self.device_type or (accelerator.type if accelerator else "cpu")
        return init_device_mesh(device_type, tuple(self.sizes[name] for name in names), mesh_dim_names=names)

    def __repr__(self) -> str:
        """A drawing: one line for each place in the slow dimensions, the ranks of the fastest ones side by side."""
        used = [name for name in ORDER if self.sizes[name] > 1]
        extras = {"ulysses": self.ulysses_size, "ep": self.ep_size, "etp": self.etp_size, "vpp": self.vpp_size}
        notes = [f"{name} {size}" for name, size in extras.items() if size > 1]
        notes += ["sequence parallel"] if self.sequence_parallel else []
        count = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        head = f"DeviceMesh: {count}"
        if used:
            head += " = " + " × ".join(f"{name} {self.sizes[name]}" for name in used)
        if notes:
            head += f" ({', '.join(notes)})"
        if not used:
            return head
        across = used[-1]
        lines = []
        for first in range(self.world_size):
            place = self.coordinates(first)
            if place[across]:
                continue
            label = " ".join(f"{name}{place[name]}" for name in used[:-1])
            row = " ".join(f"{r:>4}" for r in self.ranks(across, rank=first))
            lines.append(f"  {label:<{7 * (len(used) - 1)}}{row}".rstrip())
        columns = " ".join(f"{across}{i}".rjust(4) for i in range(self.sizes[across]))
        return "\n".join([head, f"  {'':<{7 * (len(used) - 1)}}{columns}", *lines])


@dataclass(frozen=True)
class DeviceGroup:
    """A named group of workers.

    Args:
        name: what ``remote_group=`` calls it.
        ranks: how many workers, which have devices of their own; or a list of places, which groups that name the same share.
        device_type: ``GPU``, ``CPU``, or what else the runtime counts (``NPU``).
        gpus_per_worker: devices of a worker; without effect on CPUs.
        cpus_per_worker: CPU cores that a worker is given.
    """

    name: str
    ranks: int | Sequence[int]
    device_type: str = "GPU"
    gpus_per_worker: int = 1
    cpus_per_worker: int = 1

    def __post_init__(self) -> None:
        for field_name, what in (("name", "give it a name"), ("device_type", "'GPU', 'CPU', or what else the runtime counts")):
            if not isinstance(getattr(self, field_name), str) or not getattr(self, field_name):
                raise BadMesh.group(field_name, getattr(self, field_name), what)
        for field_name in ("gpus_per_worker", "cpus_per_worker"):
            size = getattr(self, field_name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise BadMesh.group(field_name, size, "a whole number from 1 up")
        listed = [self.ranks] if isinstance(self.ranks, int) else self.ranks
        numbers = isinstance(listed, Sequence) and all(type(each) is int for each in listed)
        members = self.members if numbers else []
        if not members or min(members) < 0 or len(set(members)) != len(members):
            raise BadMesh.group("ranks", self.ranks, "a positive number, or a list of different ranks")

    @property
    def members(self) -> list[int]:
        """The ranks as a list."""
        return list(range(self.ranks)) if isinstance(self.ranks, int) else list(self.ranks)
