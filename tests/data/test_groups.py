"""Pairs and other groups of rows: what makes them, that they stay whole, and how they come out of a loader."""

from __future__ import annotations

import datasets
import pytest
import torch

from twinkle_core.data.dataloader import DataLoader
from twinkle_core.data.dataset import Dataset, LazyDataset
from twinkle_core.data.packing import PackingDataset
from twinkle_core.data.preference import PreferenceProcessor
from twinkle_core.data.streaming import IterableDataset
from twinkle_core.errors import DataError, RowsChanged
from twinkle_core.mesh import DeviceMesh
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.tokenizers import toy_t_tokenizer
from twinkle_core.testing.toys import TinyLM

datasets.disable_progress_bars()


def talk(*turns):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[k % 2], "content": turn} for k, turn in enumerate(turns)]}


PAIR = {"positive": talk("hi", "yo"), "negative": talk("hi", "go")}
USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yo"), ("assistant", "go")))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "yo", "rejected": "go"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"messages": [USER, GOOD], "rejected_response": "go"},
        {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
        {"query": "hi", "response": "yo", "rejected_response": "go"},
        {
            "conversations": [{"from": "human", "value": "hi"}],
            "chosen": {"from": "gpt", "value": "yo"},
            "rejected": {"from": "gpt", "value": "go"},
        },
    ],
    ids=["texts", "messages", "whole and prompt", "whole", "a worse text", "worse messages", "response", "sharegpt"],
)
def test_every_known_form_gives_the_same_pair(row):
    assert PreferenceProcessor()(row) == PAIR


def test_what_a_row_brings_beside_goes_to_both():
    made = PreferenceProcessor(system="s")(
        {"instruction": "add", "input": "1 2", "chosen": "3", "rejected": "4", "tools": "[1]"}
    )
    for role, answer in (("positive", "3"), ("negative", "4")):
        assert [m["content"] for m in made[role]["messages"]] == ["s", "add\n1 2", answer]
        assert made[role]["tools"] == [1]


