"""A proxy and the objects that it stands for, in one process: how calls are divided, sent and brought together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.data.sampler import share
from twinkle_core.errors import NotRemote
from twinkle_core.runtime import collect, cut
from twinkle_core.runtime.calls import Call, Rows
from twinkle_core.runtime.dispatch import declared, remote_class, remote_function
from twinkle_core.runtime.proxy import Home, proxy
from twinkle_core.runtime.serve import Server
from twinkle_core.types import ModelOutput


@remote_class()
class Score:
    def __init__(self, bonus=0):
        self.bonus, self.seen = bonus, []

    @remote_function(dispatch="slice_dp", collect="loss")
    def add(self, rows, weights=None):
        self.seen.append((rows, weights))
        return float(sum(rows) + self.bonus), float(len(rows))

    @remote_function(dispatch="slice_dp", collect="rows")
    def forward(self, rows):
        return rows

    @remote_function(dispatch="along", collect="loss")
    def again(self, weights, scale=1.0):
        self.seen.append((weights, scale))
        return float(sum(weights)), float(len(weights))

    @remote_function(dispatch="all", execute="first", collect="first")
    def grouping(self):
        return "a", lambda rows: [2] * (len(rows) // 2), False

    @property
    @remote_function(dispatch="all", collect="none")
    def history(self):
        return self.seen


class Here(Home):
    """Workers that are objects of this process."""

    def __init__(self, owner, shares, *args):
        super().__init__(owner, "here", "it", shares)
        self.servers = [Server(lambda value: None, tells=False) for _ in shares]
        for server in self.servers:
            assert server.build(lambda: ("it", owner, args, {})).error is None

    def send(self, calls):
        assert all(isinstance(call, Call) for call in calls)
        answers = [server.call(lambda call=call: call) for server, call in zip(self.servers, calls, strict=False)]
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return answers

    def fetch(self, worker, held):
        return self.servers[worker].next(held.number).value

    def let_go(self, worker, held):
        self.servers[worker].let_go(held.number)

    def reference(self, path):
        return self.servers[0].object, ("it", path)


@given(st.integers(0, 40), st.integers(1, 7))
def test_rows_are_divided_as_a_data_loader_divides_them(count, shares):
    rows = list(range(count))
    _, how = cut.of("f", rows, shares)
    assert how.rows(rows) == [share(rows, rank, shares) for rank in range(shares)]


@given(st.lists(st.integers(1, 4), max_size=12), st.integers(1, 5))
def test_groups_are_divided_whole(sizes, shares):
    rows = [{"group": i} for i, size in enumerate(sizes) for _ in range(size)]
    _, how = cut.of("f", rows, shares, lambda rows: sizes)
    parts = how.rows(rows)
    assert [row for part in parts for row in part] == rows
    expected = [[i for i in share(range(len(sizes)), rank, shares) for _ in range(sizes[i])] for rank in range(shares)]
    assert [[row["group"] for row in part] for part in parts] == expected


def test_what_goes_beside_the_rows_is_divided_with_them():
    rows = [{"input_ids": [0] * n} for n in (2, 3, 4)]
    _, how = cut.of("f", rows, 2)
    assert how.beside([1, 2, 3]) == [[1, 2], [3]]
    assert [part.tolist() for part in how.beside(torch.tensor([1, 2, 3]))] == [[1, 2], [3]]
    packed = torch.arange(9)[None]  # one number for each token of all rows
    assert [part.tolist() for part in how.beside(packed)] == [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8]]]
    for value in ("abc", [1, 2], torch.tensor(3), None, {"a": 1}):
        assert all(part is value for part in how.beside(value))


def test_pairs_stay_together_and_peers_get_the_same():
    """Data ranks 0, 0, 1: two workers share the rows of the first, and its answer counts once."""
    home = Here(Score, [0, 0, 1], 100)
    score = proxy(Score, home)
    assert score.add([1, 2, 3, 4, 5, 6], weights=[1, 1, 1, 2, 2, 2]) == pytest.approx((21 + 200) / 6)
    first, peer, last = score.history
    assert first == peer == [([1, 2, 3, 4], [1, 1, 1, 2])]
    assert last == [([5, 6], [2, 2])]
    assert score.forward([1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 6]
    assert score.forward([1, 2]) == [1, 2]
    assert score.again([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], scale=2.0) == 21 / 6  # as the rows before
    assert [seen[-1] for seen in score.history] == [([1.0, 2.0, 3.0, 4.0], 2.0)] * 2 + [([5.0, 6.0], 2.0)]
    with pytest.raises(NotRemote):
        score.bonus.real()


def test_answers_are_weighed():
    assert collect.together("f", "loss", [(3.0, 1.0), (9.0, 5.0)]) == 2.0
    assert collect.together("f", "loss", [(0.0, 0.0), (0.0, 0.0)]) == 0.0
    assert collect.together("f", "mean", [1.0, 4.0], [1, 2]) == 3.0
    assert collect.together("f", "mean", [torch.tensor(1.0), 5.0]) == 3.0
    assert collect.together("f", "sum", [{"a": 1, "b": 2}, {"a": 3, "b": 4}]) == {"a": 4, "b": 6}
    assert collect.together("f", "none", [None, None]) is None
    assert collect.together("f", "none", [1, None]) == [1, None]


def test_outputs_are_joined_by_row_and_by_token():
    def output(rows, tokens, packed=False, left=False):
        return Rows(ModelOutput(logps=torch.ones(rows, tokens), embeddings=torch.ones(rows, 2)), packed, left)

    padded = collect.together("f", "rows", [output(2, 3), output(1, 5), output(1, 9)], [2, 1, 0])
    assert padded.logps.tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1] * 5]
    assert padded.embeddings.shape == (3, 2)
    left = collect.together("f", "rows", [output(2, 3, left=True), output(1, 5, left=True)], [2, 1])
    assert left.logps[0].tolist() == [0, 0, 1, 1, 1]
    packed = collect.together("f", "rows", [output(1, 7, packed=True), output(1, 5, packed=True)], [2, 1])
    assert packed.logps.shape == (1, 12)


def test_every_verb_of_a_model_is_declared():
    verbs = {name for name in vars(TwinkleModel) if not name.startswith("_") and callable(getattr(TwinkleModel, name))}
    assert verbs - {"share"} == set(declared(TwinkleModel))
    assert len(declared(TwinkleModel)) == 29


@remote_class()
class Scores:
    """Adapters ``a`` (rows in pairs) and ``b``, which ``0`` and ``1`` mean too."""

    def __init__(self):
        self.seen = []

    @remote_function(dispatch="slice_each", collect="loss_each")
    def add(self, rows, **given):
        self.seen.append((rows, given))
        return {name: (float(sum(own)), float(len(own))) for name, own in rows.items()}

    @remote_function(dispatch="all", execute="first", collect="first")
    def groupings(self, names):
        pairs = {"a": lambda rows: [2] * (len(rows) // 2), "b": None}
        known = {name: "a" if name in ("a", "0") else "b" for name in names if name in ("a", "b", "0", "1")}
        return {name: (whose, pairs[whose], False) for name, whose in known.items()}

    @property
    @remote_function(dispatch="all", collect="none")
    def history(self):
        return self.seen


def test_rows_of_several_adapters_are_divided_by_the_rules_of_each():
    home = Here(Scores, [0, 0, 1])  # the first two are peers
    scores = proxy(Scores, home)
    given = {"w": [1, 2, 3], "by": {"0": [1, 2, 3, 4, 5, 6], "b": "x"}, "scale": 2.0, "options": {"c": [1, 2, 3]}}
    assert scores.add({"a": [1, 2, 3, 4, 5, 6], "1": [7, 8, 9]}, **given) == {"a": 3.5, "1": 8.0}
    first, peer, last = (seen[0] for seen in scores.history)
    beside = {"scale": 2.0, "options": {"c": [1, 2, 3]}}
    assert (
        first
        == peer
        == (
            {"a": [1, 2, 3, 4], "1": [7, 8]},
            {"w": {"a": [1, 2, 3], "1": [1, 2]}, "by": {"0": [1, 2, 3, 4], "b": "x"}, **beside},
        )
    )
    assert last == ({"a": [5, 6], "1": [9]}, {"w": {"a": [1, 2, 3], "1": [3]}, "by": {"0": [5, 6], "b": "x"}, **beside})
    assert scores.add(rows={"b": [4]}) == {"b": 4.0}
    assert [seen[1] for seen in scores.history] == [({"b": [4]}, {}), ({"b": [4]}, {}), ({"b": []}, {})]
    for unknown in ({"a": [1], "c": [2]}, {"a": [1], 5: [2]}, {}):  # the method says what is wrong
        scores.add(unknown)
        assert [seen[-1][0] for seen in scores.history] == [unknown] * 3


def test_a_constructor_keeps_its_signature_and_takes_a_group():
    import inspect

    for target in (Score, Score.__init__):
        assert "remote_group" in inspect.signature(target).parameters
    assert Score(3).bonus == 3
    with pytest.raises(TypeError):
        Score(nonsense=1)


@pytest.mark.parametrize("left", [False, True])
def test_numbers_of_tokens_end_where_the_rows_of_a_part_end(left):
    """Beyond, a worker's batch has no place for them; a matrix of another width goes as it is."""
    rows = [{"input_ids": [1] * n} for n in (2, 3, 5)]
    _, how = cut.of("f", rows, 2, left=left)
    assert [list(part) for part in how.ranges] == [[0, 1], [2]]
    value = torch.arange(1.0, 16.0).view(3, 5)
    parts, widest = how.beside(value), [max(len(rows[i]["input_ids"]) for i in part) for part in how.ranges]
    for part, own, n in zip(how.ranges, parts, widest, strict=True):
        kept = slice(5 - n, None) if left else slice(0, n)
        assert torch.equal(own[:, kept], value[part.start : part.stop, kept])
        assert own.count_nonzero() == len(part) * n
    assert [own.shape for own in how.beside(torch.ones(3, 7))] == [(len(part), 7) for part in how.ranges]
    assert value.count_nonzero() == 15
