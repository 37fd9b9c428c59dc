"""Objects of one's own on workers: dispatch, collect, contexts, iterators, and what is refused."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from remote_objects import Counter, Single

from twinkle_core.errors import (
    BadArgument,
    BadDispatch,
    DriverIsRank,
    ElsewhereObject,
    GroupEnded,
    GroupMesh,
    GroupTooLarge,
    NoGroups,
    NotCollected,
    NotCut,
    NotRemote,
    NotSent,
    SameGroup,
    UnknownAdapter,
    UnknownGroup,
    WorkerFailed,
    WorkerMismatch,
)
from twinkle_core.mesh import DeviceGroup, DeviceMesh
from twinkle_core.runtime import local
from twinkle_ray.groups import Group


@pytest.fixture(scope="module")
def counter(cluster):
    return Counter(factor=1, remote_group="actor")


def test_rows_are_divided_as_a_loader_divides_them(counter):
    first, second = counter.whole([1, 2, 3, 4, 5], other=["a", "b", "c", "d", "e"])
    assert (first["rank"], first["rows"], first["other"]) == (0, [1, 2, 3], ["a", "b", "c"])
    assert (second["rank"], second["rows"], second["other"]) == (1, [4, 5], ["d", "e"])
    first, second = counter.whole(torch.arange(3), "x")
    assert first["rows"].tolist() == [0, 1] and second["rows"].tolist() == [2] and second["other"] == "x"
    first, second = counter.whole(rows=[1])
    assert (first["rows"], second["rows"]) == ([1], [])
    first, second = counter.whole({"input_ids": torch.arange(6).reshape(3, 2)})
    assert second["rows"]["input_ids"].tolist() == [[4, 5]]
    assert counter.beside([1, 2], other=[3, 4]) == 4  # whole on both
    with pytest.raises(NotCut, match=r"whole\(\) divides its first argument over workers, which a int can't be"):
        counter.whole(3)


def test_answers_are_collected_as_declared(counter):
    assert counter.doubled([1, 2, 3]) == [2, 4, 6]
    assert counter.doubled([]) == []
    assert counter.total([1, 2, 3]) == 6
    assert counter.mean([1.0, 2.0, 6.0]) == {"mean": pytest.approx(3.0)}  # by rows, no mean of means (3.75)
    assert counter.mean([4.0]) == {"mean": 4.0}  # who had no row has no say
    assert counter.rank_mean().item() == 0.5
    assert counter.loss([1.0, 2.0, 6.0]) == pytest.approx(3.0)
    assert counter.loss([]) == 0.0
    assert counter.most(3) == 4
    assert counter.first() == 0
    assert counter.by_hand(5) == [5, 10]
    assert counter.ranks() == [(0, 2, 2), (1, 2, 2)]
    assert len(counter) == 7
    with pytest.raises(NotCollected, match=r"answers of number\(\) can't be collected as 'flatten'"):
        counter.number()
    with pytest.raises(BadDispatch, match="it must give 2 pair"):
        counter.by_wrong_hand(5)


def test_workers_are_ranks_that_meet(counter):
    found = counter.summed()
    assert found["sum"].item() == 3.0
    assert not found["graph"].requires_grad and "layer" not in found
    assert isinstance(counter.drawn(), float)


def test_peers_of_a_data_rank_get_the_same_rows_and_count_once(cluster):
    peers = Counter(device_mesh=DeviceMesh.from_sizes(tp_size=2), remote_group="actor")
    assert peers.doubled([1, 2, 3]) == [2, 4, 6]
    with pytest.raises(GroupMesh, match=r"has 4 rank\(s\), and group 'actor' has 2 worker\(s\)"):
        Counter(device_mesh=DeviceMesh.from_sizes(dp_size=4), remote_group="actor")


def test_attributes_that_are_declared_are_proxies_too(counter):
    counter.child.scale(3)
    assert counter.child.factor == 3
    assert counter.doubled([1, 2]) == [6, 12]
    counter.child.scale(1)


def test_a_context_holds_around_the_calls_inside_it_alone(counter):
    with counter.child.scaled(5) as told:
        assert told == "times 5"
        assert counter.doubled([1]) == [10]
        with counter.child.scaled(7):
            assert counter.child.factor == 7
        assert counter.child.factor == 5
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(counter.child.factor))
        thread.start()
        thread.join()
        assert elsewhere == [1]
    assert counter.child.factor == 1
    with pytest.raises(ValueError, match="a factor of 0"), counter.child.scaled(0):
        raise AssertionError


def test_iterators_and_the_object_itself(counter):
    assert list(counter.count_to(3)) == [0, 1, 2]
    iterator = counter.count_to(10**9)
    assert [next(iterator), next(iterator)] == [0, 1]
    assert [list(each) for each in counter.ranks_to(2)] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert counter.chain() is counter and counter.child.chain() is counter.child


def test_a_proxy_that_travels_is_the_object_on_its_own_workers(counter, cluster):
    assert counter.holds(counter) == ("Counter", 1)
    with pytest.raises(ElsewhereObject, match="this Counter lives on group 'actor'"):
        Counter(remote_group="one").holds(counter)


def test_one_of_its_kind_lives_on_the_first_worker(cluster):
    single = Single(device_mesh=DeviceMesh.from_sizes(dp_size=2), remote_group="actor")
    assert single.all_of([5, 6]) == [0, True, 5, 6]


def test_what_a_worker_raises_arrives_with_its_type_and_both_places(counter):
    with pytest.raises(KeyError, match="rank 0") as caught:
        counter.raises("key")
    (note,) = caught.value.__notes__
    assert "raised by worker 0 of group 'actor'" in note and "and by 1 more" in note
    assert 'remote_objects.py", line' in note and "isolation.py" not in note
    assert any(entry.path.name == "test_objects.py" for entry in caught.traceback)
    with pytest.raises(WorkerFailed, match="Odd: 1 and 2"):
        counter.raises("odd")
    with pytest.raises(WorkerFailed, match="SystemExit: 3"):
        counter.leave()
    with pytest.raises(ValueError, match="not today"):
        Counter(fail=True, remote_group="actor")
    with pytest.raises(TypeError, match="nonsense"):
        Counter(nonsense=1, remote_group="actor")
    assert counter.first() == 0  # all failed alike: they go on


def test_twinkles_own_errors_are_caught_as_what_they_are(counter):
    with pytest.raises(UnknownAdapter, match="'nobody'") as caught:
        counter.missing("nobody")
    assert "raised by worker 0 of group 'actor'" in caught.value.__notes__[0]


def test_what_can_not_be_sent_is_told_by_name(counter, tmp_path):
    """A lambda is sent with all that it refers to; an open file is not. Nothing has been called then."""
    assert counter.applied(lambda other: other + 1, 2) == 3
    with (tmp_path / "log").open("w") as file:
        with pytest.raises(NotSent, match=r"applied\(\): other, a TextIOWrapper, can't be sent to workers: .*Cannot pickle"):
            counter.applied(len, other=file)
        with pytest.raises(NotSent, match=r"applied\(\): function, a function, can't"):
            counter.applied(lambda other: file)
        with pytest.raises(NotSent, match=r"scaled\(\): argument 1, a TextIOWrapper, can't"), counter.child.scaled(file):
            raise AssertionError
        with pytest.raises(NotSent, match=r"Counter\(...\): factor, a TextIOWrapper, can't"):
            Counter(file, remote_group="actor")
    assert counter.first() == 0


def test_an_answer_that_can_not_be_sent_ends_nobody(counter):
    """The workers have all done their work: they are at the same point."""
    with pytest.raises(NotSent, match=r"lock\(\) has done its work, and what it gives can't be sent: .*_thread.lock"):
        counter.lock()
    assert counter.lock(on=1) == 1, "of that worker nobody wants to know"
    assert counter.first() == 0


def test_after_the_end_every_use_says_so(cluster, monkeypatch):
    """Ray that was shut down, or started anew, by somebody else: no call waits for it, or starts it."""
    counter = Counter(remote_group="one")
    monkeypatch.setattr("twinkle_ray.groups._job", lambda: None)
    for use in (counter.first, lambda: Counter(remote_group="one"), lambda: list(counter.count_to(2))):
        with pytest.raises(GroupEnded, match="group 'one' were ended: Ray was shut down"):
            use()
    assert "one (ended)" in local.get_device_placement()
    counter._home.group.tell("drop", [0], "nothing")  # as when an object is collected: no word


def test_who_catches_ctrl_c_may_go_on(counter, monkeypatch):
    """Every worker has the call, and does it; nobody waits for its answer."""

    def interrupted(*given, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("twinkle_ray.groups.ray.wait", interrupted)
        counter.child.scale(4)
    assert counter.doubled([1, 2, 3]) == [8, 16, 24]
    counter.child.scale(1)


def test_ctrl_c_while_a_call_is_sent_ends_its_group(cluster):
    """Some workers have it, and others not: they would wait for one another."""

    class Broken(Group):
        ended = None

    class Actor:
        def __init__(self, *given):
            self.given = given

        @property
        def call(self):
            return self

        def remote(self):
            raise self.given[0]

    group = Broken("g", "g", [Actor(KeyboardInterrupt())])
    ends = []
    group.end = ends.append
    with pytest.raises(KeyboardInterrupt):
        group.ask("call", [()], "step()")
    assert ends == ["step() was broken off while it was sent"]


def test_what_is_not_declared_is_told(counter):
    with pytest.raises(NotRemote, match="'unseen' is not declared with @remote_function"):
        counter.unseen()
    with pytest.raises(NotRemote, match="Did you mean 'doubled'"):
        counter.double()
    assert repr(counter) == "<Counter on group 'actor' (2 of 2 worker(s))>"
    with pytest.raises(ElsewhereObject):
        pickle.loads(pickle.dumps(counter))


def test_groups_that_can_not_be(cluster, monkeypatch):
    with pytest.raises(UnknownGroup, match=r"no group 'actr'. Did you mean 'actor'\?\n    initialize was given: actor, one"):
        Counter(remote_group="actr")
    with pytest.raises(local.AlreadyInitialized, match="seed: 7 before, 8 now"):
        local.initialize(mode="ray", groups=list(local._state.arguments["groups"]), seed=8)
    same = {**local._state.arguments, "groups": tuple(local._state.arguments["groups"])}
    local.initialize(**same)  # once more, with the same: nothing to do
    monkeypatch.setattr(local, "_state", local._State(local.LocalRuntime()))
    for wrong in (DeviceGroup("a", 1), ["a"], "a", 3):
        with pytest.raises(BadArgument, match=r"groups=.*it must be a list of DeviceGroup"):
            local.initialize(mode="ray", groups=wrong)
    for name, value in (("nproc_per_node", 0), ("nproc_per_node", True), ("global_device_mesh", 3)):
        with pytest.raises(BadArgument, match=f"{name}={value}: it must be"):
            local.initialize(mode="ray", groups=[DeviceGroup("a", 1)], **{name: value})
    with monkeypatch.context() as ranks, pytest.raises(DriverIsRank, match="one of 2 processes"):
        ranks.setenv("WORLD_SIZE", "2")
        local.initialize(mode="ray", groups=[DeviceGroup("a", 1)])
    with pytest.raises(NoGroups):
        local.initialize(mode="ray")
    with pytest.raises(SameGroup, match="two groups are called 'a'"):
        local.initialize(mode="ray", groups=[DeviceGroup("a", 1), DeviceGroup("a", 2)])
    with pytest.raises(GroupTooLarge, match=r"the groups need 2 CPUs and 2 GPUs, and the cluster has 5 CPUs and 0 GPUs"):
        local.initialize(mode="ray", groups=[DeviceGroup("a", 2)])
    with pytest.raises(GroupTooLarge, match="need 6 CPUs, and the cluster has 5 CPUs"):
        local.initialize(mode="ray", groups=[DeviceGroup("a", 6, device_type="CPU")])
    monkeypatch.setattr("twinkle_ray.placing.WAIT", 0.5)
    with pytest.raises(GroupTooLarge, match=r"need 3 CPUs, and the cluster has 2 CPUs free, after 0.5 s of waiting"):
        local.initialize(mode="ray", groups=[DeviceGroup("a", 3, device_type="CPU")])
    assert local._state.arguments is None


def test_other_versions_on_a_worker_are_told_by_name(cluster, monkeypatch):
    from twinkle_core import registry

    row = dict(registry.snapshot(of=[{"kind": "loss", "name": "mse", "distribution": "twinkle-core"}])[0])
    there = registry.snapshot
    monkeypatch.setattr(registry, "snapshot", lambda of=None: [*there(of), {**row, "version": "9.9"}])
    with pytest.raises(WorkerMismatch, match=r"worker 0 \(.*\) has twinkle-core .*; the driver has 9.9"):
        Counter(remote_group="actor")


def test_who_sits_where(cluster):
    drawn = local.get_device_placement()
    assert drawn.startswith("ray: 3 worker(s) in 2 group(s)\n  actor\n")
    assert drawn.count(", 1 CPU") == 3
