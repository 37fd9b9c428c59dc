"""What core does so that data ranks stay together. The peers are played; suites of models start real processes."""

from __future__ import annotations

import pytest
import torch

from twinkle_core.errors import CheckpointNotWritten, CheckpointUnfit, EmptyBatch
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.engines import ToyEngine, session_model
from twinkle_core.testing.toys import TwoWords, row
from twinkle_core.types import LossOutput


class BesideAnother(ToyEngine):
    """One data rank of two. ``told``: what the other says in each gathering, in order, and how many micro-batches it has;
    ``fails``: what it says when ranks meet for the second time; ``met``: how often they have; ``said``: why this one failed."""

    def __init__(self, module, rank=0, told=(), weight=0.0, fails=None):
        super().__init__(module, mesh=DeviceMesh.from_sizes(world_size=2, dp_size=2).at(rank))
        self.told, self.said, self.weight, self.fails, self.met = list(told), [], weight, fails, 0

    def most(self, count, given):
        return max(count, self.told.pop(0))

    def gather_numbers(self, numbers):
        self.met += 1
        call, number, failed = map(float, numbers)
        there = [call, self.weight, float(self.fails is not None and self.met > 1)]
        return [[call, number, failed], there] if self.mesh.rank == 0 else [there, [call, number, failed]]

    def gather_objects(self, obj, over="dp"):
        if isinstance(obj, tuple):
            self.said.append(obj[2])
            there = (*obj[:2], self.fails)
            return [obj, there] if self.mesh.rank == 0 else [there, obj]
        return [obj, self.told.pop(0)]


def beside_another(*told, **kwargs):
    module = TwoWords()
    model = session_model(module, BesideAnother, told=told, **kwargs)
    model.set_optimizer("sgd", lr=1.0, weight_decay=0.0)
    return model, module


@pytest.mark.parametrize("theirs", [1, 2])
def test_a_rank_without_rows_takes_part_in_every_micro_batch(theirs):
    """Also where the others have a single one: its backward has a graph, and gives zeros."""
    model, module = beside_another(theirs, rank=1, weight=3.0)
    assert float(model.forward_backward([])) == 0
    assert module.w.grad is not None and not module.w.grad.any()
    assert len(model.engine.calls) == theirs
    assert model.step(), "the window holds what the other rank brought"


def test_rows_on_no_rank_are_an_error_on_all():
    model, _ = beside_another(0)
    with pytest.raises(EmptyBatch):
        model.forward_backward([])


def test_a_function_that_returns_a_mean_is_told_of_once_where_there_are_several_ranks(caplog):
    """Each rank counts alike then, whatever it has; one that says so by a weight is left alone."""

    def mean(inputs, outputs):
        return outputs.logits.float().mean()

    def meant(inputs, outputs):
        return LossOutput(outputs.logits.float().mean(), 1.0)

    for loss, expected in ((meant, 0), (mean, 1)):
        for several in (False, True):
            caplog.clear()
            model, _ = beside_another(1, 1)
            model.engine.ranks = lambda over="dp", several=several: object() if several else None
            model.set_loss(loss)
            for _ in range(2):
                model.forward_backward([row([1])])
            told = [record.getMessage() for record in caplog.records if "each rank counts alike" in record.getMessage()]
            assert len(told) == expected * several


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_writes_the_checkpoint_of_all(tmp_path, rank):
    model, _ = beside_another(rank=rank)
    path = model.save("c", tmp_path)
    assert path == str(tmp_path / "c") and (tmp_path / "c").is_dir() == (rank == 0)
    assert model.engine.met == 2, "nobody begins alone, and nobody goes on before it is whole"


def test_all_ranks_fail_where_the_writer_does(tmp_path):
    """It tells the others, and those raise with its words."""
    (tmp_path / "c").write_text("in the way")
    writer, _ = beside_another()
    with pytest.raises(FileExistsError):
        writer.save("c", tmp_path)
    (said,) = writer.engine.said
    assert "c" in said
    waiting, _ = beside_another(fails=said, rank=1)
    with pytest.raises(CheckpointNotWritten) as error:
        waiting.save("c", tmp_path)
    assert said in str(error.value)


def test_an_open_window_over_ranks_is_not_saved_by_halves(tmp_path):
    """Each rank holds gradients of its own rows; one rank's alone would be resumed on all."""
    model, module = beside_another(1, 1)
    model.forward_backward([row([1])], gradient_accumulation_steps=2)
    with pytest.raises(CheckpointUnfit, match="2 ranks; save after an update"):
        model.save("c", tmp_path, save_optimizer=True)
    assert not (tmp_path / "c").exists() and module.w.grad is not None
    assert model.save("c", tmp_path), "the weights alone can be saved"
    assert torch.equal(model.get_state_dict()["output_layer.weight"], module.w)
