"""Checkpoints: whole or absent, verified before anything changes, and a run that goes on bit for bit."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from twinkle_core.errors import (
    BadArgument,
    BadCheckpointName,
    CheckpointDamaged,
    CheckpointInTheWay,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointNotWritten,
    CheckpointUnfit,
    WindowNotStepped,
)
from twinkle_core.testing.adapters import ToyAdapters, ToyLinear
from twinkle_core.testing.engines import ToyEngine, session_model
from twinkle_core.testing.toys import TinyLM, TwoWords, random_rows, row
from twinkle_core.train import base_values, checkpoint, folder, rng
from twinkle_core.train.single import SingleAdapter
from twinkle_core.train.verbs import SessionModel

BATCHES = [random_rows([3, 5, 2], seed=s) for s in range(8)]


def fresh(seed=0, width=8, optimizer="adamw", scheduler=True, **engine):
    torch.manual_seed(seed)
    model = session_model(TinyLM(width=width, dropout=0.5), **engine)
    if optimizer:
        model.set_optimizer(optimizer, lr=1e-2)
        if scheduler:
            model.set_lr_scheduler("linear_warmup", num_training_steps=10)
    return model


def run(model, batches, size=2):
    for batch in batches:
        model.forward_backward(batch, gradient_accumulation_steps=size)
        model.clip_grad_and_step(0.5)


def everything(model):
    """All that a resumed run must share with the unbroken one."""
    session = model.sessions[""]
    parameters = dict(model.engine.module.named_parameters())
    state = {f"{k}/{n}": v for n, p in parameters.items() for k, v in session.optimizer.state.get(p, {}).items()}
    grads = {f"grad/{n}": p.grad for n, p in parameters.items() if p.grad is not None}
    tensors = {**model.get_state_dict(), **state, **grads, "rng": torch.get_rng_state()}
    lr = [g["lr"] for g in session.optimizer.param_groups]
    return {k: v.clone() for k, v in tensors.items()}, (lr, session.cur_step, session.window.count, session.skipped_steps)


def same(a, b):
    assert a[1] == b[1] and a[0].keys() == b[0].keys()
    for key in a[0]:
        assert torch.equal(a[0][key], b[0][key]), key


# ------------------------------------------------------------------------------------------------ going on


@pytest.mark.parametrize("stop", [2, 3], ids=["window closed", "window open"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(tmp_path, stop, optimizer):
    """Weights, optimizer, schedule, random state (dropout), and the gradients of a window that was open."""
    unbroken = fresh(optimizer=optimizer)
    torch.manual_seed(9)
    run(unbroken, BATCHES)
    first = fresh(optimizer=optimizer)
    torch.manual_seed(9)
    run(first, BATCHES[:stop])
    path = first.save("c", tmp_path, save_optimizer=True, consumed_train_samples=3 * stop)
    at = everything(first)
    second = fresh(seed=77, optimizer=optimizer)
    run(second, BATCHES[3:6], size=1)
    torch.manual_seed(5)
    assert second.resume_from_checkpoint(path) == {
        "cur_step": stop // 2, "consumed_train_samples": 3 * stop, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    same(everything(second), at)
    run(second, BATCHES[stop:])
    same(everything(second), everything(unbroken))


def test_B14_the_schedule_counts_updates_and_loading_sets(tmp_path):
    """Linear decay from 1 to 0 in 10 updates: 0.6 after eight backwards in windows of two, after each load; then 0.5."""

    def made():
        model = session_model(TwoWords())
        model.set_optimizer("sgd", lr=1.0)
        model.set_lr_scheduler("linear_warmup", num_training_steps=10)
        return model

    def lr(model):
        return model.sessions[""].optimizer.param_groups[0]["lr"]

    first = made()
    run(first, [[row([1])]] * 8)
    assert lr(first) == pytest.approx(0.6)
    path = first.save("c", tmp_path, save_optimizer=True)
    second = made()
    for _ in range(2):
        second.resume_from_checkpoint(path)
        assert lr(second) == pytest.approx(0.6)
    run(second, [[row([1])]] * 2)
    assert lr(second) == pytest.approx(0.5)
    assert second.sessions[""].cur_step == 5


RESUME = """
import random, sys, numpy, torch
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM
torch.manual_seed(99); random.seed(99); numpy.random.seed(99)
model = session_model(TinyLM())
model.resume_from_checkpoint(sys.argv[1])
print(float(torch.rand(1)), random.random(), float(numpy.random.rand(1)[0]))
"""


def test_B19_random_state_comes_back_in_a_new_process_and_last(tmp_path):
    """One number of each generator after resuming, in a process that was seeded otherwise."""
    model = session_model(TinyLM())
    torch.manual_seed(1234)
    random.seed(7)
    numpy.random.seed(7)
    for _ in range(3):
        torch.rand(1)
    random.random()
    numpy.random.rand(1)
    path = model.save("c", tmp_path, save_optimizer=True)
    out = subprocess.run([sys.executable, "-c", RESUME, path], capture_output=True, text=True, check=True, timeout=120)
    assert [float(x) for x in out.stdout.split()] == pytest.approx([0.366641, 0.150849, 0.779919], abs=1e-6)


def test_random_state_goes_there_and_back():
    random.gauss(0, 1)
    numpy.random.standard_normal()
    tensors, data = rng.capture()
    draw = [torch.rand(2).tolist(), random.gauss(0, 1), numpy.random.standard_normal()]
    rng.restore(tensors, json.loads(json.dumps(data)))
    assert [torch.rand(2).tolist(), random.gauss(0, 1), numpy.random.standard_normal()] == draw


def test_a_rank_finds_the_random_state_of_its_stream():
    ranks = [({"torch": torch.tensor([rank])}, {"python": rank}) for rank in range(4)]
    tensors, data = rng.join(ranks, [0, 0, 1, 1])

    def taken(rank, stream):
        found = rng.of_rank(tensors, json.loads(json.dumps(data)), rank, stream)
        return found and (int(found[0]["torch"]), found[1]["python"])

    assert [taken(rank, rank // 2) for rank in range(4)] == [(rank, rank) for rank in range(4)], "the same mesh: each its own"
    assert [taken(rank, rank) for rank in range(4)] == [(0, 0), (2, 2), None, None]
    assert [taken(rank, 0) for rank in range(4)] == [(0, 0), (1, 1), (0, 0), (0, 0)]
    assert rng.of_rank(*rng.join(ranks[:1], [0]), 1, 0) == ranks[0], "one process's is there for all that share its rows"


def test_the_scaler_is_resumed(tmp_path):
    def made():
        return fresh(engine=ToyEngine, scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))

    first = made()
    run(first, BATCHES[:3], size=1)
    path = first.save("c", tmp_path, save_optimizer=True)
    second = made()
    second.resume_from_checkpoint(path)
    assert second.engine.scaler.get_scale() == 128.0
    assert second.engine.scaler.state_dict() == first.engine.scaler.state_dict()


@pytest.mark.parametrize(("saved", "here"), [(64.0, None), (None, 64.0), (64.0, 64.0)])
def test_an_open_window_goes_on_under_another_precision(tmp_path, saved, here):
    """Gradients of a scaled window are brought to the scale of the model that takes them up."""

    def made(scale):
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        model = session_model(TwoWords(), scaler=scaler)
        model.set_optimizer("sgd", lr=1.0, weight_decay=0.0)
        return model

    first = made(saved)
    first.forward_backward([row([1])], gradient_accumulation_steps=2)
    path = first.save("c", tmp_path, save_optimizer=True)
    second = made(here)
    second.resume_from_checkpoint(path)
    second.forward_backward([row([1])])
    assert second.clip_grad_norm(math.inf) == pytest.approx(math.sqrt(0.5))


def test_what_was_set_before_resuming_stays_or_is_told(tmp_path, caplog):
    def made(steps, size, lr=1.0):
        model = session_model(TwoWords())
        model.set_optimizer("sgd", lr=lr)
        model.set_lr_scheduler("linear_warmup", num_training_steps=steps)
        model.sessions[""].window.resize(size)
        return model

    first = made(4, None)
    run(first, [[row([1])]] * 4, size=1)
    path = first.save("c", tmp_path, save_optimizer=True)
    second = made(8, 8, lr=0.5)
    with caplog.at_level(logging.WARNING, logger="twinkle"):
        second.resume_from_checkpoint(path)
        second.resume_from_checkpoint(path)
    session = second.sessions[""]
    assert session.window.size == 8 and session.cur_step == 4
    assert session.optimizer.param_groups[0]["lr"] == 0.5, "half of the eight updates are done, from the checkpoint's 1.0"
    assert caplog.messages[:3] == [
        "resume: optimizer lr is 1.0 as in the checkpoint, not 0.5 as set here",
        "resume: scheduler num_training_steps is 8 as set here, not 4 as in the checkpoint",
        "resume: gradient_accumulation_steps is 8 as set here, not 1 as in the checkpoint",
    ]
    run(second, [[row([1])]] * 8, size=8)
    assert session.optimizer.param_groups[0]["lr"] == 0.375


def test_how_an_update_is_computed_is_said_by_who_resumes(tmp_path, caplog):
    """Of a run whose tensors lay whole; where parts of tensors lie beside plain ones, torch's ``foreach`` can't take them."""
    first, second = session_model(TwoWords()), session_model(TwoWords())
    for model, each in ((first, True), (second, False)):
        model.set_optimizer("adamw", lr=0.1, foreach=each)
    run(first, [[row([1])]] * 2, size=1)
    second.resume_from_checkpoint(first.save("c", tmp_path, save_optimizer=True))
    assert [group["foreach"] for group in second.sessions[""].optimizer.param_groups] == [False]
    assert caplog.messages == []
    for model in (first, second):
        run(model, [[row([1])]], size=1)
    torch.testing.assert_close(first.get_state_dict(), second.get_state_dict())


def test_an_open_window_of_no_size_yet_takes_the_one_that_was_set(tmp_path, caplog):
    first, second = session_model(TwoWords()), session_model(TwoWords())
    for model in (first, second):
        model.set_optimizer("sgd")
    first.forward_backward([row([1])])
    path = first.save("c", tmp_path, save_optimizer=True)
    second.sessions[""].window.resize(2)
    second.resume_from_checkpoint(path)
    assert second.sessions[""].window.size == 2 and not second.sessions[""].window.due
    assert caplog.messages == []


def test_an_open_window_keeps_the_size_it_was_begun_for(tmp_path, caplog):
    first, second = fresh(), fresh()
    run(first, BATCHES[:1], size=2)
    path = first.save("c", tmp_path, save_optimizer=True)
    second.sessions[""].window.resize(3)
    with caplog.at_level(logging.WARNING, logger="twinkle"):
        second.resume_from_checkpoint(path)
    assert second.sessions[""].window.size == 2
    assert caplog.messages == ["resume: gradient_accumulation_steps is 2 as in the checkpoint, not 3 as set here"]


def test_resuming_with_what_was_saved_says_nothing(tmp_path, caplog):
    for name, kwargs in (("step_lr", {"step_size": 2}), ("one_cycle_lr", {"max_lr": 1.0, "total_steps": 9})):
        first, second = fresh(scheduler=False), fresh(scheduler=False)
        for model in (first, second):
            model.set_lr_scheduler(name, **kwargs)
        run(first, BATCHES[:4])
        path = first.save(name, tmp_path, save_optimizer=True)
        with caplog.at_level(logging.WARNING, logger="twinkle"):
            second.resume_from_checkpoint(path)
    assert caplog.messages == []


def test_weights_alone(tmp_path):
    first = fresh()
    run(first, BATCHES[:4])
    path = first.save("c", tmp_path, save_optimizer=True, consumed_train_samples=12)
    second = fresh(seed=3, optimizer=None)
    draw = torch.get_rng_state()
    progress = second.resume_from_checkpoint(path, resume_only_model=True)
    assert progress == {"cur_step": 2, "consumed_train_samples": 12, "gradient_accumulation_steps": 2}
    assert second.sessions[""].cur_step == 0 and torch.equal(torch.get_rng_state(), draw)
    for key, value in first.get_state_dict().items():
        assert torch.equal(second.get_state_dict()[key], value)


def test_load_takes_plain_folders_too(tmp_path):
    first, second = fresh(), fresh(seed=3)
    (tmp_path / "plain").mkdir()
    save_file(dict(first.get_state_dict()), tmp_path / "plain" / "model.safetensors")
    assert second.load("plain", tmp_path) == {"cur_step": 0, "consumed_train_samples": 0, "gradient_accumulation_steps": None}
    assert torch.equal(second.get_state_dict()["mix.weight"], first.get_state_dict()["mix.weight"])
    run(first, BATCHES[:2])
    first.save("ours", tmp_path)
    assert second.load("ours", tmp_path)["cur_step"] == 1
    with pytest.raises(CheckpointNotFound, match=r"trainer_state\.json.*load\(\)"):
        second.resume_from_checkpoint(tmp_path / "plain")


def test_loading_gives_up_forwards_and_gradients_of_the_old_weights(tmp_path):
    model = fresh()
    model.save("c", tmp_path)
    model.forward_backward(BATCHES[0], gradient_accumulation_steps=4)
    model.forward(BATCHES[0])
    model.load("c", tmp_path)
    assert model.sessions[""].window.count == 0 and model.sessions[""].pending == {}
    assert all(p.grad is None for p in model.engine.module.parameters())


def test_adapters_are_saved_and_loaded_under_another_name(tmp_path):
    def made(**adapters):
        module = ToyLinear()
        model = SessionModel(ToyEngine(module), ToyAdapters(module))
        model.set_loss("mse")
        for name, b in adapters.items():
            model.add_adapter_to_model(name, b)
            model.set_optimizer("adam", lr=0.1, adapter_name=name)
        return model, module

    first, module = made(a=3.0, b=-1.0)
    with first.adapter("a"):
        first.forward_backward([row([1], [1])])
        first.clip_grad_and_step()
        path = first.save("c", tmp_path, save_optimizer=True)
    second, other = made(c=0.0, d=5.0)
    second.resume_from_checkpoint(path, adapter_name="c")
    assert other.lora["c"]["B"] == module.lora["a"]["B"] and other.lora["d"]["B"] == 5.0
    assert second.sessions["c"].cur_step == 1 and second.sessions["d"].cur_step == 0
    assert load_file(Path(path) / "adapter.safetensors").keys() == {"A", "B"}


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "", ".", "  ", "a/..", "x\0y", None])
def test_a_name_does_not_leave_the_output_folder(tmp_path, name):
    model = fresh()
    for verb in (model.save, model.load):
        with pytest.raises(BadCheckpointName, match="not a folder inside"):
            verb(name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_link_does_not_lead_out_either(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    with pytest.raises(BadCheckpointName):
        fresh().save("link/x", tmp_path / "out")


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fresh().save("run/step-1") == "output/run/step-1"
    assert (tmp_path / "output/run/step-1/trainer_state.json").is_file()


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointInTheWay, match="mine"):
        fresh().save("mine", tmp_path)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_checkpoint_inside_another_is_neither_written_nor_lost(tmp_path):
    model = fresh()
    model.save("run", tmp_path)
    with pytest.raises(CheckpointInTheWay, match="inside the checkpoint"):
        model.save("run/best", tmp_path)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointInTheWay, match=r"notes\.txt"):
        model.save("run", tmp_path)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    (tmp_path / "run" / "notes.txt").unlink()
    model.save("run", tmp_path)


def test_paths_and_counts_that_are_none_are_told(tmp_path):
    model = fresh()
    for call in (
        lambda: model.save("x", 5),
        lambda: model.load("x", 5),
        lambda: model.resume_from_checkpoint(5),
        lambda: model.save("x", tmp_path, consumed_train_samples="many"),
        lambda: model.save("x", tmp_path, consumed_train_samples=1.5),
        lambda: model.save("x", tmp_path, consumed_train_samples=-1),
    ):
        with pytest.raises(BadArgument):
            call()
    for call in (lambda: model.save("n" * 300, tmp_path), lambda: model.load("n" * 300, tmp_path)):
        with pytest.raises(BadCheckpointName):
            call()
    with pytest.raises(CheckpointNotFound):
        model.resume_from_checkpoint(tmp_path / ("n" * 300))
    assert list(tmp_path.iterdir()) == []


def reseal(path, name, text):
    """Another content with a matching hash, as a writer at fault would leave it."""
    (path / name).write_text(text)
    state = json.loads((path / "trainer_state.json").read_text())
    state["files"][name] = {"size": (path / name).stat().st_size, "sha256": folder.sha256(path / name)}
    (path / "trainer_state.json").write_text(json.dumps(state))


UNREADABLE = [(name, text) for name in ("rng.json", "optimizer.json", "scheduler.json") for text in ("{}", "[]", "{")]


@pytest.mark.parametrize(("name", "text"), [*UNREADABLE, ("engine.json", "[]"), ("engine.json", "{")])
def test_a_file_that_says_nothing_is_told_before_anything_changes(tmp_path, name, text):
    first, second = fresh(), fresh(seed=4)
    run(first, BATCHES[:2])
    path = Path(first.save("c", tmp_path, save_optimizer=True))
    reseal(path, name, text)
    before = everything(second)
    with pytest.raises(CheckpointDamaged, match=name.replace(".", r"\.")):
        second.resume_from_checkpoint(path)
    same(everything(second), before)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"window": {}}, r"window\.size"),
        ({"cur_step": -5}, "cur_step"),
        ({"gradient_accumulation_steps": "3"}, "gradient_accumulation_steps"),
        ({"consumed_train_samples": 1.5}, "consumed_train_samples"),
    ],
)
def test_numbers_that_are_none_are_told_before_anything_changes(tmp_path, changes, field):
    first, second = fresh(), fresh(seed=4)
    path = Path(first.save("c", tmp_path, save_optimizer=True))
    edit(path, **changes)
    before = everything(second)
    with pytest.raises(CheckpointDamaged, match=f"field '{field}'"):
        second.resume_from_checkpoint(path)
    same(everything(second), before)


def test_weights_of_another_kind_or_owner_are_refused(tmp_path):
    module = ToyLinear()
    model = SessionModel(ToyEngine(module), ToyAdapters(module))
    model.add_adapter_to_model("a", 3.0)
    path = Path(model.save("c", tmp_path, adapter_name="a"))
    with pytest.raises(CheckpointMismatch, match=r"adapter 'a'.*into the base model; name an adapter"):
        model.load("c", tmp_path, adapter_name="")
    save_file({k: v.to(torch.int8) for k, v in load_file(path / "adapter.safetensors").items()}, path / "adapter.safetensors")
    (path / "trainer_state.json").unlink()
    with pytest.raises(CheckpointMismatch, match=r"int8.*float32"):
        model.load("c", tmp_path, adapter_name="a")
    assert module.lora["a"]["B"].item() == 3.0


def test_an_adapter_is_not_resumed_on_a_base_model_of_other_values(tmp_path, caplog):
    """A sibling has the same names and shapes; it would go on from other activations, and nobody would know."""

    def over(value):
        module = ToyLinear()
        module.weight.data.fill_(value)
        model = SessionModel(ToyEngine(module), ToyAdapters(module))
        model.set_loss("mse")
        model.add_adapter_to_model("a", 1.0)
        model.set_optimizer("sgd", lr=0.1, adapter_name="a")
        return model

    over(2.0 + 1e-6).save("c", tmp_path, save_optimizer=True)
    for value in (2.0 + 1e-6, 2.0):  # itself, and itself in bf16
        over(value).resume_from_checkpoint(tmp_path / "c")
    assert not caplog.records
    other = over(2.5)
    before = {k: v.clone() for k, v in other.get_state_dict().items()}
    with pytest.raises(CheckpointMismatch, match=r"the base model has other values .*resume_only_model=True"):
        other.resume_from_checkpoint(tmp_path / "c")
    assert all(torch.equal(v, before[k]) for k, v in other.get_state_dict().items())
    for take in (
        lambda: other.load("c", tmp_path),
        lambda: other.resume_from_checkpoint(tmp_path / "c", resume_only_model=True),
    ):
        caplog.clear()
        take()
        assert "the base model has other values than the one that the adapter was trained on" in caplog.text


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40))
def test_a_sample_is_the_same_in_every_type_a_model_is_held_in(values):
    def sample(dtype, change=0.0):
        module = torch.nn.Linear(len(values), 1, bias=False)
        with torch.no_grad():
            module.weight.copy_(torch.tensor(values)[None] + change)
        return base_values.sample(SingleAdapter(module.to(dtype)))

    kinds = [sample(t) for t in (torch.float32, torch.bfloat16, torch.float16)]
    assert all(base_values.same(a, b) for a in kinds for b in kinds)
    assert not any(base_values.same(sample(torch.float32, 400.0), b) for b in kinds)


def test_a_sample_sees_every_tensor_of_a_model_and_is_small():
    module = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(50)])
    first = base_values.sample(SingleAdapter(module))
    assert len(first) < 8 * base_values.SIZE
    for parameter in module.parameters():
        kept = parameter.data.clone()
        parameter.data += 1e-3
        assert not base_values.same(first, base_values.sample(SingleAdapter(module)))
        parameter.data.copy_(kept)
    assert base_values.same(first, base_values.sample(SingleAdapter(module)))


def test_a_store_may_refuse_weights_that_mean_something_else(tmp_path):
    class Picky(ToyAdapters):
        def check_compatible(self, name, folder):
            raise CheckpointMismatch(str(folder), f"'{name}' has another scale")

    module = ToyLinear()
    model = SessionModel(ToyEngine(module), Picky(module))
    model.add_adapter_to_model("a", 3.0)
    path = model.save("c", tmp_path, save_optimizer=True)
    module.lora["a"]["B"].data.fill_(7.0)
    for call in (lambda: model.load("c", tmp_path), lambda: model.resume_from_checkpoint(path)):
        with pytest.raises(CheckpointMismatch, match="'a' has another scale"):
            call()
    assert module.lora["a"]["B"].item() == 7.0


def damage(kind, folder):
    weights = folder / "model.safetensors"
    if kind == "missing":
        weights.unlink()
    elif kind == "cut short":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif kind == "changed":
        raw = bytearray(weights.read_bytes())
        raw[-3] ^= 1
        weights.write_bytes(bytes(raw))
    elif kind == "optimizer changed":
        path = folder / "optimizer.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 128
        path.write_bytes(bytes(raw))
    elif kind == "rng missing":
        (folder / "rng.json").unlink()
    else:
        state = folder / "trainer_state.json"
        text = state.read_text()
        state.write_text(text[:100] if kind == "state cut short" else text.replace('"cur_step": 1', '"cur_step": "x"'))


@pytest.mark.parametrize(
    ("kind", "file", "text"),
    [
        ("missing", "model.safetensors", "is missing"),
        ("cut short", "model.safetensors", "bytes and was written with"),
        ("changed", "model.safetensors", "sha256"),
        ("optimizer changed", "optimizer.safetensors", "sha256"),
        ("rng missing", "rng.json", "is missing"),
        ("state cut short", "trainer_state.json", "not valid JSON"),
        ("field", "trainer_state.json", "cur_step"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_its_file_before_anything_changes(tmp_path, kind, file, text):
    first = fresh()
    run(first, BATCHES[:2])
    path = Path(first.save("c", tmp_path, save_optimizer=True))
    damage(kind, path)
    second = fresh(seed=4)
    run(second, BATCHES[2:5])
    before = everything(second)
    for call in (lambda: second.resume_from_checkpoint(path), lambda: second.load("c", tmp_path)):
        with pytest.raises(CheckpointDamaged, match=rf"{file}.*{text}"):
            call()
    same(everything(second), before)


def edit(path, **changes):
    state = json.loads((path / "trainer_state.json").read_text())
    (path / "trainer_state.json").write_text(json.dumps(state | changes))


def test_foreign_checkpoints_are_refused_before_anything_changes(tmp_path):
    first = fresh()
    run(first, BATCHES[:2])
    path = Path(first.save("c", tmp_path, save_optimizer=True))

    def refused(model, text, where=path):
        before = everything(model) if model.sessions[""].optimizer else None
        with pytest.raises(CheckpointMismatch, match=text):
            model.resume_from_checkpoint(where)
        if before:
            same(everything(model), before)

    refused(fresh(width=6), r"trainer_state\.json.*another model")
    with pytest.raises(CheckpointMismatch, match=r"weights.*embed.weight is \[11, 8\], here \[11, 6\]"):
        fresh(width=6).load("c", tmp_path)
    refused(fresh(optimizer="sgd"), r"optimizer\.json.*AdamW.*here is SGD")
    refused(fresh(optimizer=None), r"optimizer\.json.*set_optimizer\(\.\.\.\) first")
    refused(fresh(scheduler=False), r"scheduler\.json.*LinearWarmup.*set_lr_scheduler")
    other = fresh()
    other.set_optimizer("adamw", weight_decay=0.0)
    other.set_lr_scheduler("linear_warmup", num_training_steps=10)
    refused(other, "other groups")
    weights = Path(first.save("w", tmp_path))
    refused(fresh(), r"weights alone.*resume_only_model=True", weights)
    with pytest.raises(CheckpointNotFound, match="no such folder"):
        fresh().resume_from_checkpoint(tmp_path / "nowhere")
    edit(path, schema_version=2)
    refused(fresh(), "version 2; this twinkle reads version 1")


def test_a_file_name_in_the_state_does_not_lead_out(tmp_path):
    path = Path(fresh().save("c", tmp_path))
    (tmp_path / "secret").write_text("x")
    edit(path, files={"../secret": {"size": 1, "sha256": "0"}})
    with pytest.raises(CheckpointDamaged, match="outside"):
        fresh().load("c", tmp_path)


def test_saving_between_clip_and_step_is_refused(tmp_path):
    model = fresh()
    model.forward_backward(BATCHES[0])
    model.clip_grad_norm()
    with pytest.raises(WindowNotStepped):
        model.save("c", tmp_path, save_optimizer=True)
    assert list(tmp_path.iterdir()) == []
    model.save("c", tmp_path)


def test_a_parameter_frozen_after_the_optimizer_was_set_is_saved_and_resumed(tmp_path):
    """Its state and its gradient of an open window belong to the optimizer, which goes on using them."""

    def frozen():
        model = fresh()
        run(model, BATCHES[:1])
        model.engine.module.embed.weight.requires_grad_(False)
        return model

    model = frozen()
    model.save("c", tmp_path, save_optimizer=True)
    again = fresh(seed=1)
    again.engine.module.embed.weight.requires_grad_(False)
    with pytest.raises(CheckpointMismatch, match=r"embed\.weight"):
        again.set_optimizer("adamw", lr=1e-2)
        again.set_lr_scheduler("linear_warmup", num_training_steps=10)
        again.resume_from_checkpoint(tmp_path / "c")
    again = frozen()
    again.resume_from_checkpoint(tmp_path / "c")
    run(model, BATCHES[1:4])
    rng.restore(load_file(tmp_path / "c" / "rng.safetensors"), json.loads((tmp_path / "c" / "rng.json").read_text()))
    again.resume_from_checkpoint(tmp_path / "c")
    run(again, BATCHES[1:4])
    for key, tensor in model.get_state_dict().items():
        assert torch.equal(tensor, again.get_state_dict()[key]), key


def test_saving_between_step_and_lr_step_resumes_there(tmp_path):
    first = fresh()
    first.forward_backward(BATCHES[0])
    first.step()
    path = first.save("c", tmp_path, save_optimizer=True)
    second = fresh()
    second.resume_from_checkpoint(path)
    assert (second.step(), second.lr_step(), second.lr_step()) == (False, True, False)


def test_a_schedule_whose_state_is_no_plain_data_is_told(tmp_path):
    class Curve:
        def __call__(self, step):
            return 1.0

    curve = Curve()
    curve.hidden = object()
    model = fresh(scheduler=False)
    model.set_lr_scheduler("lambda_lr", lr_lambda=curve)
    with pytest.raises(CheckpointUnfit, match="scheduler LambdaLR can't be saved"):
        model.save("c", tmp_path, save_optimizer=True)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ disks


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "fsync", "rename"])
@pytest.mark.parametrize("old", [True, False])
def test_a_disk_that_fills_up_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch, file, old):
    """At each file, at the sync, and at the last rename: nothing half-written is left, and what was there still loads."""
    model = fresh()
    run(model, BATCHES[:2])
    if old:
        model.save("c", tmp_path, save_optimizer=True)
    before = {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()} if old else None
    run(model, BATCHES[2:4])
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*args, **kwargs):
        raise full

    real_save, real_text, real_rename = checkpoint.save_file, Path.write_text, Path.rename

    def save(tensors, path):
        if Path(path).name == file:
            Path(path).write_bytes(b"half")
            fail()
        real_save(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr("twinkle_core.train.checkpoint.save_file", save)
        patch.setattr("twinkle_core.train.single.save_file", save)
        patch.setattr(Path, "write_text", lambda p, t: fail() if p.name == file else real_text(p, t))
        if file == "fsync":
            patch.setattr("os.fsync", fail)
        if file == "rename":
            patch.setattr(Path, "rename", lambda p, to: fail() if ".tmp-" in p.name else real_rename(p, to))
        with pytest.raises(CheckpointNotWritten, match="No space left on device"):
            model.save("c", tmp_path, save_optimizer=True)
    assert [p.name for p in tmp_path.iterdir()] == (["c"] if old else [])
    if old:
        assert {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()} == before
        assert fresh().resume_from_checkpoint(tmp_path / "c")["cur_step"] == 1
    model.save("c", tmp_path, save_optimizer=True)
    assert fresh().resume_from_checkpoint(tmp_path / "c")["cur_step"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


KILLED = """
import os, sys
from pathlib import Path
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM
model = session_model(TinyLM())
model.save("c", sys.argv[1], consumed_train_samples=5)
rename = Path.rename
Path.rename = lambda p, to: os._exit(9) if ".tmp-" in p.name else rename(p, to)
model.save("c", sys.argv[1], consumed_train_samples=9)
"""


@pytest.mark.parametrize("next_call", ["load", "save"])
def test_a_process_killed_between_the_two_renames_loses_nothing(tmp_path, next_call):
    """The only moment at which no folder has the checkpoint's name: whoever asks for it next finds the old one."""
    died = subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=120)
    assert died.returncode == 9 and not (tmp_path / "c").exists()
    if next_call == "load":
        assert fresh().load("c", tmp_path)["consumed_train_samples"] == 5
    else:
        fresh().save("c", tmp_path, consumed_train_samples=7)
        assert fresh().load("c", tmp_path)["consumed_train_samples"] == 7
    assert not (tmp_path / ".c.old").exists()


