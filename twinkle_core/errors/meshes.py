"""Errors of meshes and runtimes (L0)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twinkle_core.errors.base import TwinkleError


class BadMesh(TwinkleError, ValueError):
    """Sizes of a mesh, or of a group, that can't be."""

    @classmethod
    def size(cls, name: str, value: object) -> BadMesh:
        return cls(f"{name}={value!r} is not a size; give a whole number from 1 up, or leave it out.")

    @classmethod
    def product(cls, sizes: dict[str, int], world_size: int) -> BadMesh:
        used = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
        product = 1
        for size in used.values():
            product *= size
        sum_ = " × ".join(f"{name}_size {size}" for name, size in used.items())
        return cls(
            f"{sum_} = {product}, which does not fit a world size of {world_size}.\n"
            f"    Start {product} processes, or give sizes whose product is {world_size}."
        )

    @classmethod
    def divides(cls, name: str, value: int, of: str, total: int) -> BadMesh:
        return cls(f"{name} = {value} must divide {of} = {total}; {total} / {value} = {total / value:.4g}.")

    @classmethod
    def device(cls, value: object) -> BadMesh:
        return cls(f"device_type={value!r} is no name of a kind of device: 'cpu', 'cuda', …, or leave it out.")

    @classmethod
    def rank(cls, rank: int, world_size: int) -> BadMesh:
        return cls(f"rank {rank} is outside a mesh of {world_size} (0 … {world_size - 1}).")

    @classmethod
    def group(cls, field: str, value: object, way: str) -> BadMesh:
        return cls(f"DeviceGroup({field}={value!r}): {way}.")


#: who says which process this is
LAUNCHER = "torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


class BadLaunch(TwinkleError, ValueError):
    """RANK, WORLD_SIZE or LOCAL_RANK of the environment can't be."""

    @classmethod
    def number(cls, variable: str, value: str, least: int) -> BadLaunch:
        return cls(f"{variable}={value!r} in the environment is not a whole number from {least} up. {LAUNCHER}.")

    @classmethod
    def without(cls, variable: str, world_size: int) -> BadLaunch:
        return cls(
            f"WORLD_SIZE={world_size} in the environment, and {variable} is missing: which of the processes is this?\n"
            f"    {LAUNCHER}. For one process: unset WORLD_SIZE."
        )

    @classmethod
    def outside(cls, rank: int, world_size: int) -> BadLaunch:
        which = f"none of WORLD_SIZE={world_size} processes (0 … {world_size - 1})"
        return cls(f"RANK={rank} in the environment is {which}. {LAUNCHER}.")

    @classmethod
    def apart(cls, rank: int, group: int) -> BadLaunch:
        return cls(
            f"this process is rank {group} of torch's process group, and rank {rank} by RANK in the environment, which says "
            f"what rows are its own.\n    {LAUNCHER}; who starts processes otherwise sets them alike, before anything is made."
        )


class RankFailed(TwinkleError, RuntimeError):
    """One of several processes that work together ended badly; the others were ended too."""

    def __init__(self, rank: int, world_size: int, what: str, output: str) -> None:
        lines = "".join(f"\n    {line}" for line in output.strip().splitlines()[-20:])
        super().__init__(f"rank {rank} of {world_size} {what}:{lines or ' it wrote nothing'}")


class FailedElsewhere(TwinkleError, RuntimeError):
    """A call that failed on another rank, and is therefore given up on all."""

    def __init__(self, what: str, rank: int, why: str) -> None:
        super().__init__(f"{what} failed on rank {rank}, and was given up on all ranks: {why}")


class RanksApart(TwinkleError, RuntimeError):
    """Ranks that must make the same calls, and do not."""

    def __init__(self, rank: int, told: str, waiting: Iterable[str], seconds: float | None = None) -> None:
        here = ", ".join(waiting) or "nothing"
        late = "" if seconds is None else f" for {seconds:g} s"
        super().__init__(
            f"rank 0 is at {told}, and rank {rank} waits{late} with {here}.\n"
            f"    every rank makes the same calls, each thread its own in the same order; "
            f"a rank without rows of a tenant gives [] for it"
        )

    @classmethod
    def calls(cls, calls: Sequence[str]) -> RanksApart:
        """In what each rank is, by its number."""
        return _saying(
            f"ranks make different calls, and would wait for each other in vain: {_by_rank(calls)}.\n"
            f"    all ranks make the calls in which they meet, in one order and as many: take them out of `if rank == 0:` "
            f"(save writes once all the same)"
        )

    @classmethod
    def differently(cls, calls: Sequence[str]) -> RanksApart:
        """All are in the same call, each with something else: what, by its number."""
        return _saying(
            f"ranks make the same call with different settings, and would drift apart: {_by_rank(calls)}.\n"
            f"    only rows differ from rank to rank: give all the same model, adapters, optimizer, schedule, loss, metrics"
        )

    @classmethod
    def rows(cls, share: int, ranks: Sequence[int]) -> RanksApart:
        """Ranks that compute together on one share of the rows, and were given different ones."""
        return _saying(
            f"ranks {', '.join(map(str, ranks))} compute together on share {share} of the rows, and were given different rows, "
            f"loss arguments, or another micro_batch_size.\n"
            f"    share rows out by mesh.data_rank of mesh.data_world_size and not by RANK "
            f"(DataLoader(…, device_mesh=mesh) does it), and give all of them one number where a loss takes one"
        )


def _saying(text: str) -> RanksApart:
    error = RanksApart.__new__(RanksApart)
    TwinkleError.__init__(error, text)
    return error


def _by_rank(calls: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(at) > 1)} {', '.join(at)} in {call}" for call, at in ranks.items())


class RankLeft(TwinkleError, RuntimeError):
    """A rank that others wait for has ended, or doesn't come in time."""

    def __init__(self, call: str, why: str) -> None:
        super().__init__(
            f"{call} waits for all ranks, and one has ended or does not come: {why}\n"
            f"    look for the first error of the other ranks; or one has left its loop earlier, or leaves this call out"
        )


class AlreadyInitialized(TwinkleError, RuntimeError):
    """``initialize`` was called twice with different arguments."""

    def __init__(self, first: dict[str, object], second: dict[str, object]) -> None:
        different = [name for name in second if first.get(name) != second[name]]
        lines = "".join(f"\n    {name}: {first.get(name)!r} before, {second[name]!r} now" for name in different)
        super().__init__(f"twinkle.initialize was already called with other arguments:{lines}\n    Call it once, at the start.")


class NotInitialized(TwinkleError, RuntimeError):
    """``remote_group`` where nobody has said what that is."""

    def __init__(self, owner: str, group: str) -> None:
        super().__init__(
            f"{owner}(remote_group={group!r}): there are no groups yet.\n"
            f"    Call twinkle.initialize(mode='ray', groups=[DeviceGroup({group!r}, ...)]) first;\n"
            f"    to run in this process, leave remote_group out, or call twinkle.initialize(), where it has no effect"
        )