SYSTEM, EARLIER = {"role": "system", "content": "s"}, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("row", "before"),
    [
        ({"prompt": "hi", "history": [["a", "b"]], "chosen": "yo", "rejected": "go"}, ["a", "b"]),
        ({"history": [["a", "b"]], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, ["a", "b"]),
        ({"prompt": "hi", "history": [["a", "b"]], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, ["a", "b"]),
        ({"history": [["a", "b"]], "chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, ["a", "b"]),
        ({"history": [["a", "b"]], "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, ["s", "a", "b"]),
        ({"prompt": [USER], "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, ["s"]),
        ({"prompt": [SYSTEM, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, ["s"]),
        ({"prompt": [SYSTEM], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, ["s"]),
        ({"prompt": [SYSTEM, *EARLIER, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, ["s", "a", "b"]),
        ({"prompt": [*EARLIER, USER], "chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, ["a", "b"]),
        ({"prompt": "a", "chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, ["a", "b"]),
        ({"prompt": [SYSTEM, USER], "messages": [USER, GOOD], "rejected_messages": [USER, BAD]}, ["s"]),
        (
            {
                "prompt": [SYSTEM, USER],
                "chosen": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
                "rejected": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "go"}],
            },
            ["s"],
        ),
    ],
    ids=str,
)
def test_nothing_that_comes_before_the_answers_is_lost(row, before):
    made = PreferenceProcessor()(row)
    for role, answer in (("positive", "yo"), ("negative", "go")):
        assert [m["content"] for m in made[role]["messages"]] == [*before, "hi", answer]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"prompt": "ho", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "'prompt' is 'ho', not what the conversation in 'chosen' begins with",
        ),
        ({"prompt": [{**USER, "content": "ho"}], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "not what the conversation"),
        ({"prompt": [USER], "history": [["a", "b"]], "chosen": "yo", "rejected": "go"}, "'history' is [['a', 'b']], not empty"),
        ({"prompt": "hi", "history": "a", "chosen": "yo", "rejected": "go"}, "a turn of 'history' is 'a', not two texts"),
        ({"prompt": "hi", "chosen": "yo"}, "needs 'chosen', 'rejected' in each row; this row has 'prompt', 'chosen'"),
        ({"chosen": "yo", "rejected": "go"}, "needs 'prompt'"),
        ({"prompt": "hi", "chosen": 3, "rejected": "go"}, "an answer is 3, not a text, a message or a list of messages"),
        ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "ho"}, BAD]}, "not what the preferred one follows"),
        ({"chosen": [USER], "rejected": [USER]}, "not one that ends with an answer"),
    ],
)
def test_rows_that_are_no_pairs_are_told(row, told):
    with pytest.raises(DataError) as caught:
        PreferenceProcessor()(row)
    assert told in str(caught.value)


def test_a_pair_without_a_difference_is_dropped_and_counted():
    dataset = Dataset([{"prompt": "hi", "chosen": "yo", "rejected": answer} for answer in ("go", "yo")])
    dataset.map("preference")
    assert len(dataset) == 1 and dataset.dropped == {"PreferenceProcessor": 1}


def encoded(cls=Dataset, items=(PAIR,), **how):
    dataset = cls(list(items))
    dataset.set_template("chat", model_id=toy_t_tokenizer(), **how)
    dataset.encode()
    return dataset


@pytest.mark.parametrize("cls", [Dataset, LazyDataset, IterableDataset])
def test_a_pair_is_one_item_whose_members_are_encoded_as_conversations_are(cls, tmp_path):
    template = ChatTemplate(toy_t_tokenizer())
    (item,) = encoded(cls)
    assert item == {role: template.encode(PAIR[role]) for role in ("positive", "negative")}
    if cls is Dataset:
        saved = Dataset(encoded().save_as(tmp_path / "pairs.jsonl"))
        assert list(saved) == [item]


def test_a_loader_gives_pairs_row_by_row_and_counts_items():
    items = [{"positive": talk("hi", "yo " * n), "negative": talk("hi", "go")} for n in (1, 2, 3, 4, 5)]
    dataset = encoded(items=items)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, seed=3)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [4, 4, 2] and loader.get_state() == {"consumed_train_samples": 5}
    rows = [row for batch in batches for row in batch]
    worse = dataset[0]["negative"]
    assert rows[1::2] == [worse] * 5
    assert sorted(row["length"] for row in rows[0::2]) == [item["positive"]["length"] for item in dataset]
    assert list(DataLoader(dataset, batch_size=2, shuffle=True, seed=3, num_workers=1)) == batches
    shares = [list(DataLoader(dataset, batch_size=4, device_mesh=mesh)) for mesh in _ranks(2)]
    assert [[len(batch) for batch in share] for share in shares] == [[4, 2], [4, 0]]


def _ranks(count):
    class Rank:
        data_world_size = count

        def __init__(self, rank):
            self.data_rank = rank

    assert hasattr(DeviceMesh, "data_rank")
    return [Rank(rank) for rank in range(count)]


def test_a_list_of_negatives_follows_in_order():
    item = {"anchor": talk("a", "yo"), "positive": talk("hi", "yo"), "negatives": [talk("hi", "go"), talk("hi", "ok")]}
    dataset = encoded(items=[item])
    (rows,) = DataLoader(dataset, batch_size=1)
    template = ChatTemplate(toy_t_tokenizer())
    assert rows == template.batch_encode([item["anchor"], item["positive"], *item["negatives"]])


def test_a_group_is_dropped_as_a_whole_and_never_cut_into_more_rows():
    long = {"positive": talk("hi", "yo"), "negative": talk("hi", "go " * 20)}
    dataset = encoded(items=[long, PAIR], max_length=10, truncation_strategy="delete")
    assert len(dataset) == 1 and dataset.dropped == {"encode": 1}
    with pytest.raises(DataError, match=r"row 0: its 'negative' would be cut into 3 rows"):
        encoded(items=[long], max_length=10, truncation_strategy="split")
    unchecked = Dataset([long, PAIR])
    unchecked.set_template("chat", model_id=toy_t_tokenizer(), max_length=10)
    assert list(unchecked.check()) == [0]
    with pytest.raises(DataError, match="row 0 is a group"):
        encoded(PackingDataset)


def test_pairs_given_to_a_model_are_its_rows():
    """Raw or encoded, and never one member without the other."""
    rows = next(iter(DataLoader(encoded(items=[PAIR] * 2), batch_size=2)))
    losses = []
    for given in (rows, list(encoded(items=[PAIR] * 2)), [PAIR] * 2):
        torch.manual_seed(0)
        model = session_model(TinyLM(vocabulary=64))
        model.set_template("chat", model_id=toy_t_tokenizer(), max_length=10, truncation_strategy="delete")
        model.set_loss("simpo")
        losses.append(float(model.forward_backward(inputs=given)))
    assert losses[0] == losses[1] == losses[2]
    long = {"positive": talk("hi", "yo"), "negative": talk("hi", "go " * 20)}
    with pytest.raises(RowsChanged, match="came apart"):
        model.forward_backward(inputs=[long, {"positive": long["negative"], "negative": long["positive"]}])
