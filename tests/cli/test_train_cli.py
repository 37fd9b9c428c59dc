"""``twinkle train``: what it leaves, that a broken-off run ends as an unbroken one, and that faults are told first."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from twinkle_core import errors, hookimpl, plugins
from twinkle_core.cli import checkpoints
from twinkle_core.cli.main import main
from twinkle_core.known import KNOWN
from twinkle_core.templates.chat import ChatTemplate

BUNDLED = "bundled://self-cognition"
SLOW_LOSS = """
import time
from twinkle_core.losses.cross_entropy import CrossEntropyLoss

class SlowLoss(CrossEntropyLoss):
    def __call__(self, inputs, outputs):
        time.sleep(0.05)
        return super().__call__(inputs, outputs)
"""


def weights(checkpoint: Path) -> dict[str, list]:
    file = next(checkpoint.glob("*model.safetensors"))
    return {name: tensor.tolist() for name, tensor in load_file(file).items()}


def test_a_run_leaves_checkpoints_metrics_plot_and_its_configuration(config, twinkle, tmp_path, lines):
    path = config(training={"max_steps": 5, "save_steps": 2, "save_total_limit": 2, "logging_steps": 2})
    status, text = twinkle("train", path)
    out = tmp_path / "out"
    assert status == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "checkpoint-4", "checkpoint-5", "config.yaml", "data_order.json", "loss.png", "metrics.jsonl",
    ]  # fmt: skip
    assert [row["step"] for row in lines(out / "metrics.jsonl")] == [2, 4, 5]
    assert all({"loss", "lr", "grad_norm", "accuracy", "epoch"} <= set(row) for row in lines(out / "metrics.jsonl"))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "CosineWarmup" in text and "18 rows, 9 steps an epoch, 5 steps in all" in text


WARNS = """
import warnings
from twinkle_core.losses.cross_entropy import CrossEntropyLoss

class Warns(CrossEntropyLoss):
    def __call__(self, inputs, outputs):
        warnings.warn_explicit("old name", FutureWarning, "other.py", 1, module="peft.utils.other")
        warnings.warn_explicit("mine", FutureWarning, "warns.py", 1, module="warns")
        return super().__call__(inputs, outputs)
