"""Classes that the tests put on workers."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from twinkle_core import settings
from twinkle_core.errors import UnknownAdapter
from twinkle_core.mesh import DeviceMesh
from twinkle_core.runtime.dispatch import remote_class, remote_function


def twice(workers, args, kwargs):
    return [((args[0] * (rank + 1),), kwargs) for rank in range(workers)]


def wrong(workers, args, kwargs):
    return [args]


class Odd(Exception):
    """Can't be made again from its arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


@remote_class()
class Child:
    def __init__(self, owner):
        self._owner = owner

    @property
    @remote_function(dispatch="all", collect="first")
    def factor(self):
        return self._owner.factor

    @remote_function(dispatch="all", collect="first")
    def chain(self):
        return self

    @remote_function(dispatch="all", collect="none")
    def scale(self, factor):
        self._owner.factor = factor

    @remote_function(dispatch="all", collect="context")
    @contextmanager
    def scaled(self, factor):
        if factor == 0:
            raise ValueError("a factor of 0")
        before, self._owner.factor = self._owner.factor, factor
        try:
            yield f"times {factor}"
        finally:
            self._owner.factor = before


@remote_class()
class Counter:
    """What each worker saw."""

    def __init__(self, factor=1, *, device_mesh=None, fail=False, fail_on=None):
        if fail or settings.rank() == fail_on:
            raise ValueError("not today")
        self.rank, self.factor, self.seen = settings.rank(), factor, None
        self.child = Child(self)
        self.device_mesh = device_mesh

    @remote_function()
    def whole(self, rows, other=None):
        return {"rank": self.rank, "rows": rows, "other": other}

    @remote_function(dispatch="slice_dp", collect="flatten")
    def doubled(self, rows):
        return [2 * row * self.factor for row in rows]

    @remote_function(dispatch="slice", collect="sum")
    def total(self, rows):
        return sum(rows)

    @remote_function(dispatch="slice", collect="mean")
    def mean(self, rows):
        return {"mean": sum(rows) / len(rows)} if rows else {"mean": 1e9}

    @remote_function(dispatch="all", collect="mean")
    def rank_mean(self):
        return torch.tensor(float(self.rank))

    @remote_function(dispatch="slice", collect="loss")
    def loss(self, rows):
        return float(sum(rows)), float(len(rows))

    @remote_function(dispatch="all", collect="none")
    def ranks(self):
        return self.rank, settings.world_size(), dist.get_world_size() if dist.is_initialized() else 1

    @remote_function(dispatch="all", execute="first", collect="first")
    def first(self):
        return self.rank

    @remote_function(dispatch="all", collect=max)
    def most(self, number):
        return self.rank + number

    @remote_function(dispatch=twice, collect="none")
    def by_hand(self, number):
        return number

    @remote_function(dispatch=wrong)
    def by_wrong_hand(self, number):
        return number

    @remote_function(dispatch="slice", collect="sum", cut_beside=False)
    def beside(self, rows, other):
        return len(other)

    @remote_function(dispatch="all", collect="flatten")
    def number(self):
        return self.rank

    @remote_function(dispatch="all", collect="first")
    def summed(self):
        x = torch.tensor([float(self.rank + 1)], requires_grad=True)
        y = x.detach().clone()
        dist.all_reduce(y)
        return {"sum": y, "graph": x * 2, "layer": torch.nn.Linear(1, 1)}

    @remote_function(dispatch="all", collect="first")
    def drawn(self):
        return torch.rand(1).item()

    @remote_function(dispatch="all", collect="none")
    def raises(self, kind, on=None, wait_for_others=False):
        if on is not None and self.rank != on:
            if wait_for_others:
                dist.barrier()
            return
        raise Odd(1, 2) if kind == "odd" else {"key": KeyError, "value": ValueError}[kind](f"rank {self.rank}")

    @remote_function(dispatch="all", collect="none")
    def die(self, on, wait_for_others=True):
        if self.rank == on:
            os.kill(os.getpid(), 9)
        if wait_for_others:
            dist.barrier()

    @remote_function(dispatch="all", collect="none")
    def pid(self):
        return os.getpid()

    @remote_function(dispatch="all", collect="first")
    def sleep(self, seconds):
        time.sleep(seconds)

    @remote_function(dispatch="all", collect="first")
    def chain(self):
        return self

    @remote_function(dispatch="all", collect="first")
    def count_to(self, n):
        yield from range(n)

    @remote_function(dispatch="all", collect="none")
    def ranks_to(self, n):
        yield from ((self.rank, i) for i in range(n))

    @remote_function(dispatch="all", collect="none")
    def leave(self):
        raise SystemExit(3)

    @remote_function(dispatch="all", collect="first")
    def __len__(self):
        return 7

    @remote_function(dispatch="all", collect="first")
    def holds(self, other):
        return type(other).__name__, other.factor

    @remote_function(dispatch="all", collect="first")
    def lock(self, on=0):
        return threading.Lock() if self.rank == on else 1

    @remote_function(dispatch="all", collect="first")
    def applied(self, function, other=None):
        return function(other)

    @remote_function(dispatch="all", collect="none")
    def missing(self, name):
        raise UnknownAdapter(name, None, [])

    def unseen(self):
        return 1


@remote_class(execute="first")
class Single:
    def __init__(self, *, device_mesh: DeviceMesh | None = None):
        self.mesh = device_mesh

    @remote_function(dispatch="slice_dp", collect="flatten")
    def all_of(self, rows):
        return [settings.rank(), self.mesh is None, *rows]
