"""Pixels and grids in a batch: those of all rows one after the other, and cut with their rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twinkle_core.errors import BadInputs, BadRow
from twinkle_core.processors.input import InputProcessor
from twinkle_core.train.micro import cut_batch


def row(size, patches=0, first=0, **more):
    """``patches`` of two numbers, counted from ``first``, in pictures of two patches."""
    made = {"input_ids": list(range(1, size + 1)), "labels": [-100] * size, **more}
    if patches:
        made["pixel_values"] = np.arange(first, first + 2 * patches, dtype=np.float32).reshape(patches, 2)
        made["image_grid_thw"] = [[1, 1, 2]] * (patches // 2)
    return made


ROWS = [row(3, 4), row(2), row(5, 2, 100), row(4, 6, 200)]


@pytest.mark.parametrize("packed", [False, True])
def test_pixels_stand_one_after_the_other_and_are_counted(packed):
    batch = InputProcessor(padding_free=packed).collate(ROWS)
    assert batch["pixel_values"].tolist() == [p for r in ROWS if "pixel_values" in r for p in r["pixel_values"].tolist()]
    assert batch["row_counts"] == {"pixel_values": [4, 0, 2, 6], "image_grid_thw": [2, 0, 1, 3]}
    assert batch["image_grid_thw"].shape == (6, 3) and batch["image_grid_thw"].dtype == torch.int64


@pytest.mark.parametrize("packed", [False, True])
def test_every_cut_is_the_batch_of_its_rows(packed):
    whole = InputProcessor(padding_free=packed).collate(ROWS)
    for start in range(4):
        for stop in range(start + 1, 5):
            cut, again = cut_batch(whole, range(start, stop)), InputProcessor(padding_free=packed).collate(ROWS[start:stop])
            for name in ("pixel_values", "image_grid_thw"):
                assert (name in cut) == (name in again)
                assert name not in cut or torch.equal(cut[name], again[name])
            assert cut.get("row_counts") == again.get("row_counts")


def test_text_alone_has_no_trace_of_pixels():
    batch = InputProcessor().collate([row(2), row(3, pixel_values=None)])
    assert not {"pixel_values", "row_counts"} & set(batch)


def test_one_picture_without_an_axis_of_pictures_is_one():
    batch = InputProcessor().collate([row(2, pixel_values=torch.zeros(3, 4, 4)), row(2, pixel_values=torch.ones(2, 3, 4, 4))])
    assert batch["pixel_values"].shape == (3, 3, 4, 4) and batch["row_counts"] == {"pixel_values": [1, 2]}


def test_a_pack_of_several_samples_says_how_many_each_has():
    pack = {**row(5, 6), "seq_lens": [2, 3], "row_counts": {"pixel_values": [2, 4], "image_grid_thw": [1, 2]}}
    batch = InputProcessor(padding_free=True).collate([ROWS[0], pack])
    assert batch["row_counts"] == {"pixel_values": [4, 2, 4], "image_grid_thw": [2, 1, 2]}
    assert torch.equal(cut_batch(batch, range(2, 3))["pixel_values"], batch["pixel_values"][6:])
    with pytest.raises(BadRow, match=r"row 1: 'row_counts' says \[\] for the 6 entries of 'pixel_values' in 2 packed samples"):
        InputProcessor(padding_free=True).collate([ROWS[0], {k: v for k, v in pack.items() if k != "row_counts"}])


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("pixel_values", np.zeros((2, 3), np.float32), r"row 1: 'pixel_values' has entries of shape \[3\], row 0 has \[2\]"),
        ("pixel_values", 5, r"row 1: 'pixel_values' is \[\]"),
        ("pixel_values", ["a"], r"row 1: 'pixel_values' can't be made a tensor"),
        ("image_grid_thw", [1, 4, 4], r"row 1: 'image_grid_thw' is \[3\] .* not whole numbers \[n, 3\]"),
        ("image_grid_thw", [[1.0, 4.0, 4.0]], r"row 1: 'image_grid_thw' is \[1, 3\] of torch.float32"),
    ],
)
def test_what_is_no_pixels_names_its_row(field, value, text):
    with pytest.raises(BadRow, match=text):
        InputProcessor().collate([ROWS[0], {**ROWS[2], field: value}])


def test_nothing_is_guessed_about_whose_pixels_they_are():
    batch = dict(InputProcessor().collate(ROWS))
    for counts in (None, {}, {"pixel_values": [4, 0, 2]}, {"pixel_values": [4, 0, 2, 5], "image_grid_thw": [2, 0, 1, 3]}):
        with pytest.raises(BadInputs, match=r"'pixel_values' of a collated batch has 12 entries for 4 rows"):
            cut_batch({**batch, "row_counts": counts}, range(1, 2))
    assert cut_batch({**batch, "row_counts": None}, range(4))["pixel_values"] is batch["pixel_values"]
    pictures = {"pixel_values": torch.zeros(4, 3, 2, 2), "labels": torch.zeros(4)}  # without tokens they are the rows
    assert cut_batch(pictures, range(1, 3))["pixel_values"].shape[0] == 2