"""


def test_without_a_terminal_output_is_lines_and_libraries_notices_stay_theirs(config, tmp_path):
    (tmp_path / "warns.py").write_text(WARNS)
    command = [sys.executable, "-m", "twinkle", "train", config(loss="warns:Warns", training={"max_steps": 2})]
    there = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=there, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout + done.stderr and "examples/s" not in done.stderr
    assert "FutureWarning: mine" in done.stderr and "old name" not in done.stderr
    assert "step 2 of 2: loss=" in done.stderr


def test_listeners_see_the_configuration_before_the_run(config, twinkle):
    """And each step of it, in order."""
    seen = []

    class Watch:
        @staticmethod
        @hookimpl
        def twinkle_configure(config):
            seen.append(("configure", config.training.max_steps))

        @staticmethod
        @hookimpl
        def twinkle_after_step(result):
            seen.append(("step", result.cur_step))

    with plugins.listening(Watch):
        assert twinkle("train", config())[0] == 0
        assert twinkle("train", config(loss="no_such"), "--output_dir", "elsewhere")[0] == 1  # refused: never told of
    assert seen[0][0] == "configure" and seen[1:] == [("step", n) for n in range(1, len(seen))] and len(seen) > 2


def test_the_written_configuration_gives_the_same_run(config, twinkle, tmp_path, lines):
    twinkle("train", config(), "--optimizer.lr", "3e-3", "--training.seed=7")
    again = tmp_path / "out" / "config.yaml"
    twinkle("train", again, "--output_dir", tmp_path / "again")
    assert weights(tmp_path / "out/checkpoint-4") == weights(tmp_path / "again/checkpoint-4")
    assert lines(tmp_path / "out/metrics.jsonl") == lines(tmp_path / "again/metrics.jsonl")
    twinkle("train", again, "--output_dir", tmp_path / "other", "--training.seed", 8)
    assert weights(tmp_path / "out/checkpoint-4") != weights(tmp_path / "other/checkpoint-4")


@pytest.mark.parametrize("adapter", [{"r": 4, "lora_dropout": 0.1}, None], ids=["lora", "full"])
def test_resumed_equals_unbroken_bit_for_bit(config, twinkle, tmp_path, lines, adapter):
    """Broken off in the middle of the second epoch, just after a short window at the end of the first."""
    training = {"epochs": 3, "gradient_accumulation_steps": 2, "save_steps": 6}
    path = config(adapter=adapter, training=training)
    twinkle("train", path)
    twinkle("train", path, "--output_dir", tmp_path / "b", "--resume", tmp_path / "out/checkpoint-6")
    assert weights(tmp_path / "out/checkpoint-15") == weights(tmp_path / "b/checkpoint-15")
    assert weights(tmp_path / "out/checkpoint-6") != weights(tmp_path / "out/checkpoint-15")
    whole, rest = lines(tmp_path / "out/metrics.jsonl"), lines(tmp_path / "b/metrics.jsonl")
    assert whole[6:] == rest


def _start(path: Path, tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    (tmp_path / "slow_loss.py").write_text(SLOW_LOSS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "twinkle", "train", str(path), *words]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _wait_for_lines(file: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if file.is_file() and len(file.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError("no step was logged in 90 s")


def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_ends_as_an_unbroken_one(config, twinkle, tmp_path, lines, monkeypatch):
    """As a terminal does it: the signal goes to the whole group, the data loader's process included."""
    dataloader = {"batch_size": 2, "num_workers": 1}
    path = config(loss="slow_loss:SlowLoss", training={"max_steps": 24}, dataloader=dataloader)
    process = _start(path, tmp_path)
    _wait_for_lines(tmp_path / "out/metrics.jsonl", 4, process)
    os.killpg(process.pid, signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130, text
    assert text.count("Stopping after this step") == 1 and "go on with --resume" in text
    (stopped,) = (tmp_path / "out").glob("checkpoint-*")
    step = int(stopped.name.removeprefix("checkpoint-"))
    assert 4 <= step < 24
    assert [row["step"] for row in lines(tmp_path / "out/metrics.jsonl")] == list(range(1, step + 1))

    monkeypatch.syspath_prepend(tmp_path)
    assert twinkle("train", path, "--resume")[0] == 0
    assert twinkle("train", path, "--output_dir", tmp_path / "unbroken")[0] == 0
    assert weights(tmp_path / "out/checkpoint-24") == weights(tmp_path / "unbroken/checkpoint-24")
    assert lines(tmp_path / "out/metrics.jsonl") == lines(tmp_path / "unbroken/metrics.jsonl")


def test_sigterm_leaves_a_checkpoint(config, tmp_path):
    process = _start(config(loss="slow_loss:SlowLoss", training={"max_steps": 500}), tmp_path)
    _wait_for_lines(tmp_path / "out/metrics.jsonl", 2, process)
    process.terminate()
    assert "Stopping after this step" in process.communicate(timeout=60)[0]
    assert process.returncode == 143
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


def test_a_signal_in_the_closing_save_does_not_break_it_off(config, twinkle, tmp_path, monkeypatch):
    """Nor does a second one; what was found at the signal is put back."""
    name_of = checkpoints.name_of

    def interrupted(step):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        return name_of(step)

    def kill(number, frame):
        raise AssertionError("the signal was not noted")

    monkeypatch.setattr(checkpoints, "name_of", interrupted)
    before = signal.signal(signal.SIGTERM, kill)
    try:
        assert twinkle("train", config(training={"max_steps": 2}))[0] == 0
        assert signal.getsignal(signal.SIGTERM) is kill
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "out/checkpoint-2").is_dir()


def test_resume_auto_begins_where_there_is_nothing_and_goes_on_where_there_is(config, twinkle, tmp_path, lines):
    path = config(training={"max_steps": 2}, scheduler=None)
    assert twinkle("train", path, "--resume", "auto")[0] == 0
    status, text = twinkle("train", path, "--resume=auto", "--training.max_steps", 4)
    assert status == 0, text
    assert "going on from" in text and "after step 2" in text
    assert [row["step"] for row in lines(tmp_path / "out/metrics.jsonl")] == [1, 2, 3, 4]
    assert twinkle("train", "--resume", tmp_path / "out/checkpoint-4", path, "--training.max_steps", 4)[0] == 0


