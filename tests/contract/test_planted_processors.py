"""Faults of processors, each caught by the test that is about it."""

from __future__ import annotations

import pytest
import torch

from twinkle_core import IGNORE_INDEX
from twinkle_core.errors import BadRow
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing import ProcessorSuite


class Changed(InputProcessor):
    """A right processor whose batch is changed."""

    def changed(self, batch):
        return batch

    def collate(self, rows):
        return self.changed(super().collate(rows))


class LosesAToken(Changed):
    """The last one of each row that is longer than five."""

    def collate(self, rows):
        return super().collate([{k: v[:5] if isinstance(v, list) else v for k, v in row.items()} for row in rows])


class LabelsInPadding(Changed):
    """Padding of labels with 0."""

    def changed(self, batch):
        batch["labels"][batch["attention_mask"] == 0] = 0
        return batch


class PadByToken(Changed):
    """Padding is wherever the padding token is, real or not."""

    def changed(self, batch):
        batch["attention_mask"] = (batch["input_ids"] != self.pad_id).long()
        batch["labels"][batch["attention_mask"] == 0] = IGNORE_INDEX
        return batch


class OtherSide(Changed):
    """Ids on the left, labels on the right."""

    def changed(self, batch):
        other = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        batch["input_ids"].zero_()
        for row, ids in zip(batch["input_ids"], other, strict=True):
            row[len(row) - len(ids) :] = ids
        return batch


class PositionsOfTheBatch(Changed):
    """Counts padding on the left."""

    def __init__(self):
        super().__init__(padding_side="left")

    def changed(self, batch):
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]).clone()
        return batch


class PackedPositions(Changed):
    """Positions run on over the rows."""

    def __init__(self):
        super().__init__(padding_free=True)

    def changed(self, batch):
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
        return batch


class PackedMask(PackedPositions):
    """A mask of ones over rows that must not see each other."""

    def changed(self, batch):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        return batch


class PackingLosesARow(PackedPositions):
    """What does not fit into 16 tokens."""

    def collate(self, rows):
        kept, room = [], 16
        for row in rows:
            if len(row["input_ids"]) <= room:
                kept.append(row)
                room -= len(row["input_ids"])
        return InputProcessor(padding_free=True).collate(kept)


class WrongLengths(PackedPositions):
    def changed(self, batch):
        batch["seq_lens"] = list(reversed(batch["seq_lens"]))
        return batch


class Sorts(Changed):
    """Long rows first."""

    def collate(self, rows):
        return super().collate(sorted(rows, key=lambda row: -len(row["input_ids"])))


class Writes(Changed):
    """Its padding goes into the rows."""

    def collate(self, rows):
        longest = max(len(row["input_ids"]) for row in rows)
        batch = super().collate(rows)
        for row in rows:
            row["labels"] += [IGNORE_INDEX] * (longest - len(row["labels"]))
        return batch


class PadsLeft(Changed):
    """On the left, and doesn't say so."""

    def __init__(self):
        super().__init__(padding_side="left")

    def collate(self, rows):
        self.padding_side = "left"
        batch = super().collate(rows)
        self.padding_side = "right"
        return batch


class FillsUp(Changed):
    """Labels that are short are filled up."""

    def collate(self, rows):
        rows = [{**row, "labels": (row["labels"] + [IGNORE_INDEX] * 9)[: len(row["input_ids"])]} for row in rows]
        return super().collate(rows)


class Int32(Changed):
    def changed(self, batch):
        return batch | {"labels": batch["labels"].int()}


class Whole(Changed):
    """Labels ``[T, B]``: cutting takes the wrong axis."""

    def changed(self, batch):
        return {k: v.T.contiguous() if k == "labels" else v for k, v in batch.items()}


class StaticBuffer(Changed):
    """One tensor for all batches of a shape."""

    buffer = None

    def changed(self, batch):
        ids = batch["input_ids"]
        if self.buffer is None or self.buffer.shape != ids.shape:
            self.buffer = ids.clone()
        self.buffer.copy_(ids)
        return batch | {"input_ids": self.buffer}


class RemembersWidth(Changed):
    """Pads to the widest batch so far."""

    width = 0

    def collate(self, rows):
        self.width = max(self.width, *(len(row["input_ids"]) for row in rows))
        return InputProcessor(pad_to_multiple_of=self.width).collate(rows)


class SeedsTorch(Changed):
    def changed(self, batch):
        torch.manual_seed(0)
        return batch


class CutsAt(Changed):
    """What is beyond 1024 tokens is lost."""

    def collate(self, rows):
        return super().collate([{k: v[:1024] if isinstance(v, list) else v for k, v in row.items()} for row in rows])


class MasksBeyond(Changed):
    """Labels beyond 512 are not trained."""

    def changed(self, batch):
        batch["labels"][:, 512:] = IGNORE_INDEX
        return batch


class DropsDoubles(Changed):
    def collate(self, rows):
        return super().collate([row for i, row in enumerate(rows) if row not in rows[:i]])


class SixteenBits(Changed):
    def changed(self, batch):
        return batch | {"input_ids": batch["input_ids"] % 2**15}


class FlipsAdvantages(Changed):
    """Padded on the other side."""

    def changed(self, batch):
        return {k: v.flip(1) if k == "advantages" else v for k, v in batch.items()}


