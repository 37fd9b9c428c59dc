"""Order, shares of ranks, positions."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from twinkle_core.data.dataloader import DataLoader
from twinkle_core.errors import DataError
from twinkle_core.mesh import DeviceMesh


def rank(r: int, of: int) -> SimpleNamespace:
    return SimpleNamespace(data_rank=r, data_world_size=of)


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def forever(loader):
    while True:
        yield from loader


def epochs(loader: DataLoader, count: int) -> list[list[list[int]]]:
    return [list(loader) for _ in range(count)]


_B16 = """
import json, random, sys
from twinkle_core.data.dataloader import DataLoader
loader = DataLoader(list(range(10)), batch_size=2, shuffle=True, seed=0)
random.seed(int(sys.argv[1]))
if sys.argv[2] != "0":
    loader.resume_from_checkpoint(int(sys.argv[2]))
out = []
while len(out) < int(sys.argv[3]):
    for batch in loader:
        out.append(batch)
        if len(out) == int(sys.argv[3]):
            break
print(json.dumps([out, loader.get_state()]))
"""


def test_B16_resume_within_the_second_epoch_keeps_its_order():
    """In a new process the batches after the resume are those of the unbroken run; epoch 2 has its own order, each row once."""

    def run(seed: int, consumed: int, count: int) -> tuple[list[list[int]], dict[str, int]]:
        done = subprocess.run(
            [sys.executable, "-c", _B16, str(seed), str(consumed), str(count)], capture_output=True, text=True, check=True
        )
        batches, state = json.loads(done.stdout)
        return batches, state

    unbroken, state = run(1, 0, 10)
    assert state == {"consumed_train_samples": 20}
    stopped, state = run(2, 0, 7)
    assert stopped == unbroken[:7]
    assert state == {"consumed_train_samples": 14}
    resumed, _ = run(3, 14, 3)
    assert resumed == unbroken[7:]
    first, second = flat(unbroken[:5]), flat(unbroken[5:])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_B18_the_skip_is_used_up_after_one_epoch():
    """Resumed at 4 of 8: two batches, then whole epochs again."""
    loader = DataLoader(range(8), batch_size=2)
    loader.resume_from_checkpoint(4)
    assert epochs(loader, 2) == [[[4, 5], [6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]]


def test_B18_a_checkpoint_at_the_end_of_an_epoch_starts_the_next():
    loader = DataLoader(range(8), batch_size=2)
    loader.resume_from_checkpoint(8)
    assert list(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert loader.get_state() == {"consumed_train_samples": 16}


def test_B18_the_position_counts_samples_so_ranks_and_batch_size_may_change():
    """16 rows, two steps of 4, resumed with two ranks of one row each: the next global batch is rows 8 and 9."""
    loader = DataLoader(range(16), batch_size=4)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.get_state()["consumed_train_samples"]
    firsts = []
    for r in range(2):
        resumed = DataLoader(range(16), batch_size=2, device_mesh=rank(r, 2))
        resumed.resume_from_checkpoint(state)
        firsts.append(next(iter(resumed)))
    assert firsts == [[8], [9]]


@pytest.mark.parametrize("workers", [0, 2])
def test_B19_iterating_draws_nothing_from_global_generators(workers):
    """Restoring random state before or after the iterator is made gives the same next numbers."""
    import numpy as np

    torch.manual_seed(1234), torch.rand(3)
    random.seed(7), random.random()
    np.random.seed(7), np.random.rand(1)
    saved = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    loader = DataLoader(list(range(10)), batch_size=2, shuffle=True, num_workers=workers)
    loader.resume_from_checkpoint(4)
    torch.set_rng_state(saved[0]), random.setstate(saved[1]), np.random.set_state(saved[2])
    assert len(list(loader)) == 3
    assert torch.rand(1).item() == pytest.approx(0.366641, abs=1e-6)
    assert random.random() == pytest.approx(0.150849, abs=1e-6)
    assert np.random.rand() == pytest.approx(0.779919, abs=1e-6)


def test_B59_every_row_once_and_as_many_batches_on_each_rank():
    """10 rows, global batch 4, two ranks; and 9 rows, where one rank has nothing of the last batch."""
    ranks = [list(DataLoader(range(10), batch_size=4, device_mesh=rank(r, 2))) for r in range(2)]
    assert ranks == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    dropped = [list(DataLoader(range(10), batch_size=4, device_mesh=rank(r, 2), drop_last=True)) for r in range(2)]
    assert dropped == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    nine = [list(DataLoader(range(9), batch_size=4, device_mesh=rank(r, 2))) for r in range(2)]
    assert nine == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], []]]


def test_B59_min_batch_size_works_without_a_mesh():
    loader = DataLoader(range(10), batch_size=4, min_batch_size=3)
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(loader) == 2
    assert list(DataLoader(range(11), batch_size=4, min_batch_size=3))[-1] == [8, 9, 10]


@pytest.mark.parametrize("rule", [{}, {"drop_last": True}, {"min_batch_size": 2}])
def test_B59_len_is_the_true_count_and_all_rows_come_round(rule):
    loader = DataLoader(range(10), batch_size=4, shuffle=True, **rule)
    seen: set[int] = set()
    for _ in range(3):
        batches = list(loader)
        assert len(batches) == len(loader)
        seen.update(flat(batches))
    assert seen == set(range(10))


SETUPS = st.fixed_dictionaries(
    {
        "size": st.integers(1, 40),
        "batch_size": st.integers(1, 9),
        "world": st.integers(1, 4),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 5),
    }
)


@settings(max_examples=100, deadline=None)
@given(SETUPS)
def test_over_the_ranks_each_row_comes_once_an_epoch(setup):
    assume(setup["batch_size"] >= setup["world"])
    kwargs = {k: setup[k] for k in ("batch_size", "shuffle", "seed")}
    whole = epochs(DataLoader(range(setup["size"]), **kwargs), 2)
    ranks = [
        epochs(DataLoader(range(setup["size"]), device_mesh=rank(r, setup["world"]), **kwargs), 2)
        for r in range(setup["world"])
    ]
    for epoch, single in enumerate(whole):
        parts = [r[epoch] for r in ranks]
        assert {len(p) for p in parts} == {len(single)}
        assert [flat(batch) for batch in zip(*parts, strict=True)] == single
        assert all(max(map(len, b)) - min(map(len, b)) <= 1 for b in zip(*parts, strict=True))
        assert sorted(flat(single)) == list(range(setup["size"]))


@settings(max_examples=150, deadline=None)
@given(SETUPS, st.sampled_from([{}, {"drop_last": True}, {"min_batch_size": 2}]), st.integers(0, 30), st.data())
def test_resumed_is_unbroken(setup, rule, steps, data):
    """After any number of batches, over epochs' ends and tails that are left out, with any number of ranks."""
    assume(setup["batch_size"] >= max(setup["world"], rule.get("min_batch_size", 1)))
    assume(setup["size"] >= (setup["batch_size"] if rule.get("drop_last") else rule.get("min_batch_size", 1)))
    kwargs = {**{k: setup[k] for k in ("batch_size", "shuffle", "seed")}, **rule}

    unbroken = DataLoader(range(setup["size"]), **kwargs)
    run = forever(unbroken)
    for _ in range(steps):
        next(run)
    state = unbroken.get_state()["consumed_train_samples"]
    ranks = []
    for r in range(setup["world"]):
        loader = DataLoader(range(setup["size"]), device_mesh=rank(r, setup["world"]), **kwargs)
        loader.resume_from_checkpoint(state)
        ranks.append(forever(loader))
    for _ in range(data.draw(st.integers(1, 12))):
        assert flat(next(r) for r in ranks) == next(run)