def test_a_new_run_does_not_mix_with_an_old_one(config, twinkle, tmp_path):
    path = config(training={"max_steps": 1})
    twinkle("train", path)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}
    status, text = twinkle("train", path)
    assert status == 1
    assert "already holds checkpoint-1 of another run" in text and "--resume" in text
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}


def test_a_run_at_its_end_has_nothing_to_do_and_is_left_alone(config, twinkle, tmp_path, monkeypatch):
    """Told from the folder where max_steps says it, and else when the data is there; the model is never loaded."""
    path = config(training={"epochs": 1, "gradient_accumulation_steps": 3})
    twinkle("train", path)
    (tmp_path / "out/.checkpoint-9.tmp-1234567-0123abcd").mkdir()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    monkeypatch.setattr("twinkle_core.cli.training._model", lambda *_: pytest.fail("the model was loaded"))
    status, text = twinkle("train", path, "--resume", "--optimizer.lr", "5e-4")
    assert status == 0 and "nothing to do: the run is at step 3 of 3" in text
    monkeypatch.setattr("twinkle_core.cli.training.load_data", lambda *_: pytest.fail("the data was loaded"))
    status, text = twinkle("train", path, "--resume", "--training.max_steps", 2)
    assert status == 0 and "nothing to do: the run is at step 3 of 2" in text
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}


@pytest.mark.parametrize("there", [True, False], ids=["empty", "absent"])
def test_a_resume_without_a_checkpoint_says_that_it_begins(config, twinkle, tmp_path, there):
    if there:
        (tmp_path / "out").mkdir()
    status, text = twinkle("train", config(training={"max_steps": 1}), "--resume")
    assert status == 0 and f"{tmp_path / 'out'} holds no checkpoint: the run begins at step 0\n" in text
    assert "begins at step 0" not in twinkle("train", config(training={"max_steps": 2}), "--resume")[1]


def test_what_a_checkpoint_overrules_is_said_used_and_written(config, twinkle, tmp_path, lines):
    """A run made longer goes on at the rate of the longer plan, with the checkpoint's own values for the rest; the written
    configuration is of what was used, so that a resume with it has nothing to say."""
    path = config(training={"max_steps": 2})
    twinkle("train", path)
    words = ["--training.max_steps", 6, "--optimizer.lr", "5e-4", "--optimizer.betas", "[0.8, 0.9]"]
    status, text = twinkle("train", path, "--resume", *words)
    assert status == 0, text
    assert "--optimizer.lr: lr=0.0005 is not used; checkpoint-2 goes on with its own 0.001." in text
    assert "--optimizer.betas: betas=[0.8, 0.9] is not used; checkpoint-2 goes on with its own [0.9, 0.999]." in text
    used = [row["lr"] for row in lines(tmp_path / "out/metrics.jsonl")][2:]
    assert used == pytest.approx([1e-3 * 0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(2, 6)])
    written = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert written["optimizer"] == {"cls": "adamw", "lr": 1e-3, "betas": [0.9, 0.999]}
    assert written["training"] == {"max_steps": 6}
    status, text = twinkle("train", tmp_path / "out/config.yaml", "--resume", "--training.max_steps", 7)
    assert status == 0 and "is not used" not in text


def test_what_a_schedulers_checkpoint_overrules_is_said_and_written(config, twinkle, tmp_path):
    scheduler = {"cls": "torch.optim.lr_scheduler:StepLR", "step_size": 2, "gamma": 0.5}
    path = config(training={"max_steps": 1}, scheduler=scheduler)
    twinkle("train", path)
    status, text = twinkle("train", path, "--resume", "--training.max_steps", 2, "--scheduler.gamma", 0.1)
    assert status == 0 and "--scheduler.gamma: gamma=0.1 is not used; checkpoint-1 goes on with its own 0.5." in text
    assert yaml.safe_load((tmp_path / "out/config.yaml").read_text())["scheduler"] == scheduler


def _cut_short(checkpoint):
    file = checkpoint / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _changed(checkpoint):
    file = checkpoint / "scheduler.json"
    file.write_text(file.read_text().replace("0", "1", 1))


