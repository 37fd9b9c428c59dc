"""A lock that is given in the order in which it was asked for."""

from __future__ import annotations

import threading
import time

import pytest

from twinkle_core.train.turns import Turns


def wait_until(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_first_come_first_served():
    """Twenty who came while it was taken, and one who asks again at once each time."""
    turns, order, threads = Turns(), [], []

    def take(i):
        with turns:
            order.append(i)

    turns.acquire()
    for i in range(20):
        threads.append(threading.Thread(target=take, args=(i,)))
        threads[-1].start()
        wait_until(lambda i=i: turns.waiting == i + 1)
    turns.release()
    with turns:  # behind all who wait
        order.append("me")
    for thread in threads:
        thread.join(timeout=30)
    assert order == [*range(20), "me"] and not turns.waiting


def test_one_thread_may_ask_again():
    turns, seen = Turns(), []
    with turns, turns:
        other = threading.Thread(target=lambda: (turns.acquire(), seen.append(1), turns.release()))
        other.start()
        wait_until(lambda: turns.waiting == 1)
        with turns:
            assert not seen
    other.join(timeout=30)
    assert seen == [1]


def test_it_is_given_up_by_who_has_it():
    turns = Turns()
    with pytest.raises(RuntimeError):
        turns.release()
    turns.acquire()
    failed = []

    def steal():
        try:
            turns.release()
        except RuntimeError:
            failed.append(True)

    thief = threading.Thread(target=steal)
    thief.start()
    thief.join(timeout=30)
    turns.release()
    assert failed == [True]


def test_an_exception_gives_it_up():
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns:
        raise ZeroDivisionError
    done = threading.Thread(target=lambda: (turns.acquire(), turns.release()))
    done.start()
    done.join(timeout=30)
    assert not done.is_alive()


@pytest.mark.parametrize("came", [False, True], ids=["before its turn", "as its turn comes"])
def test_who_is_interrupted_while_waiting_keeps_nobody(came, monkeypatch):
    """Ctrl-C at the gate: the turn goes to the next."""
    turns, real = Turns(), threading.Lock
    turns.acquire()

    class Gate:
        """Interrupts the second acquire: the wait."""

        def __init__(self):
            self.lock, self.asked = real(), 0

        def acquire(self):
            self.asked += 1
            if self.asked == 2:
                if came:
                    self.lock.acquire()
                raise KeyboardInterrupt
            self.lock.acquire()

        def release(self):
            self.lock.release()

    raised = []

    def wait():
        try:
            turns.acquire()
        except KeyboardInterrupt:
            raised.append(True)

    with monkeypatch.context() as patched:
        patched.setattr("twinkle_core.train.turns.Lock", Gate)
        waiter = threading.Thread(target=wait)
        if came:
            waiter.start()
            wait_until(lambda: turns.waiting == 1)
            turns.release()
        else:
            waiter.start()
        waiter.join(timeout=30)
    if not came:
        turns.release()
    assert raised == [True] and not turns.waiting
    after = threading.Thread(target=lambda: (turns.acquire(), turns.release()))
    after.start()
    after.join(timeout=30)
    assert not after.is_alive()
