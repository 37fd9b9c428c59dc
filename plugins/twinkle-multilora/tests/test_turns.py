"""Turns of several ranks, which are threads here: what rank 0 tells is a queue."""

from __future__ import annotations

import queue
import random
import threading
import time

import pytest

from twinkle_core.errors import RanksApart
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_multilora.ranks import MEETING, RankTurns, Turn


class Line:
    """What rank 0 tells the others."""

    def __init__(self, others):
        self.queues = [queue.Queue() for _ in range(others)]

    def of(self, rank):
        if rank:
            return lambda _: self.queues[rank - 1].get(timeout=20)
        return lambda told: [each.put(told) for each in self.queues]


def ranks(count, **options):
    line = Line(count - 1)
    return [RankTurns(rank, line.of(rank), lambda: "", **options) for rank in range(count)]


def run(*calls):
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_all_ranks_give_turns_in_one_order():
    """3 ranks with 4 threads each, whose programs are alike and whose times are not."""
    turns = ranks(3)
    seen = [[] for _ in turns]

    def program(rank, name):
        draw = random.Random(f"{rank}{name}")

        def called():
            for i in range(10):
                time.sleep(draw.random() / 500)
                with turns[rank].of("step" if i % 2 else "forward", name):
                    seen[rank].append((name, i))
                    with turns[rank].of("forward", name):  # within a turn nothing is told
                        time.sleep(draw.random() / 1000)
                    seen[rank].append((name, i))
                with turns[rank].local():
                    pass

        return called

    run(*(program(rank, name) for rank in range(3) for name in "abcd"))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 80
    assert all(a == b for a, b in zip(seen[0][::2], seen[0][1::2], strict=True)), "nobody comes between"


def test_one_who_is_alone_and_elsewhere_is_told(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    first, second = ranks(2)
    with first.of("step", "a"):
        pass
    with pytest.raises(RanksApart, match=r"rank 0 is at step of 'a', and rank 1 waits with save of 'b'"):
        second.follow(Turn("save", ("b",)))


def test_one_whose_others_do_not_come_waits_no_longer_than_it_must(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    first, second = ranks(2, patience=0.2)
    with first.of("step", "a"):
        pass
    with pytest.raises(RanksApart, match=r"for 0\.2 s with save of 'b'"):
        second.follow(Turn("save", ("b",)))


def test_a_call_that_was_served_waits_no_more():
    first, second = ranks(2)
    served = threading.Event()

    def leader():
        told = second.follow(Turn("forward_backward", ("a",)))
        assert told.names == ("a", "b")
        time.sleep(0.05)
        served.set()
        second.done()

    def other():
        time.sleep(0.02)
        assert second.follow(Turn("forward_backward", ("b",)), served.is_set) is None

    first.tell(Turn("forward_backward", ("a", "b")))
    run(leader, other)


def test_verbs_in_which_ranks_meet_are_verbs():
    assert all(callable(getattr(MultiLoraTransformersModel, verb, None)) for verb in MEETING)