@pytest.mark.parametrize(
    ("damage", "words", "told"),
    [
        (_cut_short, [], "optimizer.safetensors' is damaged: it has"),
        (_changed, [], "scheduler.json' is damaged: its content has changed"),
        (lambda c: (c / "rng.json").unlink(), [], "rng.json' is damaged: it is missing"),
        (lambda c: (c / "trainer_state.json").unlink(), [], "the folder has no trainer_state.json"),
        (lambda c: None, ["--adapter.r", 8], "its adapter has r=4, and r=8 is asked for"),
        (lambda c: None, ["--adapter", "null"], "it holds the adapter 'default'"),
        (lambda c: None, ["--optimizer.cls", "sgd"], "it holds the state of the optimizer AdamW, and SGD is asked for"),
        (lambda c: None, ["--scheduler", "null"], "no scheduler is asked for"),
        (lambda c: None, ["--training.seed", 7], "seed: 42 before, 7 now"),
    ],
    ids=["cut short", "changed", "missing", "no state", "rank", "all weights", "optimizer", "scheduler", "seed"],
)
def test_what_the_folder_tells_is_told_before_data_and_model_are_loaded(
    config, twinkle, tmp_path, monkeypatch, damage, words, told
):
    path = config(training={"max_steps": 1})
    twinkle("train", path)
    damage(tmp_path / "out/checkpoint-1")
    monkeypatch.setattr("twinkle_core.cli.training.load_data", lambda *_: pytest.fail("the data was loaded"))
    status, text = twinkle("train", path, "--resume", "--training.max_steps", 4, *words)
    assert status == 1 and told in text


def test_another_name_of_the_model_is_told_first(config, twinkle, tmp_path, tiny):
    (tmp_path / "same").symlink_to(tiny)
    twinkle("train", config(training={"max_steps": 1}))
    words = ["--resume", "--training.max_steps", 2]
    status, text = twinkle("train", config(), *words, "--model.id", tmp_path / "same")
    assert status == 0 and f"checkpoint-1 was trained from the model {tiny}, and {tmp_path / 'same'} is given" in text


def test_a_folder_of_checkpoints_is_answered_with_the_newest(config, twinkle, tmp_path):
    twinkle("train", config(training={"max_steps": 1}))
    status, text = twinkle("train", config(), "--resume", tmp_path / "out")
    assert status == 1 and f"its newest checkpoint: --resume {tmp_path / 'out/checkpoint-1'}" in text


def _rows_file(path: Path, answers: list[str]) -> dict:
    turns = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}] for answer in answers]
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in turns))
    return {"id": str(path)}


def test_changed_rows_are_refused_and_the_same_rows_elsewhere_are_not(config, twinkle, tmp_path, monkeypatch):
    answers = ["one", "two", "three", "four"]
    path = config(training={"max_steps": 1}, dataset=_rows_file(tmp_path / "a.jsonl", answers))
    twinkle("train", path)
    elsewhere = config(dataset=_rows_file(tmp_path / "b.jsonl", answers))
    status, text = twinkle("train", elsewhere, "--resume", "--training.max_steps", 2)
    assert status == 0, text
    changed = config(dataset=_rows_file(tmp_path / "b.jsonl", ["one", "two", "three", "FOUR"]))
    monkeypatch.setattr("twinkle_core.cli.training._model", lambda *_: pytest.fail("the model was loaded"))
    status, text = twinkle("train", changed, "--resume", "--training.max_steps", 3)
    assert status == 1 and "content: " in text and f"remove {tmp_path / 'out/data_order.json'}" in text


def test_a_checkpoint_without_its_runs_notes_is_gone_on_from_with_a_warning(config, twinkle, tmp_path, caplog):
    path = config(training={"max_steps": 1})
    twinkle("train", path)
    (tmp_path / "out/data_order.json").unlink()
    assert twinkle("train", path, "--resume", "--training.max_steps", 2)[0] == 0
    (told,) = [record.getMessage() for record in caplog.records if "data_order" in record.getMessage()]
    assert f"{tmp_path / 'out/data_order.json'} does not tell the run's rows, content, shuffle, seed, so" in told
    caplog.clear()
    assert twinkle("train", path, "--resume", "--training.max_steps", 3)[0] == 0
    assert not [record for record in caplog.records if "data_order" in record.getMessage()]


