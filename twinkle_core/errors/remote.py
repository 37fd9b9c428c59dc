"""Errors of workers elsewhere, and of what stands for their objects here (L0)."""

from __future__ import annotations

from collections.abc import Iterable

from twinkle_core.errors.base import WHY, TwinkleError, listed, meant, shown


class NoGroups(TwinkleError, ValueError):
    """A remote runtime without workers."""

    def __init__(self, mode: str) -> None:
        super().__init__(f"mode='{mode}' needs workers: initialize(mode='{mode}', groups=[DeviceGroup('actor', 2), ...])")


class NoCluster(TwinkleError, ConnectionError):
    """An address at which no cluster answers, or one that this process can't connect to."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(
            f"RAY_ADDRESS is '{shown(address)}', and Ray can't connect to a cluster there: {shown(why, WHY)}.\n"
            f"    Start it (ray start --head), or correct the address; where it asks for a token, set RAY_AUTH_MODE=token.\n"
            f"    Without RAY_ADDRESS Ray is started on this machine"
        )


class DriverIsRank(TwinkleError, RuntimeError):
    """A runtime that starts workers, in each of torchrun's processes."""

    def __init__(self, mode: str, world_size: int) -> None:
        super().__init__(
            f"mode='{mode}' starts its workers itself, and this is one of {world_size} processes (WORLD_SIZE).\n"
            f"    Start one, without torchrun"
        )


class SameGroup(TwinkleError, ValueError):
    """Two groups of one name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"two groups are called '{name}'; give each a name of its own")


class UnknownGroup(TwinkleError, LookupError):
    """``remote_group`` that ``initialize`` was not given."""

    def __init__(self, name: object, near: str | None, groups: Iterable[str]) -> None:
        super().__init__(f"there is no group '{shown(name)}'.{meant(near)}\n    initialize was given: {listed(groups)}")


class GroupTooLarge(TwinkleError, RuntimeError):
    """Groups that the cluster can't hold, now or ever. ``asked`` and ``there``: in words."""

    def __init__(self, asked: str, there: str, way: str) -> None:
        super().__init__(f"the groups need {asked}, and {there}.\n    {way}")


class GroupMesh(TwinkleError, ValueError):
    """A mesh of another number of ranks than the group has workers."""

    def __init__(self, owner: str, ranks: int, group: str, workers: int) -> None:
        super().__init__(
            f"{owner}: its device mesh has {ranks} rank(s), and group '{group}' has {workers} worker(s).\n"
            f"    Give DeviceGroup('{group}', {ranks}), or a mesh of {workers}"
        )


class WorkerDied(TwinkleError, RuntimeError):
    """A worker process has ended. The others of its group were ended too."""

    def __init__(self, group: str, rank: int, place: str, doing: str, why: object) -> None:
        cause = shown(" ".join(str(why).split()), WHY)
        super().__init__(
            f"worker {rank} of group '{group}' ({place}) died during {doing}; the group's other workers were ended.\n"
            f"    {cause}\n    Start anew, and go on from the last checkpoint with resume_from_checkpoint()"
        )


class GroupEnded(TwinkleError, RuntimeError):
    """A call to a group whose workers are gone."""

    def __init__(self, group: str, why: str) -> None:
        super().__init__(f"the workers of group '{group}' were ended: {shown(why, WHY)}\n    Start the program anew")


class WorkerFailed(TwinkleError, RuntimeError):
    """What a worker raised, where that can't travel as it is."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{shown(what, WHY)}\n    (the exception itself can't be sent: {shown(why, WHY)})")


class NotRemote(TwinkleError, AttributeError):
    """An attribute that a proxy doesn't have."""

    def __init__(self, owner: str, name: str, near: str | None, declared: Iterable[str]) -> None:
        super().__init__(
            f"{owner} lives on workers, and '{shown(name)}' is not declared with @remote_function.{meant(near)}\n"
            f"    it has: {listed(declared)}"
        )


class NotCut(TwinkleError, TypeError):
    """An argument that can't be divided over workers."""

    def __init__(self, function: str, kind: str) -> None:
        super().__init__(
            f"{function}() divides its first argument over workers, which a {shown(kind)} can't be.\n"
            f"    give a list of rows, a tensor or a collated batch; or declare it with dispatch='all'"
        )


class BadDispatch(TwinkleError, ValueError):
    """A dispatch of one's own that gave no arguments for each worker."""

    def __init__(self, function: str, got: str, workers: int) -> None:
        super().__init__(
            f"dispatch of {function}() gave {shown(got)}; it must give {workers} pair(s) (args, kwargs), one a worker"
        )


class NotSent(TwinkleError, TypeError):
    """An argument that can't travel to workers."""

    def __init__(self, function: str, argument: str, kind: str, why: str) -> None:
        super().__init__(
            f"{function}: {argument}, a {shown(kind)}, can't be sent to workers: {shown(why, WHY)}\n"
            f"    Give what it is made of (a path, a name, a function of its own), and make it there"
        )

    @classmethod
    def answer(cls, function: str, why: str) -> NotSent:
        """The same of what a worker has made."""
        made = cls.__new__(cls)
        made.args = (
            f"{function} has done its work, and what it gives can't be sent: {shown(why, WHY)}\n"
            f"    Give numbers, texts, tensors, or lists and dicts of them; what else it makes can stay with the object",
        )
        return made


class NotCollected(TwinkleError, TypeError):
    """Answers that can't be brought together as was declared."""

    def __init__(self, function: str, how: str, why: str) -> None:
        super().__init__(f"the answers of {function}() can't be collected as '{how}': {shown(why, WHY)}")


class ElsewhereObject(TwinkleError, RuntimeError):
    """A proxy that was sent to workers which don't hold its object."""

    def __init__(self, what: str, group: str) -> None:
        super().__init__(f"{shown(what)} lives on group '{shown(group)}' and can't be reached from another group's workers")
