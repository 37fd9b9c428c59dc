"""Groups of texts from a row of a data set to the rows of a batch: made, encoded, never parted."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from twinkle_core.data.dataloader import DataLoader
from twinkle_core.data.dataset import Dataset, LazyDataset
from twinkle_core.data.packing import PackingDataset
from twinkle_core.data.streaming import IterableDataset
from twinkle_core.data.triplets import TripletProcessor
from twinkle_core.errors import DataError, RowTooLong, TemplateError
from twinkle_core.templates.base import TextTemplate
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.testing.tokenizers import chatml_tokenizer


def plain(**how):
    return ChatTemplate(chatml_tokenizer(), use_chat_template=False, **how)


def bert_tokenizer():
    """Words as tokens, ``[CLS] … [SEP]`` around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")


ROWS = [{"query": f"q{i}", "pos": [f"p{i}"], "neg": [f"n{i}-{j}" for j in range(i % 3)]} for i in range(10)]


def marks(rows):
    """The texts' own signs, with their labels."""
    template = plain()
    return [(template.decode(row["input_ids"]), row["labels"]) for row in rows]


def encoded(cls=Dataset, rows=ROWS, **how):
    dataset = cls(rows)
    dataset.map("triplet")
    dataset.set_template(plain(**how))
    dataset.encode()
    return dataset


def group(i):
    return [(f"q{i}", 1), (f"p{i}", 0), *((f"n{i}-{j}", 0) for j in range(i % 3))]


@pytest.mark.parametrize(
    "row",
    [
        {"anchor": "a", "positive": "b", "negatives": ["c", "d"]},
        {"query": "a", "pos": ["b"], "neg": ["c", "d"]},
        {"sentence1": "a", "sentence2": "b", "negative": "c", "negative_2": "d", "label": None},
        {"anchor": "a", "positive": "b", "hard_negatives": ["c", "d"], "neg_scores": [0.1, 0.2], "negative_id": 7},
        {"anchor": "a", "positive": "b", "hard_negative": "c", "rejected": "d"},
        {"question": "a", "answer": "b", "negative_10": "d", "negative_9": "c"},
        {"text": "a", "response": "b", "rejected_response": ["c", "d"], "pos": None, "neg": ""},
    ],
    ids=lambda row: ",".join(row),
)
def test_rows_of_every_form_become_one(row):
    texts = {"anchor": {"text": "a"}, "positive": {"text": "b"}, "negatives": [{"text": "c"}, {"text": "d"}]}
    assert TripletProcessor()(row) == texts
    prefixed = TripletProcessor("query: ", "passage: ", negatives=1)(row)
    assert prefixed == {
        "anchor": {"text": "query: a"}, "positive": {"text": "passage: b"}, "negatives": [{"text": "passage: c"}]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"positive": "b"}, r"needs 'anchor' in each row; this row has 'positive'. \('query' or"),
        ({"query": "a"}, "needs 'positive' in each row"),
        ({"query": "a", "pos": ["b", "c"]}, r"'pos' is \['b', 'c'\], not one text \(give a row for each positive\)"),
        ({"query": 3, "pos": "b"}, "'query' is 3, not one text"),
        ({"query": "a", "pos": "b", "neg": ["c", 4]}, r"'neg' is \['c', 4\], not a text or a list of texts"),
        ({"query": "a", "pos": ""}, "'pos' is '', not one text"),
        ({"sentence1": "A man eats.", "sentence2": "A plane flies.", "label": 0}, r"the row has 'label' \(0\), a judgement"),
        ({"sentence1": "a", "sentence2": "b", "label": 1}, "Keep the rows that do, and give them without that column"),
        ({"sentence1": "a", "sentence2": "b", "score": 0.0}, r"the row has 'score' \(0.0\)"),
        ({"question": "a", "answer": "b", "is_duplicate": False}, r"the row has 'is_duplicate' \(False\)"),
        ({"query": "a", "pos": "b", "negatvies": ["c"]}, "under 'negatvies', .* Did you mean 'negatives'"),
        ({"query": "a", "pos": "b", "hn_negs": "c"}, "under 'hn_negs', .* Did you mean 'negatives'"),
    ],
)
def test_rows_that_are_no_groups_are_told(row, told):
    with pytest.raises(DataError, match=told):
        TripletProcessor()(row)


def test_rows_with_a_judgement_are_taken_once_it_has_been_used():
    """What the refusal tells to do: the unlike pair goes, the other one stays."""
    dataset = Dataset([{"sentence1": "a", "sentence2": "b", "label": n} for n in (0, 1)])
    dataset.filter(lambda row: row["label"] == 1)
    dataset.map(lambda row: {k: v for k, v in row.items() if k != "label"})
    dataset.map("triplet")
    assert list(dataset) == [{"anchor": {"text": "a"}, "positive": {"text": "b"}, "negatives": []}]