def test_an_options_fault_names_the_option_and_its_value(config, twinkle):
    """And a fault of the file's its very line, whatever options stand beside it."""
    status, text = twinkle("train", config(), "--optimizer.lr", "abc", "--optimizer.eps", "1e-7")
    assert status == 1 and "--optimizer.lr: optimizer 'adamw': lr='abc': it must be a finite number" in text
    assert "line" not in text and "eps" not in text
    path = config(optimizer={"cls": "adamw", "lr": "abc"})
    line = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if "abc" in line)
    status, text = twinkle("train", path, "--optimizer.eps", "1e-7")
    assert f"line {line}: optimizer 'adamw': lr='abc'" in text and "--optimizer" not in text
    status, text = twinkle("train", config(), "--scheduler", "{cls: cosine_warmup, min_lr_ratio: 2}", "--training.seed", 1)
    assert "--scheduler: scheduler 'cosine_warmup': min_lr_ratio=2: " in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--training.seed", 7], "seed: 42 before, 7 now"),
        (["--dataloader.shuffle", "false"], "shuffle: True before, False now"),
        (["--dataset.slice", 16], "rows: 18 before, 16 now"),
    ],
    ids=["seed", "shuffle", "data"],
)
def test_a_resumed_run_draws_its_rows_in_the_same_order(config, twinkle, tmp_path, monkeypatch, words, told):
    """Another order is told before the model is loaded, and leaves what the run had noted."""
    path = config(training={"max_steps": 2}, scheduler=None)
    twinkle("train", path)
    before = [(tmp_path / "out" / name).read_text() for name in ("config.yaml", "data_order.json")]
    monkeypatch.setattr("twinkle_core.cli.training._model", lambda *_: pytest.fail("the model was loaded"))
    status, text = twinkle("train", path, "--resume", "--training.max_steps", 4, *words)
    assert status == 1 and "DataOrderChanged" in text and told in text
    assert before == [(tmp_path / "out" / name).read_text() for name in ("config.yaml", "data_order.json")]


def test_a_refused_resume_keeps_the_configuration(config, twinkle, tmp_path):
    twinkle("train", config(training={"max_steps": 1}))
    before = (tmp_path / "out/config.yaml").read_text()
    assert twinkle("train", config(adapter={"r": 8}), "--resume", "--training.max_steps", 2)[0] == 1
    assert (tmp_path / "out/config.yaml").read_text() == before


def test_half_written_checkpoints_of_killed_runs_are_removed_at_resume(config, twinkle, tmp_path):
    twinkle("train", config(training={"max_steps": 1}, scheduler=None))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f"out/.checkpoint-9.tmp-{dead.pid}-0123abcd"
    left.mkdir()
    assert twinkle("train", config(scheduler=None), "--resume", "--training.max_steps", 2)[0] == 0
    assert not left.exists()


def test_evaluation_is_logged_and_changes_nothing(config, twinkle, tmp_path, lines):
    evaluation = {
        "id": "bundled://self-cognition",
        "slice": [20, 24],
        "preprocessor": {"cls": "self_cognition", "model_name": "Ada", "model_author": "me"},
    }
    twinkle("train", config())
    words = ["--eval_dataset", json.dumps(evaluation), "--training.eval_steps", 3, "--output_dir", tmp_path / "e"]
    twinkle("train", config(), *words)
    plain, with_eval = lines(tmp_path / "out/metrics.jsonl"), lines(tmp_path / "e/metrics.jsonl")
    assert [row["step"] for row in with_eval if "eval_loss" in row] == [3, 4]
    assert plain == [row for row in with_eval if "eval_loss" not in row]
    assert weights(tmp_path / "out/checkpoint-4") == weights(tmp_path / "e/checkpoint-4")


