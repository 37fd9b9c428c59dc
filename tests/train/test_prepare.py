"""Rows to micro-batches, and outputs back to rows."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import BadArgument, BadGroups, BadInputs, BadLabels, EmptyBatch
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.engines import ToyEngine, session_model
from twinkle_core.testing.toys import TinyLM, random_rows
from twinkle_core.train import micro
from twinkle_core.train.prepare import as_rows, prepare
from twinkle_core.types import LossOutput


class Pairs(Loss):
    """Rows in pairs; the sum of first minus second."""

    scope = "group"

    def groups(self, rows):
        return [2] * (len(rows) // 2) + [1] * (len(rows) % 2)

    def __call__(self, inputs, outputs):
        sums = outputs.logps.sum(-1)
        return LossOutput((sums[0::2] - sums[1::2]).square().sum(), len(sums) // 2)


def prepared(rows, **kwargs):
    return prepare(rows, device="cpu", processor=InputProcessor(), **kwargs)


@given(sizes=st.lists(st.integers(1, 4), max_size=12), size=st.one_of(st.none(), st.integers(1, 9)))
def test_plan_cuts_only_between_groups_and_loses_no_row(sizes, size):
    cuts = micro.plan(sizes, size)
    assert [i for cut in cuts for i in cut] == list(range(sum(sizes)))
    ends = {sum(sizes[:i]) for i in range(len(sizes) + 1)}
    assert all(cut.start in ends and cut.stop in ends and len(cut) for cut in cuts)
    if size is not None:
        assert all(len(cut) <= size or cut in [range(e, e + n) for e in ends for n in sizes] for cut in cuts)


def test_rows_are_cut_collated_and_counted():
    rows = random_rows([3, 5, 2, 4, 1])
    batches = prepared(rows, micro_batch_size=2, loss_args={"w": torch.arange(5), "k": [1, 2]})
    assert [list(b.rows) for b in batches] == [[0, 1], [2, 3], [4]]
    assert [tuple(b.inputs["input_ids"].shape) for b in batches] == [(2, 5), (2, 4), (1, 1)]
    assert [b.loss_args["w"].tolist() for b in batches] == [[0, 1], [2, 3], [4]]
    assert all(b.loss_args["k"] == [1, 2] for b in batches)


def test_groups_stay_together():
    rows = random_rows([2] * 6)
    assert [list(b.rows) for b in prepared(rows, loss=Pairs(), micro_batch_size=3)] == [[0, 1], [2, 3], [4, 5]]
    assert [list(b.rows) for b in prepared(rows, loss=Pairs(), micro_batch_size=1)] == [[0, 1], [2, 3], [4, 5]]
    assert [list(b.rows) for b in prepared(rows, loss=Pairs(), micro_batch_size=5)] == [[0, 1, 2, 3], [4, 5]]
    batch = InputProcessor().collate(rows)
    assert [list(b.rows) for b in prepared(batch, loss=Pairs(), micro_batch_size=3)] == [[0, 1], [2, 3], [4, 5]]


def test_groups_that_do_not_cover_the_rows_are_refused():
    class Wrong(Pairs):
        def groups(self, rows):
            return [2] * len(rows)

    with pytest.raises(BadGroups, match="cuts 3 rows into groups of"):
        prepared(random_rows([1, 1, 1]), loss=Wrong())


@pytest.mark.parametrize("padding_free", [False, True])
def test_a_collated_batch_is_sliced_as_its_rows_are(padding_free):
    """Padded along rows, packed along tokens: every micro-batch has its own rows' tokens."""
    rows = random_rows([3, 5, 2, 4])
    processor = InputProcessor(padding_free=padding_free)
    batch = processor.collate(rows)
    parts = prepared(batch, micro_batch_size=3)
    want = [processor.collate(rows[:3]), processor.collate(rows[3:])]
    assert [list(p.rows) for p in parts] == [[0, 1, 2], [3]]
    for part, right in zip(parts, want, strict=True):
        length = right["input_ids"].shape[1]  # a padded batch keeps its own length
        for key in right:
            if key == "seq_lens":
                assert list(part.inputs[key]) == list(right[key])
            else:
                assert torch.equal(part.inputs[key][:, :length], right[key])
    assert batch["input_ids"].data_ptr() == parts[0].inputs["input_ids"].data_ptr(), "no copy"