@pytest.mark.parametrize(
    "given", [{"query_prefix": None}, {"document_prefix": 3}, {"negatives": -1}, {"negatives": True}], ids=str
)
def test_arguments_that_can_not_be_are_refused(given):
    (name,) = given
    with pytest.raises(DataError, match=name):
        TripletProcessor(**given)


@pytest.mark.parametrize("cls", [Dataset, LazyDataset])
def test_batches_hold_whole_groups_in_any_order(cls):
    dataset = encoded(cls)
    assert len(dataset) == 10
    for shuffle in (False, True):
        found = []
        for batch in DataLoader(dataset, batch_size=3, shuffle=shuffle):
            told = marks(batch)
            while told:
                number = int(told[0][0][1:])
                size = len(group(number))
                assert told[:size] == group(number)
                found.append(number)
                told = told[size:]
        assert sorted(found) == list(range(10)) and (found == list(range(10))) is not shuffle


def test_streams_ranks_and_workers_keep_them_whole():
    stream = IterableDataset(ROWS)
    stream.map("triplet")
    stream.set_template(plain())
    wanted = [marks_of for i in range(10) for marks_of in group(i)]
    assert [m for batch in DataLoader(stream.encode(), batch_size=4) for m in marks(batch)] == wanted
    dataset = encoded()
    ranks = [SimpleNamespace(data_rank=rank, data_world_size=2) for rank in range(2)]
    shares = [[m for batch in DataLoader(dataset, batch_size=4, device_mesh=rank) for m in marks(batch)] for rank in ranks]
    assert sorted(shares[0] + shares[1]) == sorted(wanted)
    assert shares[0] == [m for i in (0, 1, 4, 5, 8) for m in group(i)]
    assert [m for batch in DataLoader(dataset, batch_size=4, num_workers=1) for m in marks(batch)] == wanted


def test_a_position_counts_groups():
    loader = DataLoader(encoded(), batch_size=4, shuffle=True)
    batches = iter(loader)
    next(batches)
    assert loader.get_state() == {"consumed_train_samples": 4}
    again = DataLoader(encoded(), batch_size=4, shuffle=True)
    again.resume_from_checkpoint(4)
    assert [marks(b) for b in again] == [marks(b) for b in batches]


def test_saved_and_read_again_they_are_the_same(tmp_path):
    dataset = encoded()
    again = Dataset(dataset.save_as(tmp_path / "groups.jsonl"))
    assert list(again) == list(dataset)
    assert marks(next(iter(DataLoader(again, batch_size=10)))) == [m for i in range(10) for m in group(i)]


def test_the_special_tokens_of_an_encoder_stay_whatever_is_cut():
    kept = {"right": [2, 4, 5, 6, 3], "left": [2, 8, 9, 10, 3]}
    for strategy, ids in kept.items():
        template = ChatTemplate(bert_tokenizer(), use_chat_template=False, max_length=5, truncation_strategy=strategy)
        assert template.encode_text("a b c d e f g") == {"input_ids": ids, "length": 5}
        assert template.encode_text("a b") == {"input_ids": [2, 4, 5, 3], "length": 4}
        assert template.tokenizer.truncation_side == "right"
        assert pickle.loads(pickle.dumps(template)).encode_text("a b c d e f g")["input_ids"] == ids
    with pytest.raises(RowTooLong, match="9 tokens, max_length is 5"):
        ChatTemplate(bert_tokenizer(), use_chat_template=False, max_length=5).encode_text("a b c d e f g")


def test_a_text_that_is_too_long_takes_its_group_with_it():
    rows = [{"query": "q0", "pos": "p0", "neg": "far too long a text"}, *ROWS[1:3]]
    dataset = encoded(rows=rows, max_length=6, truncation_strategy="delete")
    assert len(dataset) == 2 and dataset.dropped["encode"] == 1
    lazy = LazyDataset(rows)
    lazy.map("triplet")
    lazy.set_template(plain(max_length=6))
    assert list(lazy.check()) == [0]
    lazy.encode()
    with pytest.raises(DataError, match="row 0"):
        lazy[0]


def test_what_can_not_be_embedded_is_told():
    with pytest.raises(TemplateError, match="text=None: what is embedded is a text"):
        plain().encode_text(None)
    with pytest.raises(TemplateError, match="text='': it has no token"):
        plain().encode_text("")
    with pytest.raises(DataError, match="row 0 is a group"):
        encoded(PackingDataset)
    messages = Dataset([{"anchor": {"text": "a"}, "positive": {"messages": []}}])
    messages.set_template(plain())
    with pytest.raises(DataError, match="its 'positive' is"):
        messages.encode()

    class Other(TextTemplate):
        encode_text = None

        def encode(self, trajectory, **kwargs): ...

        def parse(self, text): ...

    texts = Dataset([TripletProcessor()(ROWS[0])])
    texts.set_template(Other(chatml_tokenizer(), 8, "raise"))
    with pytest.raises(DataError, match="Other encodes conversations, not texts to be embedded"):
        texts.encode()