REFUSED = """
import resource, signal, sys
from twinkle_core.errors import CheckpointNotWritten
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = session_model(TinyLM())
model.save("c", sys.argv[1], consumed_train_samples=5)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    model.save("c", sys.argv[1], consumed_train_samples=9)
except CheckpointNotWritten as error:
    print("refused", model.sessions[""].consumed_train_samples, type(error.__cause__).__name__)
"""


def test_writes_that_the_system_itself_refuses(tmp_path):
    """Under a limit on the size of files, with the errors that safetensors really raises."""
    out = subprocess.run([sys.executable, "-c", REFUSED, tmp_path], capture_output=True, text=True, timeout=120)
    assert out.stdout.split()[:2] == ["refused", "5"], out.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert fresh().load("c", tmp_path)["consumed_train_samples"] == 5


def test_no_pickle_and_what_the_state_file_says(tmp_path):
    model = fresh()
    run(model, BATCHES[:3])
    path = Path(model.save("c", tmp_path, save_optimizer=True, consumed_train_samples=9))
    files = {p.name for p in path.iterdir()}
    assert files == {
        "model.safetensors", "trainer_state.json", "optimizer.safetensors", "optimizer.json", "scheduler.json", "engine.json",
        "gradients.safetensors", "rng.safetensors", "rng.json",
    }  # fmt: skip
    state = json.loads((path / "trainer_state.json").read_text())
    assert set(state["files"]) == files - {"trainer_state.json"}
    assert (state["cur_step"], state["consumed_train_samples"], state["gradient_accumulation_steps"]) == (1, 9, 2)
    assert state["window"]["count"] == 1 and state["optimizer"] == "AdamW" and state["scheduler"] == "LinearWarmup"
    assert any(p["name"] == "adamw" for p in state["plugins"]) and "1 rank" in state["mesh"]
    names = json.loads((path / "optimizer.json").read_text())["groups"]
    assert "mix.weight" in names[0]["params"] and "exp_avg/mix.weight" in load_file(path / "optimizer.safetensors")


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    """Under the same name at the next save; that of a living process stays."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".it.tmp-{dead.pid}-0123abcd"
    other = tmp_path / f".other.tmp-{dead.pid}-0123abcd"
    alive = tmp_path / f".it.tmp-{os.getppid()}-0123abcd"
    for path in (left, other, alive):
        path.mkdir()
    folder.recover(tmp_path / "it")
    assert (left.exists(), other.exists(), alive.exists()) == (False, True, True)
    folder.sweep(tmp_path)
    assert (other.exists(), alive.exists()) == (False, True)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007])
def test_all_files_have_the_rights_of_new_files(tmp_path, umask):
    """Whoever may read a new file here may read all of a checkpoint: safetensors' own are their owner's alone."""
    before = os.umask(umask)
    try:
        model = fresh()
        model.forward_backward(BATCHES[0], gradient_accumulation_steps=2)
        path = Path(model.save("c", tmp_path, save_optimizer=True))
        (tmp_path / "new").touch()
        (tmp_path / "folder").mkdir()
    finally:
        os.umask(before)
    rights = {p.name: p.stat().st_mode for p in path.iterdir()}
    assert {"model.safetensors", "gradients.safetensors", "trainer_state.json", "rng.json"} <= rights.keys()
    assert set(rights.values()) == {(tmp_path / "new").stat().st_mode}
    assert path.stat().st_mode == (tmp_path / "folder").stat().st_mode


# ------------------------------------------------------------------------------------------------ without a model


def test_a_folder_is_inspected_without_a_model(tmp_path):
    model = fresh()
    run(model, BATCHES[:3])
    path = Path(model.save("c", tmp_path, save_optimizer=True, consumed_train_samples=9))
    state = checkpoint.inspect(path, hashes=True)
    assert state.progress() == {"cur_step": 1, "consumed_train_samples": 9, "gradient_accumulation_steps": 2}
    assert (state.optimizer, state.scheduler, state.adapter_name) == ("AdamW", "LinearWarmup", "")
    weights = Path(model.save("weights", tmp_path))
    with pytest.raises(CheckpointMismatch, match="weights alone"):
        checkpoint.inspect(weights)
    assert not checkpoint.inspect(weights, resume_only_model=True).resumable
    (tmp_path / "plain").mkdir()
    for odd, text in ((tmp_path / "plain", "no trainer_state.json"), (tmp_path / "none", "no such folder")):
        with pytest.raises(CheckpointNotFound, match=text):
            checkpoint.inspect(odd)


def test_inspecting_sees_sizes_and_plain_data_but_weights_only_when_asked(tmp_path):
    model = fresh()
    run(model, BATCHES[:3])
    path = Path(model.save("c", tmp_path, save_optimizer=True))
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    checkpoint.inspect(path)
    with pytest.raises(CheckpointDamaged, match=r"model.safetensors.*sha256"):
        checkpoint.inspect(path, hashes=True)
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointDamaged, match=r"model.safetensors.*bytes"):
        checkpoint.inspect(path)
    file.write_bytes(data)
    text = (path / "rng.json").read_text()
    (path / "rng.json").write_text("[" * len(text))
    with pytest.raises(CheckpointDamaged, match=r"rng.json.*content has changed"):
        checkpoint.inspect(path)
    state = json.loads((path / "trainer_state.json").read_text())
    state["files"]["rng.json"]["sha256"] = hashlib.sha256((path / "rng.json").read_bytes()).hexdigest()
    (path / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointDamaged, match=r"rng.json.*can't be used"):
        checkpoint.inspect(path)
    del state["files"]["rng.json"]
    (path / "trainer_state.json").write_text(json.dumps(state))
    (path / "rng.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"rng.json.*missing"):
        checkpoint.inspect(path)
    checkpoint.inspect(path, resume_only_model=True)


class Counting(ToyAdapters):
    """Notes how often an adapter was active: something that training goes on from, beside weights."""

    def __init__(self, module):
        super().__init__(module)
        self.counts = {}

    def activate(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1
        return super().activate(name)

    def training_state(self, name):
        return {"active": self.counts.get(name, 0)} if name else {}

    def load_training_state(self, name, state):
        self.counts[name] = state.get("active", 0)


def counting(*adapters, store=Counting, **engine):
    module = ToyLinear()
    model = SessionModel(ToyEngine(module, **engine), store(module))
    model.set_loss("mse")
    for name in adapters:
        model.add_adapter_to_model(name, 1.0)
        model.set_optimizer("sgd", lr=0.1, adapter_name=name)
    return model


def test_what_a_store_keeps_beside_weights_is_resumed(tmp_path):
    """With the optimizer, and only if there is something; a store that knows nothing of it takes the rest."""
    model = counting("a", "b")
    for _ in range(3):
        model.forward_backward([row([5.0], [1])], adapter_name="a")
    before = dict(model.adapters.counts)
    assert before["a"] > 0
    path = Path(model.save("c", tmp_path, adapter_name="a", save_optimizer=True))
    assert json.loads((path / "adapter.json").read_text()) == {"active": before["a"]}
    weights = Path(model.save("w", tmp_path, adapter_name="a"))
    assert not (weights / "adapter.json").exists()
    second = counting("a", "b")
    second.resume_from_checkpoint(path, adapter_name="b")
    assert second.adapters.counts["b"] == before["a"]
    counting("a", store=ToyAdapters).resume_from_checkpoint(path, adapter_name="a")

    plain = Path(counting("a", store=ToyAdapters).save("p", tmp_path, adapter_name="a", save_optimizer=True))
    assert not (plain / "adapter.json").exists()
    second.resume_from_checkpoint(plain, adapter_name="b")
    assert second.adapters.counts["b"] == 0


def test_a_scale_that_is_resumed_is_followed_by_other_windows(tmp_path):
    """Resuming one adapter changes the scaler that all share; what another has gathered so far means what it meant."""

    def made(scale=1024.0):
        return counting("a", "b", store=ToyAdapters, scaler=torch.amp.GradScaler("cpu", init_scale=scale))

    path = made(64.0).save("c", tmp_path, adapter_name="b", save_optimizer=True)
    found = []
    for resumes in (False, True):
        model = made()
        model.forward_backward([row([5.0], [1])], adapter_name="a", gradient_accumulation_steps=2)
        if resumes:
            model.resume_from_checkpoint(path, adapter_name="b")
            assert model.engine.scaler.get_scale() == 64.0
        model.forward_backward([row([4.0], [2])], adapter_name="a")
        found.append((model.clip_grad_norm(1e9, adapter_name="a"), model.step(adapter_name="a")))
    assert found[0] == found[1]
