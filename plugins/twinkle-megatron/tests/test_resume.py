"""A checkpoint of one layout goes on under another, and bit for bit under its own; what one rank can't do, none does."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig

from twinkle_core.errors import CheckpointNotRead, CheckpointNotWritten
from twinkle_core.testing.ranks import run
from twinkle_megatron.testing import Layouts, built, steps, windows, write_tiny

OF_TWO = [{"tp_size": 2}, {"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_a_checkpoint_of_two_tensor_ranks_goes_on_anywhere(llama, tmp_path, adapter):
    """Adam counts its updates once for each parameter: where they share one counter after a load, losses are off by 1e-3."""
    given = {"folder": llama, "home": str(tmp_path), "adapter": adapter}
    unbroken, same, stages, data = run(Layouts, "resume", 2, {**given, "layouts": OF_TWO}, timeout=400)[0]
    assert same == unbroken
    (one,) = run(Layouts, "resume", 1, {**given, "layouts": [{}]}, timeout=200)[0]
    for found in (stages, data, one):
        for what in ("losses", "norms"):
            assert found[what] == pytest.approx(unbroken[what], rel=1e-5), what


def counters(model):
    """How often each of Adam's states says that it was updated, and how many tensors say so."""
    states = [
        state["step"]
        for part in model.sessions[""].optimizer.inner.chained_optimizers
        for state in part.optimizer.state.values()
    ]
    return sorted({float(step) for step in states}), len(states), len({step.data_ptr() for step in states})


class Counting:
    """Run in processes of its own."""

    def go_on(self, rank, world_size, folder, home, layouts):
        """Under each layout: updates that each parameter has seen, and tensors that count them, after a load and two more."""
        found = []
        for sizes in layouts:
            model = built(folder, sizes)
            model.set_optimizer("default", lr=5e-3)
            if (Path(home) / "three").is_dir():
                model.resume_from_checkpoint(Path(home) / "three")
            else:
                steps(model, windows(3))
                model.save("three", home, save_optimizer=True)
                assert not multiprocessing.active_children(), "none is left, nor was one that runs this program again"
            loaded = counters(model)
            steps(model, windows(2))
            found.append([*loaded, *counters(model)])
            del model
        return found


@pytest.mark.slow
def test_each_parameter_counts_its_own_updates_after_a_load(llama, tmp_path):
    """Megatron's load gives all parameters of its torch Adam one counter, which then runs ahead by one for each of them."""
    given = {"folder": llama, "home": str(tmp_path)}
    ranks = run(Counting, "go_on", 2, {**given, "layouts": [{"tp_size": 2}, {"pp_size": 2}]}, timeout=300)
    ranks += run(Counting, "go_on", 1, {**given, "layouts": [{}]}, timeout=200)
    for rank in ranks:
        for before, count, apart, after, still, each in rank:
            assert before == [3.0] and after == [5.0]
            assert 3 < count == apart == still == each


class Dropping:
    """Run in processes of its own."""

    def train(self, rank, world_size, folder, home, layouts):
        """Three updates with dropout, saved after the first; and the same from there, in processes that others have seeded."""
        found = []
        for sizes, adapter in layouts:
            numbers = []
            name = "a" if adapter else ""
            for again in (False, True):
                gc.collect()
                torch.manual_seed(rank + 10 * again)
                model = built(folder, sizes, **({} if adapter else {"hidden_dropout": 0.2, "attention_dropout": 0.2}))
                if adapter:
                    model.add_adapter_to_model(name, LoraConfig(r=4, lora_dropout=0.5))
                model.set_optimizer("default", lr=1e-2, adapter_name=name)
                place = f"drop{len(found)}"
                if again:
                    model.resume_from_checkpoint(Path(home) / place, adapter_name=name)
                else:
                    steps(model, windows(1), name)
                    model.save(place, home, adapter_name=name, save_optimizer=True)
                outside = torch.get_rng_state()
                numbers.append(steps(model, windows(3)[1:], name))
                assert torch.equal(torch.get_rng_state(), outside), "torch's own state is not drawn from"
                copies = [
                    p.detach().clone()
                    for key, p in model.adapters.parameters(name).items()
                    if ("lora_A" in key and "linear_qkv" in key) or "layer_norm" in key
                ]
                del model
            numbers.append(copies)
            found.append(numbers)
        return found


@pytest.mark.slow
def test_dropout_goes_on_bit_for_bit_and_alike_on_tensor_ranks(llama, tmp_path):
    """Whole, split over the sequence too, and in an adapter; the copies that tensor ranks hold stay copies of one another."""
    layouts = [({"tp_size": 2}, False), ({"tp_size": 2, "sequence_parallel": True}, False), ({"tp_size": 2}, True)]
    first, second = run(Dropping, "train", 2, {"folder": llama, "home": str(tmp_path), "layouts": layouts}, timeout=400)
    for (unbroken, resumed, copies), (_, _, others) in zip(first, second, strict=True):
        assert resumed == unbroken
        assert unbroken["losses"][0] != unbroken["losses"][1]
        assert len(copies) == len(others) > 3
        assert all(torch.equal(a, b) for a, b in zip(copies, others, strict=True))