def test_accumulation_and_micro_batches_are_one_batch(config, twinkle, tmp_path):
    """Four rows a step, however they are cut, without dropout."""
    adapter = {"r": 4}
    for name, batch, extra in (("a", 4, {}), ("b", 1, {"gradient_accumulation_steps": 4}), ("c", 4, {"micro_batch_size": 1})):
        path = config(adapter=adapter, dataloader={"batch_size": batch}, training={"max_steps": 3, **extra})
        twinkle("train", path, "--output_dir", tmp_path / name, "--optimizer", "{cls: sgd, lr: 0.1}")
    whole = load_file(tmp_path / "a/checkpoint-3/adapter_model.safetensors")
    for name in ("b", "c"):
        for key, tensor in load_file(tmp_path / name / "checkpoint-3/adapter_model.safetensors").items():
            assert (tensor - whole[key]).norm() <= 1e-5 * whole[key].norm() + 1e-9


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"loss": "cros_entropy"}, "unknown loss 'cros_entropy'. Did you mean 'cross_entropy'?"),
        ({"optimizer": {"cls": "adamw", "lrr": 1}}, "has no parameter 'lrr'. Did you mean 'lr'?"),
        ({"optimizer": {"cls": "adamw", "params": []}}, "params"),
        ({"optimizer": {"cls": "adamw", "lr": "1e-4x"}}, "optimizer 'adamw': "),
        ({"optimizer": {"cls": "adamw", "betas": [0.9]}}, "optimizer 'adamw': "),
        ({"output_dir": "~nobodyofthisname/x"}, "there is no user"),
        ({"output_dir": "/proc/x"}, "/proc/x can't be made"),
        ({"output_dir": "/etc/passwd/x"}, "/etc/passwd/x can't be made"),
        ({"optimizer": {"cls": "adamw", "lr": -1}}, "lr=-1: it must be a finite number of at least 0"),
        ({"scheduler": {"cls": "step_lr"}}, "step_size"),
        ({"scheduler": {"cls": "cosine_warmup", "num_warmup_steps": -1}}, "is negative"),
        ({"template": {"cls": "chat", "arguments": {"enable_thinkin": False}}}, "Did you mean 'enable_thinking'?"),
        ({"scheduler": {"cls": "cosine_warmup", "num_warmup": 1}}, "Did you mean 'num_warmup_steps'?"),
        ({"metrics": ["loss", "acuracy"]}, "Did you mean 'accuracy'?"),
        ({"model": {"id": "/nowhere/model"}}, "/nowhere/model"),
        ({"dataset": {"id": "rows.jsonl"}}, "rows.jsonl"),
        ({"dataset": {"id": BUNDLED, "preprocessor": {"cls": "self_cognition", "modelname": "x"}}}, "'model_name'"),
        ({"adapter": {"r": 2, "arguments": {"use_rslra": True}}}, "Did you mean 'use_rslora'?"),
        ({"dataset": {"id": BUNDLED, "preprocessor": "self_cognition"}}, "model_name"),
        ({"adapter": {"r": 2, "arguments": {"r": 4}}}, "argument 'r' is said by adapter.r; set it there"),
        (
            {"adapter": {"r": 2, "arguments": {"task_type": "SEQ_CLS"}}},
            "argument 'task_type' is said by task",
        ),
        ({"template": {"arguments": {"model_id": "x"}}}, "argument 'model_id' is said by model.id"),
        ({"template": {"arguments": {"max_length": 5}}}, "argument 'max_length' is said by template.max_length"),
        ({"model": {"id": "quickstart", "arguments": {"model_id": "x"}}}, "argument 'model_id' is said by model.id"),
        ({"dataset": {"id": BUNDLED, "split": "test"}}, "has no split 'test'; it has 'train' alone"),
        ({"dataset": {"id": BUNDLED, "split": "train[:1]"}}, "slice: 100"),
        ({"eval_dataset": [{"id": BUNDLED, "subset": "zh"}]}, "has no subset 'zh'"),
        ({"adapter": {"path": "/nowhere/adapter"}}, "there is no folder /nowhere/adapter"),
        ({"model": {"id": "quickstart", "cls": "later"}}, "pip install -U twinkle-multilora"),
    ],
)
def test_faults_are_told_with_their_line_before_anything_is_written(config, twinkle, tmp_path, sections, told, monkeypatch):
    monkeypatch.setitem(KNOWN, ("model", "later"), ("LaterModel", "twinkle-multilora", "99.0"))
    path = config(**sections)
    status, text = twinkle("train", path)
    assert status == 1
    assert "BadConfig" in text and told in text
    (section,) = sections
    first = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if line.startswith(f"{section}:"))
    at = [int(part.split(":")[0]) for part in text.split("line ")[1:]]
    assert at and all(first <= line <= first + 6 for line in at), (first, text)
    assert not (tmp_path / "out").exists()


