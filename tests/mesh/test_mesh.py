"""The mesh: every rank has one place, and the arithmetic is told when it does not fit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.data.dataloader import DataLoader
from twinkle_core.errors import BadLaunch, BadMesh
from twinkle_core.mesh import ORDER, DeviceGroup, DeviceMesh

size = st.integers(1, 3)


@given(dp=size, fsdp=size, tp=size, pp=size, cp=size)
def test_coordinates_are_the_mixed_radix_digits_of_the_rank(dp, fsdp, tp, pp, cp):
    mesh = DeviceMesh.from_sizes(dp_size=dp, fsdp_size=fsdp, tp_size=tp, pp_size=pp, cp_size=cp)
    places = [tuple(mesh.coordinates(r)[d] for d in ORDER) for r in range(mesh.world_size)]
    assert places == list(itertools.product(*(range(mesh.sizes[d]) for d in ORDER)))


@given(dp=size, fsdp=size, tp=size, pp=size)
def test_peers_of_all_dimensions_are_everyone_and_of_one_are_that_many(dp, fsdp, tp, pp):
    mesh = DeviceMesh.from_sizes(dp_size=dp, fsdp_size=fsdp, tp_size=tp, pp_size=pp)
    assert mesh.ranks(*ORDER) == list(range(mesh.world_size))
    for dim in ORDER:
        groups = {tuple(mesh.ranks(dim, rank=r)) for r in range(mesh.world_size)}
        assert all(len(g) == mesh.sizes[dim] for g in groups)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))


@given(dp=size, fsdp=size, tp=size)
def test_data_rank_is_dp_times_f_plus_fsdp_and_tp_peers_share_it(dp, fsdp, tp):
    mesh = DeviceMesh.from_sizes(dp_size=dp, fsdp_size=fsdp, tp_size=tp)
    assert mesh.data_world_size == dp * fsdp
    for rank in range(mesh.world_size):
        seen, place = mesh.at(rank), mesh.coordinates(rank)
        assert seen.data_rank == place["dp"] * fsdp + place["fsdp"]
        assert {mesh.at(peer).data_rank for peer in mesh.ranks("tp", rank=rank)} == {seen.data_rank}


def test_ulysses_peers_share_their_rows():
    mesh = DeviceMesh.from_sizes(dp_size=4, ulysses_size=2)
    assert mesh.data_world_size == 2
    assert [mesh.at(r).data_rank for r in range(4)] == [0, 0, 1, 1]


def test_ranks_with_the_same_rows_draw_one_stream_and_others_draw_others():
    mesh = DeviceMesh.from_sizes(dp_size=2, fsdp_size=2, tp_size=2, ulysses_size=2)
    for rank, stream in enumerate(mesh.streams):
        assert [r for r, other in enumerate(mesh.streams) if other == stream] == mesh.ranks("tp", rank=rank)
    assert sorted(set(mesh.streams)) == [0, 1, 2, 3] and DeviceMesh.from_sizes(world_size=1).streams == [0]


def test_one_process_needs_no_sizes():
    mesh = DeviceMesh.from_sizes()
    assert (mesh.world_size, mesh.data_world_size, mesh.data_rank) == (1, 1, 0)
    assert repr(mesh) == "DeviceMesh: 1 rank"


def test_data_parallelism_takes_what_is_over(monkeypatch):
    assert DeviceMesh.from_sizes(world_size=8, tp_size=2).sizes["dp"] == 4
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    mesh = DeviceMesh.from_sizes(fsdp_size=2)
    assert (mesh.sizes["dp"], mesh.rank, mesh.data_rank) == (2, 3, 3)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"world_size": 4, "tp_size": 3}, ["tp_size 3 = 3", "world size of 4"]),
        ({"world_size": 8, "dp_size": 2, "tp_size": 2}, ["dp_size 2 × tp_size 2 = 4", "world size of 8"]),
        ({"dp_size": 0}, ["dp_size=0"]),
        ({"tp_size": True}, ["tp_size=True"]),
        ({"device_type": 0}, ["device_type=0 is no name of a kind of device"]),
        ({"pp_size": "2"}, ["pp_size='2'"]),
        ({"ulysses_size": 2}, ["ulysses_size = 2", "dp_size × fsdp_size = 1"]),
        ({"dp_size": 2, "ep_size": 4}, ["ep_size × etp_size = 4", "= 2"]),
    ],
)
def test_sizes_that_do_not_fit_show_the_arithmetic(sizes, words):
    with pytest.raises(BadMesh) as error:
        DeviceMesh.from_sizes(**sizes)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 in the environment, and RANK is missing"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, r"RANK=2 in the environment is none of WORLD_SIZE=2 processes \(0 … 1\)"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK='-1' in the environment is not a whole number from 0 up"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE='two' in the environment is not a whole number from 1 up"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE='0'"),
    ],
)
def test_an_environment_that_names_no_rank_is_told(monkeypatch, variables, words):
    monkeypatch.delenv("RANK", raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(BadLaunch, match=words):
        DataLoader(range(8), batch_size=2, device_mesh=DeviceMesh.from_sizes())


def test_repr_is_a_drawing():
    mesh = DeviceMesh.from_sizes(fsdp_size=2, dp_size=2, tp_size=2, sequence_parallel=True)
    assert repr(mesh).splitlines() == [
        "DeviceMesh: 8 ranks = fsdp 2 × dp 2 × tp 2 (sequence parallel)",
        "                 tp0  tp1",
        "  fsdp0 dp0        0    1",
        "  fsdp0 dp1        2    3",
        "  fsdp1 dp0        4    5",
        "  fsdp1 dp1        6    7",
    ]


@pytest.mark.parametrize("ranks", [0, [], [1, 1], [-1]])
def test_a_group_without_members_or_with_one_twice_is_refused(ranks):
    with pytest.raises(BadMesh, match="ranks"):
        DeviceGroup("actor", ranks)
    assert DeviceGroup("actor", 2).members == [0, 1]


@pytest.mark.parametrize(
    "wrong",
    [{"name": 3}, {"name": ""}, {"device_type": None}, {"ranks": "2"}, {"ranks": 2.0}, {"ranks": True}, {"ranks": [1, "x"]}],
)
def test_what_is_no_group_is_told_by_its_name(wrong):
    ((name, _),) = wrong.items()
    with pytest.raises(BadMesh, match=f"DeviceGroup\\({name}="):
        DeviceGroup(**{"name": "actor", "ranks": 2, **wrong})
