"""Packs of rows, and streams."""

from __future__ import annotations

import itertools
import json
import math

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core.data.dataloader import DataLoader
from twinkle_core.data.dataset import Dataset, DatasetMeta
from twinkle_core.data.packing import PackingDataset, first_fit_decreasing
from twinkle_core.data.streaming import IterableDataset
from twinkle_core.errors import BareId, DataError, NoSuchPath
from twinkle_core.processors.input import InputProcessor, unpack
from twinkle_core.testing.tokenizers import toy_t_tokenizer

datasets.disable_progress_bars()


def talk(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize("length", [0, -1, True, 2.0, "30"])
def test_a_pack_of_no_length_is_refused(length):
    """0 is no way to say the template's."""
    with pytest.raises(DataError, match=r"max_length=.*: a whole number from 1 up, or None for the template's"):
        PackingDataset([talk("hi", "yo")], max_length=length)


TALKS = [talk("hi " * n, "yo " * m) for n, m in itertools.product((1, 4, 2), (3, 1, 5))]


def plain_first_fit(lengths, capacity):
    """The rule word for word."""
    bins = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for one in bins:
            if sum(lengths[i] for i in one) + lengths[index] <= capacity:
                one.append(index)
                break
        else:
            bins.append([index])
    return sorted(sorted(b) for b in bins)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50))
def test_packs_are_those_of_the_rule(lengths, capacity):
    packs = first_fit_decreasing(lengths, capacity)
    assert packs == plain_first_fit(lengths, capacity)
    assert sorted(itertools.chain.from_iterable(packs)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= capacity for pack in packs)
    assert len(packs) >= math.ceil(sum(lengths) / capacity)


def test_a_pack_holds_its_rows_and_unpacks_to_them(tmp_path):
    rows = Dataset(TALKS)
    rows.set_template("chat", model_id=toy_t_tokenizer())
    rows.encode()
    packed = PackingDataset(TALKS, max_length=30)
    assert len(packed) == len(TALKS)
    packed.set_template("chat", model_id=toy_t_tokenizer())
    packed.encode()
    assert len(packed) < len(TALKS)
    assert all(row["length"] <= 30 for row in packed)
    batch = InputProcessor(padding_free=True).collate(packed[0:2])
    chosen = [rows[i] for pack in packed.packs[:2] for i in pack]
    for name in ("input_ids", "labels"):
        assert [r.tolist() for r in unpack(batch, batch[name])] == [row[name] for row in chosen]
    assert [r.tolist() for r in unpack(batch, batch["position_ids"])] == [list(range(row["length"])) for row in chosen]
    assert list(Dataset(packed.save_as(tmp_path / "packs.jsonl"))) == list(packed)
    assert list(itertools.chain.from_iterable(DataLoader(packed, batch_size=2))) == list(packed)


def test_a_row_longer_than_a_pack_is_named():
    packed = PackingDataset([*TALKS[:2], talk("hi " * 40, "yo")], max_length=30)
    packed.set_template("chat", model_id=toy_t_tokenizer())
    with pytest.raises(DataError, match="row 2: its 46 tokens are more than max_length=30"):
        packed.encode()
    assert list(packed)[:2] == TALKS[:2], "nothing was changed"


def test_a_stream_gives_the_same_rows_as_a_data_set(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(t) + "\n" for t in TALKS))
    made = []
    for cls in (Dataset, IterableDataset):
        dataset = cls(DatasetMeta(str(path), data_slice=range(1, 8, 2)))
        dataset.add_dataset(TALKS[:2])
        dataset.set_template("chat", model_id=toy_t_tokenizer(), max_length=12, truncation_strategy="delete")
        dataset.map(lambda row: row if len(row["messages"][0]["content"]) > 3 else None).encode()
        made.append((list(dataset), dataset.dropped))
    assert made[0] == made[1]
    assert made[0][0]
    stream = IterableDataset([{"i": i} for i in range(3)])
    stream.add_dataset([{"i": 10}])
    stream.mix_dataset()
    assert [r["i"] for r in stream] == [r["i"] for r in stream] == [0, 10, 1, 2]
    assert list(DataLoader(stream, batch_size=3))[1] == [{"i": 2}]


def test_bad_streams_are_told_before_reading(tmp_path):
    with pytest.raises(NoSuchPath):
        IterableDataset(tmp_path / "none.jsonl")
    with pytest.raises(BareId):
        IterableDataset("org/none-such")
    with pytest.raises(DataError, match="ascending range"):
        IterableDataset(DatasetMeta(data=[{}], data_slice=[1, 0]))
    with pytest.raises(DataError, match="set_template"):
        IterableDataset([{}]).encode()


def test_packing_that_fails_leaves_the_counts_of_dropped_rows():
    rows = [TALKS[0], {"messages": [{"role": "user", "content": "hi"}]}, TALKS[1]]
    dataset = PackingDataset(rows, max_length=3)
    dataset.set_template("chat", model_id=toy_t_tokenizer(), truncation_strategy="delete")
    with pytest.raises(DataError, match="more than max_length=3"):
        dataset.encode()
    assert dataset.dropped == {}
    assert len(dataset) == 3