def test_rotary_positions_of_three_axes_are_cut_along_their_rows():
    batch = {"input_ids": torch.zeros(3, 4, dtype=torch.long), "position_ids": torch.arange(36).view(3, 3, 4)}
    part = micro.cut_batch(batch, range(1, 3))
    assert torch.equal(part["position_ids"], batch["position_ids"][:, 1:3])


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("size", [1, 3])
def test_joined_outputs_equal_those_of_one_batch(size, side, padding_free):
    model = session_model(TinyLM())
    if padding_free and side == "left":
        side = "right"
    model.set_processor(InputProcessor(padding_free=padding_free, padding_side=side))
    rows = random_rows([3, 6, 2, 4, 5])
    model.add_metric("accuracy", False)
    whole, parts = model.forward_only(rows), model.forward_only(rows, micro_batch_size=size)
    mask = model._resolved(model.sessions[""]).processor.collate(rows).get("attention_mask")
    for key in ("logits", "logps", "predictions"):
        assert parts[key].shape == whole[key].shape
        keep = mask.bool() if mask is not None else torch.ones(whole[key].shape[:2], dtype=torch.bool)
        torch.testing.assert_close(parts[key][keep], whole[key][keep])
    assert torch.equal(parts.logps == 0, whole.logps == 0)


def test_packed_and_padded_rows_train_alike():
    rows = random_rows([3, 6, 2, 4])
    gradients = []
    for padding_free in (False, True):
        torch.manual_seed(0)
        module = TinyLM()
        model = session_model(module)
        model.set_processor("input", padding_free=padding_free)
        model.set_optimizer("sgd")
        model.forward_backward(rows, micro_batch_size=3)
        model.clip_grad_norm(float("inf"))
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("inputs", [[], {"input_ids": torch.zeros(0, 3, dtype=torch.long)}])
def test_an_empty_batch_is_refused(inputs):
    model = session_model(TinyLM())
    for verb in (model.forward_backward, model.forward, model.forward_only):
        with pytest.raises(EmptyBatch, match="at least one row"):
            verb({**inputs, "labels": inputs["input_ids"]} if isinstance(inputs, dict) else inputs)
    assert model.sessions[""].window.count == 0


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ("text", "got str"),
        (3, "got int"),
        ([1, 2], "row 0 is int"),
        ({"input_ids": [[1, 2], [3, 4]]}, "list of lists"),
    ],
)
def test_inputs_of_an_unknown_form_are_refused(inputs, text):
    with pytest.raises(BadInputs, match=text):
        as_rows(inputs)


def test_a_single_row_is_a_batch_of_one():
    model = session_model(TinyLM())
    one = random_rows([4])
    assert torch.equal(model.forward_only(one[0]).logits, model.forward_only(one).logits)


class TwoRanks(ToyEngine):
    """A rank whose peer has this many micro-batches."""

    peer = 0

    def gather_numbers(self, numbers):
        call, number, failed = map(float, numbers)
        return [[call, number, failed], [call, float(self.peer), 0.0]]


@pytest.mark.parametrize(("lengths", "batches"), [([], 2), ([3], 2)])
def test_a_rank_with_fewer_rows_takes_part_with_weight_zero(lengths, batches):
    """As many micro-batches as the peer's: stand-ins without a label, whose loss is 0 and has a graph."""
    module = TinyLM()
    model = session_model(module, TwoRanks)
    model.engine.peer = batches
    model.set_loss(Pairs() if not lengths else "cross_entropy")
    seen = []
    real = model.engine.backward
    model.engine.backward = lambda loss, sync=True: (seen.append((float(loss.detach()), loss.requires_grad)), real(loss))
    loss = model.forward_backward(random_rows(lengths))
    assert len(seen) == batches and all(graph for _, graph in seen)
    assert seen[-1][0] == 0.0 and module.embed.weight.grad is not None
    assert model.sessions[""].window.weight == sum(label != -100 for r in random_rows(lengths) for label in r["labels"])
    assert (float(loss) == 0) == (not lengths)


IDS = torch.arange(18).reshape(3, 6) % 11