def test_leaving_early_passes_over_the_rest():
    """Like torch's loader each iter() is a new epoch; the position agrees, so resuming there gives what came next."""
    loader = DataLoader(range(6), batch_size=2, shuffle=True)
    for _ in loader:
        break
    assert loader.get_state() == {"consumed_train_samples": 2}
    second = list(loader)
    assert loader.get_state() == {"consumed_train_samples": 12}
    assert second == epochs(DataLoader(range(6), batch_size=2, shuffle=True), 2)[1]


def test_an_iterator_that_was_not_read_costs_nothing():
    loader = DataLoader(range(6), batch_size=2)
    loader.resume_from_checkpoint(2)
    iter(loader)
    assert list(loader) == [[2, 3], [4, 5]]


def test_of_two_iterators_the_newer_moves_the_position():
    loader = DataLoader(range(4), batch_size=2)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    assert list(older) == [[2, 3]]
    assert loader.get_state() == {"consumed_train_samples": 6}


def test_rows_read_ahead_are_not_consumed():
    loader = DataLoader(list(range(20)), batch_size=2, num_workers=2)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [[0, 1], [2, 3]]
    assert loader.get_state() == {"consumed_train_samples": 4}
    assert list(batches) == list(DataLoader(range(20), batch_size=2))[2:]


