"""Padding and packing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core.errors import BadRow
from twinkle_core.processors.input import InputProcessor, row_lengths, unpack


def row(ids, labels=None, **more):
    return {"input_ids": ids, "length": len(ids), **({"labels": labels} if labels is not None else {}), **more}


@pytest.mark.parametrize("side", ["right", "left"])
def test_B24_an_end_token_that_is_the_padding_token_keeps_its_label(side):
    """Padding is known by its place: with pad = eos = 2 the true end tokens stay labelled and attended."""
    rows = [row([5, 6, 2], [-100, 6, 2]), row([5, 6, 7, 8, 2], [-100, -100, 7, 8, 2])]
    batch = InputProcessor(padding_side=side, pad_id=2).collate(rows)
    labels, mask = [-100, 6, 2], [1, 1, 1]
    if side == "right":
        assert batch["labels"][0].tolist() == [*labels, -100, -100]
        assert batch["attention_mask"][0].tolist() == [*mask, 0, 0]
    else:
        assert batch["labels"][0].tolist() == [-100, -100, *labels]
        assert batch["attention_mask"][0].tolist() == [0, 0, *mask]
    assert batch["attention_mask"][1].tolist() == [1] * 5
    assert int((batch["labels"] != -100).sum()) == 5


def test_B27_real_tokens_of_a_left_padded_row_stand_at_0_1_2():
    """Positions count real tokens, and every per-token field is padded on the same side."""
    rows = [
        row([11, 12, 13], [12, 13, -100], weights=[1.0, 2.0, 3.0]),
        row([21, 22, 23, 24, 25], [22, 23, 24, 25, -100], weights=[1.0] * 5),
    ]
    batch = InputProcessor(padding_side="left").collate(rows)
    real = batch["attention_mask"][0].bool()
    assert batch["position_ids"][0][real].tolist() == [0, 1, 2]
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 3, 4]
    assert batch["input_ids"][0].tolist() == [0, 0, 11, 12, 13]
    assert batch["labels"][0].tolist() == [-100, -100, 12, 13, -100]
    assert batch["weights"][0].tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]


def test_B27_learned_positions_give_the_same_losses_whatever_the_padding():
    """A model with learned positions scores a row alike alone, padded right and padded left."""
    torch.manual_seed(1)
    words, places = torch.randn(30, 8), torch.randn(10, 8)

    def logps(batch):
        hidden = words[batch["input_ids"]] + places[batch["position_ids"]]
        running = (hidden * batch["attention_mask"].unsqueeze(-1)).cumsum(1)  # sees what is before it, never padding
        scores = (running @ words.T).log_softmax(-1)
        return unpack(batch, scores.gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1))

    rows = [row([11, 12, 13], [12, 13, -100]), row([21, 22, 23, 24, 25], [22, 23, 24, 25, -100])]
    right, left = (logps(InputProcessor(padding_side=side).collate(rows)) for side in ("right", "left"))
    alone = [logps(InputProcessor().collate([r]))[0] for r in rows]
    for a, b, c in zip(right, left, alone, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        torch.testing.assert_close(a, c, atol=1e-5, rtol=0)


def test_B28_packed_rows_restart_their_positions_and_predict_nothing_across():
    """Two rows in one sequence: positions restart, three tokens are predicted (none over the seam), no attention mask."""
    rows = [row([11, 12, 13], [12, 13, -100]), row([21, 22], [22, -100])]
    batch = InputProcessor(padding_free=True).collate(rows)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 21, 22]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["seq_lens"] == [3, 2]
    assert "attention_mask" not in batch
    valid = batch["labels"] != -100
    assert int(valid.sum()) == 3
    assert float(valid.sum() * math.log(4)) == pytest.approx(4.158883, abs=1e-6)


def test_B28_a_row_of_one_token_is_a_row():
    """Without stored lengths each 0 starts a row; looking for a fall of the positions would merge [0] and [0, 1]."""
    batch = {"input_ids": torch.arange(6).unsqueeze(0), "position_ids": torch.tensor([[0, 1, 0, 0, 1, 2]])}
    assert row_lengths(batch) == [2, 1, 3]
    assert [r.tolist() for r in unpack(batch, batch["input_ids"])] == [[0, 1], [2], [3, 4, 5]]


ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    ROWS,
    st.sampled_from(
        [(False, "right", None), (False, "left", None), (False, "right", 8), (False, "left", 4), (True, "right", None)]
    ),
)
def test_collating_and_unpacking_gives_the_rows_back(rows, how):
    free, side, multiple = how
    processor = InputProcessor(padding_free=free, padding_side=side, pad_to_multiple_of=multiple)
    batch = processor.collate([row(ids, ids, extra=[float(i % 7) for i in ids]) for ids in rows])
    for name in ("input_ids", "labels"):
        assert [r.tolist() for r in unpack(batch, batch[name])] == rows
    assert [r.tolist() for r in unpack(batch, batch["extra"])] == [[float(i % 7) for i in ids] for ids in rows]
    assert [r.tolist() for r in unpack(batch, batch["position_ids"])] == [list(range(len(ids))) for ids in rows]
    assert row_lengths(batch) == [len(ids) for ids in rows]
    assert batch["input_ids"].shape[1] % (multiple or 1) == 0
    assert int((batch["labels"] != -100).sum()) == sum(map(len, rows))


def test_what_belongs_to_a_row_is_stacked():
    rows = [
        row([1, 2], 1.5, reward=2, name="a", image=[[1.0, 2.0]]),
        row([1, 2, 3], 0.5, reward=3, name="b", image=[[3.0, 4.0]]),
    ]
    batch = InputProcessor().collate(rows)
    assert batch["labels"].tolist() == [1.5, 0.5]
    assert batch["reward"].tolist() == [2, 3]
    assert batch["name"] == ["a", "b"]
    assert batch["image"].shape == (2, 1, 2)


def test_float_labels_are_targets_not_tokens():
    batch = InputProcessor().collate([row([1, 2], [0.1, 0.9]), row([1, 2, 3], [0.2, 0.8])])
    assert batch["labels"].shape == (2, 2)
    assert batch["labels"].dtype == torch.float32


def test_float_labels_for_each_token_have_no_place_in_a_packed_sequence():
    rows = [row([1, 2], [0.1, 0.9]), row([4, 3], [0.2, 0.8])]
    with pytest.raises(BadRow, match=r"'labels' is torch.float32.*padding_free=False"):
        InputProcessor(padding_free=True).collate(rows)
    assert InputProcessor(padding_free=True).collate([row([1, 2], 0.1), row([3], 0.2)])["labels"].shape == (2,)


def test_rows_without_labels_collate_for_inference():
    assert "labels" not in InputProcessor().collate([row([1]), row([2, 3])])


def test_a_row_that_was_packed_before_restarts_inside():
    packed = {"input_ids": [1, 2, 3, 4, 5], "labels": [2, -100, 4, 5, -100], "seq_lens": [2, 3]}
    batch = InputProcessor(padding_free=True).collate([packed, row([9], [-100])])
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0]]
    assert batch["seq_lens"] == [2, 3, 1]
    with pytest.raises(BadRow, match=r"row 1: 'seq_lens' .*padding_free=True"):
        InputProcessor().collate([row([9, 9], [9, -100]), packed])


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "an empty batch"),
        ([row([1]), "words"], "row 1 is a str"),
        ([row([1]), {"messages": []}], "row 1 has no 'input_ids'.*set_template"),
        ([row([1, 2], [1, 2]), row([1, 2, 3], [1, 2])], "row 1: 'labels' has 2 values, 'input_ids' has 3"),
        ([row([1, 2], [1, 2]), row([1, 2])], "row 1: 'labels' is missing, but row 0 has it"),
        ([row([1, 2], attention_mask=[1])], "row 0: 'attention_mask' has 1 values, 'input_ids' has 2"),
        ([row([])], "row 0: 'input_ids' is empty"),
        ([row([1, 2], [1, 2]), row([1, 2], [True, False])], "row 1: 'labels' holds True and False"),
        ([row([1, -5])], "row 0: 'input_ids' holds -5, which is no token id"),
        ([row([1, 2**40])], "row 0: 'input_ids' holds 1099511627776"),
        ([row([1, 2**80])], "row 0: 'input_ids' can't be made a tensor"),
        ([row([1.5])], "row 0: 'input_ids' is not a flat list of whole numbers"),
        ([row([[1, 2]])], "row 0: 'input_ids' is not a flat list"),
        ([row([1, 2], scores=[1.0, 2.0, 3.0]), row([1, 2], scores=[1.0])], r"row 1: 'scores' has shape \[1\], row 0 has \[3\]"),
    ],
)
def test_bad_rows_are_named(rows, text):
    with pytest.raises(BadRow, match=text):
        InputProcessor().collate(rows)


def test_a_padded_row_can_not_be_packed():
    with pytest.raises(BadRow, match="row 0: 'attention_mask' has zeros"):
        InputProcessor(padding_free=True).collate([row([1, 2], attention_mask=[1, 0])])


@pytest.mark.parametrize(
    "kwargs",
    [
        *({"padding_side": "top"}, {"pad_to_multiple_of": 0}, {"padding_free": True, "pad_to_multiple_of": 8}, {"pad_id": -1}),
        *({"pad_id": "0"}, {"pad_id": True}, {"pad_id": 1.5}, {"padding_free": "yes"}, {"pad_to_multiple_of": True}),
    ],
)
def test_bad_arguments_are_told_at_construction(kwargs):
    name, value = list(kwargs.items())[-1]
    with pytest.raises(BadRow, match=f"{name}={value!r}"):
        InputProcessor(**kwargs)
