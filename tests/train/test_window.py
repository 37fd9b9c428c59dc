"""The accumulation window as a rule: what closes, when, with how many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.errors import BadWindowSize, WindowNotStepped, WindowSizeChanged
from twinkle_core.train.window import CLIP, LR, STEP, ZERO, AccumulationWindow


def close(window):
    """All four verbs; returns which acted."""
    acted = []
    for verb in (CLIP, STEP, ZERO, LR):
        if window.acts(verb):
            window.normalised = True
            window.updated |= verb == STEP
            window.mark(verb)
            acted.append(verb)
    return acted


@given(size=st.integers(1, 9), backwards=st.integers(0, 60))
def test_closes_exactly_floor_of_k_over_n_times_each_with_n(size, backwards):
    window, closed = AccumulationWindow(size), []
    for k in range(1, backwards + 1):
        assert window.due_after_next() == (k % size == 0)
        window.begin()
        window.add(10)
        if close(window) == [CLIP, STEP, ZERO, LR]:
            closed.append((k, window.count, window.weight))
    assert closed == [(size * j, size, 10 * size) for j in range(1, backwards // size + 1)]


@given(
    size=st.one_of(st.none(), st.integers(1, 4)),
    calls=st.lists(st.sampled_from(["backward", CLIP, STEP, ZERO, LR]), max_size=40),
)
def test_any_order_of_verbs_keeps_the_rules(size, calls):
    window = AccumulationWindow(size)
    since = 0  # backwards whose gradients have not been used or dropped
    for call in calls:
        if call == "backward":
            if window.normalised and not window.finished:
                with pytest.raises(WindowNotStepped):
                    window.begin()
                assert window.count == since
                continue
            if window.finished:
                since = 0
            window.begin()
            window.add(1)
            since += 1
            assert window.count == window.weight == since
        elif window.acts(call):
            assert window.due and since >= (size or 1)
            assert call != LR or window.updated
            window.normalised |= call in (CLIP, STEP)
            window.updated |= call == STEP
            window.mark(call)
            assert not window.acts(call), "each verb acts once"


def test_a_due_window_that_nobody_touched_takes_more():
    window = AccumulationWindow(2)
    for _ in range(3):
        window.begin()
        window.add(1)
    assert window.due and window.count == 3
    assert close(window) == [CLIP, STEP, ZERO, LR]


def test_size_that_is_not_known_acts_as_one_and_is_learnt_from_the_first_verb():
    window = AccumulationWindow()
    window.add(1)
    assert window.due
    window.resize(3)
    assert not window.due and window.count == 1


def test_another_size_while_open_shows_both():
    window = AccumulationWindow(4)
    window.add(1)
    window.resize(4)
    with pytest.raises(WindowSizeChanged, match=r"=2 .* of 4 is open \(1 of 4"):
        window.resize(2)
    assert window.size == 4 and window.count == 1


def test_another_size_once_finished_does_not_take_the_window_back():
    window = AccumulationWindow(1)
    window.add(1)
    window.mark(STEP)
    window.updated = True
    window.resize(8)
    assert window.acts(ZERO) and window.acts(LR)


def test_a_size_that_came_too_late_is_refused():
    window = AccumulationWindow()
    window.add(1)
    window.mark(CLIP)
    with pytest.raises(WindowSizeChanged):
        window.resize(4)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_sizes_are_whole_and_positive(size):
    with pytest.raises(BadWindowSize, match="at least 1"):
        AccumulationWindow().resize(size)


def test_stale_gradients_are_reported_when_zero_grad_was_left_out():
    window = AccumulationWindow(1)
    window.add(1)
    window.mark(STEP)
    assert window.begin() and window.count == 0
    window.add(1)
    window.mark(STEP)
    window.mark(ZERO)
    assert not window.begin()


@given(
    size=st.one_of(st.none(), st.integers(1, 5)), count=st.integers(0, 5), acted=st.sets(st.sampled_from([CLIP, STEP, ZERO]))
)
def test_state_goes_there_and_back(size, count, acted):
    window = AccumulationWindow(size)
    for _ in range(count):
        window.add(2)
    for verb in acted:
        window.mark(verb)
    again = AccumulationWindow()
    again.load_state_dict(window.state_dict())
    assert again == window