def test_an_argument_with_a_key_of_its_own_overrules_nothing_in_silence(config, twinkle, tmp_path):
    status, text = twinkle("train", config(), "--model.arguments.mixed_precision", "bf16", "--adapter.arguments.r", 4)
    assert status == 1 and "has 2 faults" in text
    assert "--model.arguments.mixed_precision: argument 'mixed_precision' is said by model.mixed_precision" in text
    assert "--adapter.arguments.r: argument 'r' is said by adapter.r; set it there" in text and not (tmp_path / "out").exists()


def test_an_adapter_given_as_the_model_is_told_with_its_base(config, twinkle, tmp_path, tiny):
    assert twinkle("train", config(training={"max_steps": 1}))[0] == 0
    adapter = tmp_path / "out" / "checkpoint-1"
    status, text = twinkle("train", config(output_dir=str(tmp_path / "b")), "--model.id", adapter)
    assert status == 1 and f"'{adapter}' holds an adapter, not a model. Give model.id: {tiny}, and adapter.path: " in text
    with pytest.raises(errors.HoldsAdapter, match=f"model_id='{tiny}'"):
        ChatTemplate(adapter)


def test_all_faults_of_all_kinds_that_the_schema_lets_pass_are_told_at_once(config, twinkle):
    status, text = twinkle("train", config(loss="nol", metrics=["nom"]), "--optimizer", "noo")
    assert status == 1
    assert "has 3 faults" in text
    assert "--optimizer: unknown optimizer 'noo'" in text


def test_a_warm_up_longer_than_the_run_is_told_before_the_model_is_loaded(config, twinkle, tmp_path, monkeypatch):
    path = config(scheduler={"cls": "cosine_warmup", "num_warmup_steps": 5})
    assert twinkle("train", path, "--training.max_steps", 6)[0] == 0
    monkeypatch.setattr("twinkle_core.cli.training._model", lambda *_: pytest.fail("the model was loaded"))
    status, text = twinkle("train", path, "--training.max_steps", 4, "--output_dir", tmp_path / "other")
    assert status == 1 and "num_training_steps=4 is less than num_warmup_steps=5" in text


def test_wrong_files_and_folders(config, twinkle, tmp_path):
    assert "there is no configuration file" in twinkle("train", "nowhere.yaml")[1]
    assert "which file?" in twinkle("train")[1]
    assert "there is no such checkpoint folder" in twinkle("train", config(), "--resume", tmp_path / "no")[1]
    assert "there is no such checkpoint folder" in twinkle("train", config(), "--resume", "~nobodyofthisname/x")[1]
    (tmp_path / "file").write_text("")
    assert "is a file" in twinkle("train", config(output_dir=str(tmp_path / "file")))[1]
    assert "'stray' belongs to no option" in twinkle("train", config(), "stray")[1]


def test_a_checkpoint_of_another_model_is_refused(config, twinkle, tmp_path):
    twinkle("train", config(training={"max_steps": 1}))
    status, text = twinkle("train", config(adapter={"r": 8}), "--resume", "--training.max_steps", 2)
    assert status == 1 and "CheckpointMismatch" in text


def test_the_schema_is_printed_in_both_places(twinkle, config):
    status, text = twinkle("train", "--schema")
    assert status == 0 and json.loads(text)["title"] == "TrainConfig"
    assert twinkle("train", config(), "--schema")[1] == text


def test_every_field_of_the_schema_is_described(twinkle):
    schema = json.loads(twinkle("train", "--schema")[1])
    models = {"TrainConfig": schema, **schema["$defs"]}
    bare = [
        f"{m}.{f}" for m, model in models.items() for f, field in model["properties"].items() if not field.get("description")
    ]
    assert len(models) > 7 and not bare


def test_the_help_says_what_is_written_how_to_override_to_resume_and_how_it_ends(config, twinkle, tmp_path):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    status, text = twinkle("train", config(training={"max_steps": 1}), "--help")
    assert status == 0 and all(f"\n{part}\n" in text for part in ("Override", "Resume", "Written to output_dir", "Exit status"))
    twinkle("train", config(training={"max_steps": 1}))
    names = [p.name.replace("checkpoint-1", "checkpoint-N") for p in (tmp_path / "out").iterdir()]
    assert all(f"  {name} " in text for name in names), names


def test_traceback_raises(config):
    with pytest.raises(errors.BadConfig):
        main(["--traceback", "train", str(config(loss="nol"))])