@pytest.mark.parametrize(
    "labels",
    [IDS[:, :5], torch.cat([IDS, IDS]), IDS[..., None], IDS.double(), IDS > 3],
    ids=["short", "more rows", "3-D", "float", "bool"],
)
@pytest.mark.parametrize("loss", ["cross_entropy", "chunked_cross_entropy"])
def test_labels_that_a_token_loss_would_misread_are_refused(labels, loss):
    model = session_model(TinyLM())
    model.set_loss(loss)
    for verb in (model.forward_backward, model.forward, model.forward_only):
        with pytest.raises(BadInputs, match="'labels'"):
            verb({"input_ids": IDS, "labels": labels})
    assert not model.engine.calls
    with pytest.raises(BadLabels):  # one a row is a class of the row, which this model does not give
        model.forward_backward({"input_ids": IDS, "labels": torch.tensor([1, 2, 3])})
    model.forward_backward({"input_ids": IDS, "labels": IDS})


def test_labels_for_each_row_are_left_to_losses_that_take_them():
    def of_rows(inputs, outputs):
        return (outputs.logits.mean((1, 2)) - inputs["labels"]).square().sum()

    model = session_model(TinyLM())
    model.set_loss(of_rows)
    for labels in (torch.tensor([1, 2, 3]), torch.tensor([0.5, 1.0, 2.0])):
        assert float(model.forward_backward({"input_ids": IDS, "labels": labels})) > 0


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (IDS.float(), "no token ids"),
        (IDS[..., None], "no token ids"),
        (torch.zeros(2, 0, dtype=torch.long), "hold no token"),
    ],
    ids=["float", "3-D", "no columns"],
)
def test_ids_that_are_none_are_refused(ids, text):
    with pytest.raises(BadInputs, match=text):
        session_model(TinyLM()).forward_only({"input_ids": ids})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_ids_and_labels_of_few_bytes_train_as_whole_ones(dtype):
    ids = torch.tensor([[3, 4, 5]])
    whole = {"input_ids": ids, "labels": torch.tensor([[4, 5, 6]]), "attention_mask": torch.ones_like(ids)}
    found = []
    for batch in (whole, {**whole, "input_ids": ids.to(dtype), "labels": whole["labels"].to(dtype)}):
        torch.manual_seed(0)
        model = session_model(TinyLM())
        found.append(float(model.forward_backward(batch)))
        model.forward_only(batch)
    assert found[0] == found[1] and batch["input_ids"].dtype == dtype, "the caller's batch is not changed"


def test_rows_of_two_kinds_and_labels_of_text_are_told():
    model = session_model(TinyLM())
    conversation = {"messages": [{"role": "user", "content": "hello"}]}
    with pytest.raises(BadInputs, match=r"row 1 is a conversation or a text, row 0 is not"):
        model.forward_backward([random_rows([3])[0], conversation])
    with pytest.raises(BadInputs, match=r"'labels' are no numbers but list \(the first is 'a'\)"):
        model.forward_backward([{"input_ids": [1, 2], "labels": ["a", "b"]}])


@pytest.mark.parametrize("size", ["2", 8.5, 0, -1, True])
def test_a_micro_batch_size_that_is_none_is_told(size):
    model = session_model(TinyLM())
    for rows in (random_rows([3]), random_rows([3, 2, 4])):
        for verb in (model.forward_backward, model.forward_only):
            with pytest.raises(BadArgument, match="micro_batch_size"):
                verb(rows, micro_batch_size=size)
    assert model.sessions[""].window.count == 0


@pytest.mark.parametrize("kind", [list, tuple, numpy.array, torch.tensor])
def test_arguments_for_each_row_are_cut_whatever_holds_them(kind):
    def weighted(inputs, outputs, *, w):
        factors = torch.as_tensor(w, dtype=torch.float32)[:, None]
        return LossOutput(-(factors * outputs.logps).sum(), (inputs["labels"] != -100).sum())

    weighted.needs = {"logps"}
    model = session_model(TinyLM())
    model.set_loss(weighted)
    rows = random_rows([3, 5])
    whole = model.forward_backward(rows, w=[1.0, -3.0])
    assert float(model.forward_backward(rows, micro_batch_size=1, w=kind([1.0, -3.0]))) == pytest.approx(float(whole))