class MakesLabels(Changed):
    """A row without labels learns itself."""

    def collate(self, rows):
        return super().collate([{"labels": row["input_ids"], **row} for row in rows])


class RefusesLongOnes(Changed):
    """Right: a shape that is fixed, and what does not fit is told."""

    def collate(self, rows):
        for index, row in enumerate(rows):
            if len(row["input_ids"]) > 512:
                raise BadRow.field(index, "input_ids", "is longer than 512 tokens")
        return InputProcessor(pad_to_multiple_of=512).collate(rows)


class OnlyIdsAndLabels(Changed):
    """Right: other fields are left out, and images are refused."""

    def collate(self, rows):
        for index, row in enumerate(rows):
            if "pixel_values" in row:
                raise BadRow.field(index, "pixel_values", "is not taken here")
        return super().collate(rows)

    def changed(self, batch):
        return {k: batch[k] for k in ("input_ids", "labels", "attention_mask", "position_ids") if k in batch}


class DropsImages(Changed):
    def changed(self, batch):
        return {k: v for k, v in batch.items() if k not in ("pixel_values", "image_grid_thw", "row_counts")}


class ForgetsCounts(Changed):
    def changed(self, batch):
        return {k: v for k, v in batch.items() if k != "row_counts"}


class StacksImages(Changed):
    """[rows, patches, D], where all rows have as many."""

    def changed(self, batch):
        sizes = set((batch.get("row_counts") or {}).get("pixel_values", ()))
        if len(sizes) == 1:
            batch["pixel_values"] = batch["pixel_values"].unflatten(0, (-1, *sizes))
        return batch


class LastImagesFirst(Changed):
    def changed(self, batch):
        return {**batch, "pixel_values": batch["pixel_values"].flip(0)} if "pixel_values" in batch else batch


IMAGES = "test_images_come_back"
BACK, TRAINED, TOKENS = "test_rows_come_back", "test_nothing_is_trained_in_padding", "test_tokens_are_conserved"
POSITIONS, RANKS, SINGLE = (
    "test_positions_count_within_rows",
    "test_rank_slices_partition_the_batch",
    "test_a_single_row_comes_back",
)


ANY, ALONE, OTHERS = "test_any_rows_come_back", "test_a_batch_depends_on_its_rows_alone", "test_other_fields_come_back"


@pytest.mark.parametrize("processor", [RefusesLongOnes, OnlyIdsAndLabels])
def test_others_that_are_right_pass(caught, processor):
    assert caught(ProcessorSuite, processor) == set(), caught.texts


@pytest.mark.parametrize("options", [{}, {"padding_side": "left"}, {"padding_free": True}])
def test_the_right_one_passes(caught, options):
    assert caught(ProcessorSuite, Changed, arguments=options) == set(), caught.texts


@pytest.mark.parametrize(
    ("processor", "tests"),
    [
        (LosesAToken, {BACK, ANY, OTHERS, TRAINED, TOKENS, POSITIONS, RANKS}),
        (LabelsInPadding, {TRAINED}),
        (PadByToken, {BACK, ANY, OTHERS, TRAINED, TOKENS, POSITIONS, RANKS}),
        (OtherSide, {BACK, ANY, RANKS}),
        (PositionsOfTheBatch, {POSITIONS}),
        (PackedPositions, {POSITIONS}),
        (PackedMask, {TOKENS}),
        (WrongLengths, {BACK, ANY, OTHERS, TOKENS, POSITIONS, RANKS}),
        (Sorts, {BACK, ANY, OTHERS, TOKENS, POSITIONS, RANKS, IMAGES}),
        (Writes, {"test_changes_no_row"}),
        (PadsLeft, {"test_padding_is_where_it_says"}),
        (FillsUp, {"test_refuses_rows_that_do_not_fit"}),
        (Int32, {"test_fields_are_tensors"}),
        (StaticBuffer, {ALONE}),
        (RemembersWidth, {ALONE}),
        (SeedsTorch, {ALONE}),
        (CutsAt, {ANY}),
        (MasksBeyond, {ANY}),
        (DropsDoubles, {ANY}),
        (SixteenBits, {ANY}),
        (FlipsAdvantages, {OTHERS}),
        (DropsImages, {IMAGES}),
        (ForgetsCounts, {IMAGES}),
        (StacksImages, {IMAGES}),
        (LastImagesFirst, {IMAGES}),
        (MakesLabels, {"test_nothing_is_trained_where_no_row_has_labels"}),
    ],
)
def test_a_fault_is_caught_by_the_tests_about_it(caught, processor, tests):
    assert caught(ProcessorSuite, processor) == tests, caught.texts


@pytest.mark.parametrize("processor", [PackingLosesARow, Whole])
def test_a_batch_that_can_not_be_cut_into_its_rows_is_caught(caught, processor):
    assert caught(ProcessorSuite, processor) >= {BACK, RANKS}


def test_it_says_what_is_lost(caught):
    caught(ProcessorSuite, LosesAToken)
    assert "rows of [5, 3, 7, 2, 4, 1, 6] tokens have [5, 3, 5, 2, 4, 1, 5] in the batch" in caught.texts[TOKENS]