def test_a_callable_builds_the_data_set():
    assert list(DataLoader(lambda: [1, 2, 3], batch_size=2)) == [[1, 2], [3]]


def test_a_mesh_of_twinkle_gives_the_rank():
    mesh = DeviceMesh.from_sizes(world_size=4, dp_size=2, tp_size=2)
    parts = [list(DataLoader(range(4), batch_size=4, device_mesh=mesh.at(r))) for r in range(4)]
    assert parts == [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": 1, "device_mesh": rank(0, 2)}, "batch_size=1: it is the global batch; 2 data ranks"),
        ({"batch_size": 2, "min_batch_size": 3}, "min_batch_size=3: batch_size is only 2"),
        ({"batch_size": 8, "drop_last": True}, "3 rows gives no batch at all with batch_size=8 and drop_last"),
    ],
)
def test_bad_arguments_are_told_at_construction(kwargs, text):
    with pytest.raises(DataError, match=text):
        DataLoader([1, 2, 3], **kwargs)


def test_an_empty_data_set_is_told():
    with pytest.raises(DataError, match="has no rows"):
        DataLoader([], batch_size=1)


def test_a_bad_position_is_told_and_changes_nothing():
    loader = DataLoader(range(4), batch_size=2)
    next(iter(loader))
    with pytest.raises(DataError, match="consumed_train_samples=-1"):
        loader.resume_from_checkpoint(-1)
    assert loader.get_state() == {"consumed_train_samples": 2}


class Stream:
    def __iter__(self):
        return iter(range(5))


def test_a_stream_resumes_by_reading_through():
    loader = DataLoader(Stream(), batch_size=2)
    assert epochs(loader, 2) == [[[0, 1], [2, 3], [4]]] * 2
    assert loader.get_state() == {"consumed_train_samples": 10}
    again = DataLoader(Stream(), batch_size=2)
    again.resume_from_checkpoint(7)
    assert epochs(again, 2) == [[[2, 3], [4]], [[0, 1], [2, 3], [4]]]
    for steps in range(8):
        unbroken, resumed = (DataLoader(Stream(), batch_size=2, drop_last=True) for _ in range(2))
        run = forever(unbroken)
        for _ in range(steps):
            next(run)
        resumed.resume_from_checkpoint(unbroken.get_state()["consumed_train_samples"])
        assert list(itertools.islice(forever(resumed), 5)) == list(itertools.islice(run, 5))
    again.resume_from_checkpoint(5)
    assert list(again) == [[0, 1], [2, 3], [4]], "a position at the end of a pass begins the next"
    with pytest.raises(DataError, match="num_workers=1 needs"):
        DataLoader(Stream(), batch_size=2, num_workers=1)
    with pytest.raises(DataError, match="5 rows gives no batch"):
        list(DataLoader(Stream(), batch_size=8, drop_last=True))
    with pytest.raises(DataError, match="shuffle=True needs to know the data set's length"):
        DataLoader(Stream(), batch_size=2, shuffle=True)
    with pytest.raises(TypeError, match="len"):
        len(loader)


@pytest.mark.parametrize(
    ("dataset", "kwargs", "text"),
    [
        ([1], {"shuffle": "no"}, "shuffle='no': it must be True or False"),
        ([1], {"drop_last": "no"}, "drop_last='no': it must be True or False"),
        ({"a": 1}, {}, "a mapping has no rows by index"),
    ],
)
def test_switches_are_truth_values_and_data_has_an_order(dataset, kwargs, text):
    with pytest.raises(DataError, match=text):
        DataLoader(dataset, batch_size=1, **kwargs)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("rows", [range(4), range(9)], ids=["shrunk", "grown"])
def test_a_data_set_of_another_length_is_told(rows, workers):
    """Shrunk, it would end in an IndexError of its own; grown, the new rows would never be read."""
    data = list(range(6))
    loader = DataLoader(data, batch_size=2, num_workers=workers)
    assert len(list(loader)) == 3
    data[:] = rows
    with pytest.raises(DataError, match=rf"has {len(rows)} rows, and had 6[\s\S]*Make a new DataLoader"):
        iter(loader)
    assert loader.get_state() == {"consumed_train_samples": 6}


def test_a_data_set_that_changes_within_an_epoch_is_told():
    data = list(range(6))
    batches = iter(DataLoader(data, batch_size=2))
    assert next(batches) == [0, 1]
    data.pop()
    with pytest.raises(DataError, match="has 5 rows, and had 6"):
        next(batches)
