"""The compliance suite of processors (L2)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from twinkle_core.isolation import attempt
from twinkle_core.processors.input import row_lengths, unpack
from twinkle_core.testing.suites.base import Suite, capability
from twinkle_core.testing.toys import random_rows
from twinkle_core.train import micro
from twinkle_core.types import IGNORE_INDEX, InputFeature


class ProcessorSuite(Suite):
    """Checks of a Processor: nothing of a row is lost or invented on its way into a batch.

    Fixtures to override:

    * ``processor``: the object (with ``params`` to check several settings).
    * ``rows``: encoded rows; by default seven of different lengths. Fields with one value for each token must come back from
      the batch too, where the processor keeps them.

    Capabilities:

    * ``cuts``: batches can be cut between rows, for micro-batches and data ranks.
    """

    kind: ClassVar[str] = "processor"
    cuts: ClassVar[bool] = True

    @pytest.fixture
    def processor(self) -> Any:
        """The processor to check."""
        return self.build()

    @pytest.fixture
    def subject(self, processor: Any) -> Any:
        """The same, by the name that all suites know it by."""
        return processor

    @pytest.fixture
    def rows(self) -> Sequence[InputFeature]:
        """Encoded rows; ids of 0 and an end token among them, and a row of one token."""
        return random_rows([5, 3, 7, 2, 4, 1, 6])

    def test_rows_come_back(self, processor: Any, rows: Any) -> None:
        """What ``collate`` padded or packed, unpadded again, are the rows: ids, labels and other values of tokens."""
        batch = processor.collate(copy.deepcopy(rows))
        for name in _token_fields(rows):
            if name in ("input_ids", "labels") or batch.get(name) is not None:
                _assert_rows(_rows_of(batch, name), [row[name] for row in rows], name, "of the batch, without padding,")

    def test_a_single_row_comes_back(self, processor: Any, rows: Any) -> None:
        """A batch of one row, and of the shortest."""
        shortest = min(rows, key=lambda row: len(row["input_ids"]))
        batch = processor.collate([copy.deepcopy(shortest)])
        _assert_rows(_rows_of(batch, "input_ids"), [shortest["input_ids"]], "input_ids", "of a batch of one row")

    def test_any_rows_come_back(self, processor: Any, rows: Any) -> None:
        """Long rows, rows that are alike, ids as large as vocabularies are; what it can't take is refused, not changed."""
        first, vocabulary = rows[0], 250_000
        cases: dict[str, list[Any]] = {
            "a long row beside a short one": [_grown(first, 2_500), first],
            "rows that are alike": [first, *rows, first, first],
            "ids of a large vocabulary": [{**row, "input_ids": [vocabulary + i for i in row["input_ids"]]} for row in rows],
        }
        for what, given in cases.items():
            got = attempt(lambda given=given: processor.collate(copy.deepcopy(given)))  # type: ignore[misc]
            if isinstance(got.error, ValueError | KeyError):
                continue  # told, and nothing was lost
            assert got.error is None, f"{what}: collate() fails: {got.why}"
            for name in ("input_ids", "labels"):
                _assert_rows(_rows_of(got.value or {}, name), [row[name] for row in given], name, f"({what})")

    def test_other_fields_come_back(self, processor: Any, rows: Any) -> None:
        """Of advantages, reference logps and weights, one for each token: what it keeps stands where its tokens stand."""
        names = ("advantages", "old_logps", "ref_logps", "loss_scale")
        given = [
            {**row, **{name: [k + 0.5 + t for t in range(len(row["input_ids"]))] for k, name in enumerate(names)}}
            for row in rows
        ]
        got = attempt(lambda: processor.collate(copy.deepcopy(given)))
        if isinstance(got.error, ValueError | KeyError):
            pytest.skip(f"it takes no fields beside ids and labels: {got.why}")
        assert got.error is None and got.value is not None, f"rows with {names[0]} for each token: collate() fails: {got.why}"
        for name in names:
            if isinstance(got.value.get(name), torch.Tensor):
                _assert_rows(_rows_of(got.value, name), [row[name] for row in given], name, "of the batch")

    def test_images_come_back(self, processor: Any, rows: Any) -> None:
        """Of rows some have images: pixels and grids of all rows one after the other, as many as ``row_counts`` says; or an
        error. Never left out in silence: the tokens that stand for them are in the rows."""
        for images in ([[2], [], [1, 3]], [[2], [2], [2]]):
            given: list[Any] = copy.deepcopy(list(rows[: len(images)]))
            for index, sizes in enumerate(images):
                if sizes:
                    given[index]["pixel_values"] = torch.full((4 * sum(sizes), 3), index + 0.5)
                    given[index]["image_grid_thw"] = torch.tensor([[1, 2, 2 * size] for size in sizes])
            got = attempt(lambda given=given: processor.collate(copy.deepcopy(given)))  # type: ignore[misc]
            if isinstance(got.error, ValueError | KeyError):
                continue  # told
            assert got.error is None and got.value is not None, f"rows with images: collate() fails: {got.why}"
            _assert_joined(given, got.value)

    def test_nothing_is_trained_where_no_row_has_labels(self, processor: Any, rows: Any) -> None:
        """Rows of a prompt alone: no labels in the batch, or -100; or an error. Never labels of its own making."""
        given = [{k: v for k, v in row.items() if k != "labels"} for row in rows]
        got = attempt(lambda: processor.collate(copy.deepcopy(given)))
        assert got.error is None or isinstance(got.error, ValueError | KeyError), f"rows without labels: {got.why}"
        labels = got.value.get("labels") if got.value is not None else None
        made = int((labels != IGNORE_INDEX).sum()) if labels is not None else 0
        assert not made, f"rows without labels get {made} labels: what has none is not trained"

    def test_a_batch_depends_on_its_rows_alone(self, processor: Any, rows: Any) -> None:
        """A batch stays what it is when the next one is made, and is the same after others; random numbers go on."""
        backwards, longer = list(reversed(rows)), [_grown(row, 3_000) for row in rows[:2]]
        first = processor.collate(copy.deepcopy(rows))
        kept = {k: v.clone() for k, v in first.items() if isinstance(v, torch.Tensor)}
        processor.collate(copy.deepcopy(backwards))
        changed = sorted(k for k, v in kept.items() if not torch.equal(v, first[k]))
        assert not changed, (
            f"the next collate() writes into {', '.join(changed)} of the batch before: micro-batches of one step are there at "
            "the same time, each needs tensors of its own"
        )
        attempt(lambda: processor.collate(copy.deepcopy(longer)))
        again = processor.collate(copy.deepcopy(rows))
        other = sorted(k for k, v in kept.items() if k not in again or not torch.equal(v, again[k]))
        assert not other, f"after other batches {', '.join(other)} of the same rows differ: it keeps something of those"
        states = []
        with torch.random.fork_rng(devices=[]):
            for seed in (1, 2):
                torch.manual_seed(seed)
                processor.collate(copy.deepcopy(rows))
                states.append(torch.get_rng_state())
        assert not torch.equal(*states), "it seeds torch's random numbers, and dropout with them: use a torch.Generator"

    def test_nothing_is_trained_in_padding(self, processor: Any, rows: Any) -> None:
        """Labels are -100 wherever no row is, and there are as many labels as the rows have."""
        batch = processor.collate(copy.deepcopy(rows))
        assert isinstance(batch.get("labels"), torch.Tensor), f"labels of the batch are {batch.get('labels')!r}, no tensor"
        wanted = sum(label != IGNORE_INDEX for row in rows for label in row["labels"])
        found = int((batch["labels"] != IGNORE_INDEX).sum())
        assert found == wanted, (
            f"the rows have {wanted} labels and the batch has {found}: fill labels up with -100, and find padding by its "
            "place, never by a token's id (the end token may be the padding token)"
        )
        mask = batch.get("attention_mask")
        if mask is not None:
            leaked = int((batch["labels"][mask == 0] != IGNORE_INDEX).sum())
            assert not leaked, f"{leaked} labels stand where attention_mask is 0: pad labels with -100, on the side of the ids"

    def test_tokens_are_conserved(self, processor: Any, rows: Any) -> None:
        """Neither padding nor packing loses or doubles a token."""
        batch = processor.collate(copy.deepcopy(rows))
        lengths = [len(row["input_ids"]) for row in rows]
        found = row_lengths(batch)
        assert found == lengths, f"rows of {lengths} tokens have {found} in the batch: " + (
            "seq_lens are the lengths of the rows, in order"
            if processor.packs
            else "attention_mask is 1 on each token of a row"
        )
        shape, packs = list(batch["input_ids"].shape), processor.packs
        good = shape == [1, sum(lengths)] if packs else len(shape) == 2 and shape[0] == len(rows) and shape[1] >= max(lengths)
        assert good, f"packs is {packs} and input_ids is {shape} for rows of {lengths}: [1, T] packed, [B, T] padded"
        assert not (packs and batch.get("attention_mask") is not None), (
            "a packed batch has an attention_mask: one of ones would let rows see each other; leave it out, "
            "seq_lens tell them apart"
        )

    def test_padding_is_where_it_says(self, processor: Any, rows: Any) -> None:
        """``padding_side`` is the side on which the shortest row ends in padding: numbers beside a batch are cut there."""
        batch = processor.collate(copy.deepcopy(rows))
        shape, mask = batch["input_ids"].shape, batch.get("attention_mask")
        if processor.packs or mask is None or bool(mask.all()):
            pytest.skip("it pads nothing")
        found = {"left" if not row[0] else "right" for row in mask.view(shape).tolist() if not all(row)}
        assert found == {processor.padding_side}, (
            f"padding_side is {processor.padding_side!r}, and it pads on the {' and the '.join(sorted(found))}: set "
            "padding_side, or logps of a reference are cut on the wrong side in micro-batches"
        )

    def test_positions_count_within_rows(self, processor: Any, rows: Any) -> None:
        """Real tokens stand at 0, 1, 2, …, whatever is before them."""
        batch = processor.collate(copy.deepcopy(rows))
        if batch.get("position_ids") is None:
            assert not processor.packs, "a packed batch needs position_ids that restart at 0 with each row"
            pytest.skip("it gives no position_ids")
        wanted = [list(range(len(row["input_ids"]))) for row in rows]
        _assert_rows(_rows_of(batch, "position_ids"), wanted, "position_ids", "of the batch")

    def test_fields_are_tensors(self, processor: Any, rows: Any) -> None:
        """Whole numbers on the CPU, of one shape."""
        batch = processor.collate(copy.deepcopy(rows))
        for name in ("input_ids", "labels", "attention_mask", "position_ids"):
            value = batch.get(name)
            if value is None:
                continue
            assert isinstance(value, torch.Tensor), f"{name} is a {type(value).__name__}, not a tensor"
            assert value.dtype == torch.int64 and value.device.type == "cpu", (
                f"{name} is {value.dtype} on {value.device}: int64, CPU"
            )
            assert value.shape == batch["input_ids"].shape, (
                f"{name} is {list(value.shape)}, input_ids {list(batch['input_ids'].shape)}"
            )

    @capability("cuts")
    @pytest.mark.parametrize("ranks", [2, 3])
    def test_rank_slices_partition_the_batch(self, processor: Any, rows: Any, ranks: int) -> None:
        """The slices of data ranks, put together, are the rows, none lost or doubled, as if each rank collated its own."""
        batch = processor.collate(copy.deepcopy(rows))
        bounds = [len(rows) * r // ranks for r in range(ranks + 1)]
        slices = [range(a, b) for a, b in itertools.pairwise(bounds)]
        for name in ("input_ids", "labels"):
            found = [row for part in slices for row in _rows_of(micro.cut_batch(batch, part), name)]
            _assert_rows(found, [row[name] for row in rows], name, f"of {ranks} ranks' slices together")
        for part in slices:
            own = processor.collate(copy.deepcopy([rows[i] for i in part]))
            _assert_rows(
                _rows_of(own, "labels"),
                [row.tolist() for row in _rows_of(micro.cut_batch(batch, part), "labels")],
                "labels",
                f"of rows {part.start} to {part.stop - 1} collated alone",
            )

    def test_changes_no_row(self, processor: Any, rows: Any) -> None:
        """Rows are used again in the next epoch."""
        given = copy.deepcopy(rows)
        processor.collate(given)
        changed = [i for i, (a, b) in enumerate(zip(given, rows, strict=False)) if dict(a) != dict(b)]
        assert len(given) == len(rows) and not changed, f"collate() changes the rows it is given ({changed}): copy first"

    def test_refuses_rows_that_do_not_fit(self, processor: Any, rows: Any) -> None:
        """A row whose fields differ in length, or that lacks a field, is an error that names it; never filled up silently."""
        broken: list[Any] = copy.deepcopy(list(rows))
        broken[1] = {**broken[1], "labels": broken[1]["labels"][:-1]}
        self._refuses(processor, broken, "whose labels are one short")
        broken[1] = {k: v for k, v in broken[1].items() if k != "input_ids"}
        self._refuses(processor, broken, "without input_ids")

    def _refuses(self, processor: Any, rows: Any, what: str) -> None:
        got = attempt(lambda: processor.collate(rows))
        assert isinstance(got.error, ValueError | KeyError), (
            f"a row {what} " + (f"gives {got.why}" if got.error else "is taken silently") + ": raise twinkle_core.errors.BadRow"
        )


def _grown(row: InputFeature, length: int) -> Any:
    """The row's tokens again and again."""
    return {
        **{name: [row[name][t % len(row[name])] for t in range(length)] for name in ("input_ids", "labels")},
        "length": length,
    }


def _token_fields(rows: Sequence[InputFeature]) -> list[str]:
    """Fields with one value for each token, in all rows."""
    first: Mapping[str, Any] = rows[0]
    names = [name for name, value in first.items() if isinstance(value, list | tuple)]
    return [n for n in names if all(len(row.get(n) or ()) == len(row["input_ids"]) for row in rows)]  # type: ignore[arg-type]


def _rows_of(batch: Mapping[str, Any], name: str) -> list[torch.Tensor]:
    value = batch.get(name)
    assert value is not None, f"the batch has no {name}; it has {', '.join(batch)}"
    split = attempt(lambda: unpack(batch, value))
    assert split.value is not None, f"{name} can't be parted into rows by attention_mask or seq_lens: {split.why}"
    return split.value


def _assert_rows(found: Sequence[torch.Tensor], wanted: Sequence[Any], name: str, where: str) -> None:
    assert len(found) == len(wanted), f"{name} {where} make {len(found)} rows; {len(wanted)} were given"
    for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
        found_list, wanted_list = got.tolist(), list(want)
        assert found_list == wanted_list, f"{name} {where} differ from what row {number} has: {_apart(found_list, wanted_list)}"


def _assert_joined(rows: Sequence[Mapping[str, Any]], batch: Mapping[str, Any]) -> None:
    for name in ("pixel_values", "image_grid_thw"):
        found = batch.get(name)
        assert isinstance(found, torch.Tensor), (
            f"rows have {name} and the batch has none: join them (processors.input.join_media), or refuse with "
            "twinkle_core.errors.BadRow"
        )
        wanted = [len(row.get(name, ())) for row in rows]
        counts = list((batch.get("row_counts") or {}).get(name, ()))
        assert counts == wanted, f"row_counts of {name} are {counts}; the rows have {wanted} entries (join_media says them)"
        whole = torch.cat([row[name] for row in rows if name in row])
        same = found.shape == whole.shape and torch.equal(found, whole)
        assert same, f"{name} of the batch are not those of the rows, one row after the other"


def _apart(found: list[Any], wanted: list[Any]) -> str:
    """Two lists, and of long ones where they part."""
    if max(len(found), len(wanted)) <= 20:
        return f"{found}, not {wanted}"
    at = next((t for t, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    return f"{len(found)} values, not {len(wanted)}; from place {at} on {found[at : at + 5]}, not {wanted[at : at + 5]}"