class Moving:
    """Run in processes of its own."""

    def go_on(self, rank, world_size, folder, home):
        """An update under two tensor ranks for each of two data ranks; then two more where all four are tensor ranks."""
        copies = []
        for sizes in ({"tp_size": 2, "dp_size": 2}, {"tp_size": 4}):
            gc.collect()
            model = built(folder, sizes)
            model.add_adapter_to_model("a", LoraConfig(r=4, lora_dropout=0.5))
            model.set_optimizer("default", lr=1e-2, adapter_name="a")
            if copies:
                model.resume_from_checkpoint(Path(home) / "moved", adapter_name="a")
            steps(model, windows(2), "a")
            copies = [
                p.detach().clone() for key, p in model.adapters.parameters("a").items() if "lora_A" in key and "qkv" in key
            ]
            if "dp_size" in sizes:
                model.save("moved", home, adapter_name="a", save_optimizer=True)
            state = model.engine.draws.state_dict()["copies"]
            del model
        return copies, state


@pytest.mark.slow
def test_ranks_that_become_tensor_ranks_of_one_layer_drop_alike(tmp_path):
    folder = str(write_tiny(tmp_path / "model", num_key_value_heads=4))
    first, *others = run(Moving, "go_on", 4, {"folder": folder, "home": str(tmp_path)}, timeout=400)
    assert first[0]
    for copies, state in others:
        assert all(torch.equal(a, b) for a, b in zip(first[0], copies, strict=True))
        assert torch.equal(first[1], state), "what they drop is the same from here on too"


class Refused:
    """Run in processes of its own: one rank meets a fault, and all must end."""

    def meet(self, rank, world_size, folder, home):
        """What each rank is told of a folder that the first can't make, a disk that is full, a file that the second lacks."""
        model = built(folder, {"tp_size": 2})
        model.set_optimizer("default")
        Path(home, "file").touch(exist_ok=True)
        told = [attempt(lambda: model.save("one", Path(home) / "file" / "within"))]
        model.save("good", home, save_optimizer=True)
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        from twinkle_megatron import files

        original = files.save_file

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        files.save_file = full
        files.LARGEST, largest = 1000, files.LARGEST  # so that it is met while the others have tensors to send
        told.append(attempt(lambda: model.save("two", home)))
        files.save_file, files.LARGEST = original, largest
        write, FileSystemWriterAsync.write_preloaded_data = (
            FileSystemWriterAsync.write_preloaded_data,
            staticmethod(shards_full),
        )
        told.append(attempt(lambda: model.save("three", home, save_optimizer=True)))
        FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
        model.engine.gather_objects(None, "world")
        home = Path(home)
        mine = home if rank == 0 else home / "elsewhere"
        told.append(attempt(lambda: model.load("good", mine)))
        told.append(attempt(lambda: model.resume_from_checkpoint(mine / "good")))
        numbers = steps(model, windows(1))
        return [*told, sorted(p.name for p in home.iterdir()), numbers["losses"][0]]


def shards_full(transform_list, local_proc_idx, write_bucket, results_queue, count_queue, *args, **kwargs):
    """What Megatron's writer of shards says of a disk that is full, on the second rank."""
    results_queue.put((local_proc_idx, OSError(28, "No space left on device") if dist.get_rank() else []))
    count_queue.get()
    count_queue.task_done()


def attempt(verb):
    try:
        verb()
    except (CheckpointNotWritten, CheckpointNotRead, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_what_one_rank_cannot_write_or_read_ends_on_all(llama, tmp_path):
    """And the model goes on; nothing half-written is left."""
    first, second = run(Refused, "meet", 2, {"folder": llama, "home": str(tmp_path)}, timeout=200)
    for i, words in enumerate(("Not a directory", "No space left on device")):
        assert first[i].startswith("CheckpointNotWritten") and words in first[i]
        assert second[i].startswith("CheckpointNotWritten") and "rank 0 could not: " in second[i] and words in second[i]
    for told in (first[2], second[2]):
        assert told.startswith("CheckpointNotWritten") and "rank 1: " in told and "No space left on device" in told
    for i in (3, 4):
        assert first[i].startswith("CheckpointNotRead") and "by rank 1" in first[i]
        assert second[i].startswith("CheckpointNotFound")
    assert first[5] == ["file", "good"]
    assert first[6] == second[6]
