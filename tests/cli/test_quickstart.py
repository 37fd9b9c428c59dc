"""``twinkle quickstart``: quick on the toy, and once in earnest."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twinkle_core.cli.quickstart import KNOWN, WHO


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINKLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def _adapter(folder: Path) -> bytes:
    return (folder / "adapter/adapter_model.safetensors").read_bytes()


def _program(text: str) -> str:
    """The lines that the command printed."""
    block = re.search(r"The same in (\d+) lines of Python and their imports:\n\n((?:    .*\n)+)", text)
    assert block is not None, text
    lines = [line[4:] for line in block[2].splitlines()]
    own = [line for line in lines if line and not line.startswith(("import ", "from "))]
    assert int(block[1]) == len(own) == 15
    return "\n".join(lines)


@pytest.mark.parametrize("steps", [12, 14], ids=["one epoch", "beyond one"])
def test_the_printed_program_gives_the_very_weights(twinkle, tmp_path, steps):
    """A bundled set of 96 rows in batches of 8 has 12 steps an epoch."""
    name = 'It\'s "Ada"'
    status, text = twinkle("quickstart", "--model", "toy", "--steps", steps, "--output", tmp_path / "q", "--name", name)
    assert status == ("It has NOT learnt" in text)  # which of both after so few steps is rounding's choice
    made = _adapter(tmp_path / "q")
    (tmp_path / "q/adapter/adapter_model.safetensors").unlink()
    source = _program(text)
    assert ("for batch in loader:" in source) == (steps == 12)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == steps
    assert _adapter(tmp_path / "q") == made


def test_what_it_leaves_and_shows(twinkle, tmp_path, lines):
    status, text = twinkle("quickstart", "--model", "toy", "--steps", 2, "--output", tmp_path / "q", "--rank", 2)
    assert status == 1 and "It has NOT learnt" in text
    assert text.count(WHO) == 2 and "你是谁？" in text and "What is the capital of France?" in text
    assert re.search(r"\d+ seconds in all", text)
    assert {"adapter", "metrics.jsonl", "loss.png"} == {path.name for path in (tmp_path / "q").iterdir()}
    assert [row["step"] for row in lines(tmp_path / "q/metrics.jsonl")] == [1, 2]
    assert re.search(r"loss=\d", text) and "lr=" in text and "tok/s=" in text


def test_the_seed_decides(twinkle, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        twinkle("quickstart", "--model", "toy", "--steps", 2, "--output", tmp_path / name, "--seed", seed)
    assert _adapter(tmp_path / "a") == _adapter(tmp_path / "b") != _adapter(tmp_path / "c")


def test_a_second_run_writes_to_a_folder_of_its_own(twinkle, tmp_path, lines):
    """So does one in a folder with checkpoints of another command; what was there is left as it was."""
    words = ["quickstart", "--model", "toy", "--output", tmp_path / "q", "--steps"]
    twinkle(*words, 3)
    before = {p: p.read_bytes() for p in (tmp_path / "q").rglob("*") if p.is_file()}
    _, text = twinkle(*words, 2)
    assert f"{tmp_path / 'q'} holds an earlier run, which is kept; this one writes to {tmp_path / 'q-2'}\n" in text
    assert f"model.save('adapter', {str(tmp_path / 'q-2')!r})" in text
    assert before == {p: p.read_bytes() for p in (tmp_path / "q").rglob("*") if p.is_file()}
    assert len(lines(tmp_path / "q-2/metrics.jsonl")) == 2
    (tmp_path / "q-3/checkpoint-3").mkdir(parents=True)
    twinkle(*words, 1)
    assert sorted(p.name for p in tmp_path.glob("q*")) == ["q", "q-2", "q-3", "q-4"]


def test_the_saved_state_counts_the_samples(twinkle, tmp_path):
    twinkle("quickstart", "--model", "toy", "--steps", 3, "--batch-size", 5, "--output", tmp_path / "q")
    assert json.loads((tmp_path / "q/adapter/trainer_state.json").read_text())["consumed_train_samples"] == 15


@pytest.mark.parametrize("words", [["--name", " "], ["--steps", "0"], ["--batch-size", "-1"], ["--rank", "x"], ["--nme", "A"]])
def test_wrong_options(twinkle, words):
    with pytest.raises(SystemExit) as stopped:
        twinkle("quickstart", *words)
    assert stopped.value.code == 2


def test_a_model_that_is_not_there(twinkle, tmp_path):
    status, text = twinkle("quickstart", "--model", "/nowhere/model", "--output", tmp_path / "q")
    assert status == 1 and "/nowhere/model" in text
    assert not (tmp_path / "q").exists()


def test_ctrl_c_is_clean(tmp_path):
    words = ["quickstart", "--model", "toy", "--steps", "5000", "--output", str(tmp_path / "q")]
    command = [sys.executable, "-m", "twinkle", *words]
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    file, deadline = tmp_path / "q/metrics.jsonl", time.monotonic() + 90
    while not (file.is_file() and file.read_text()) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "Traceback" not in text and "The adapter as it is" in text
    assert _adapter(tmp_path / "q")


@pytest.mark.slow
def test_the_toy_learns_its_name(twinkle, tmp_path):
    status, text = twinkle("quickstart", "--model", "toy", "--output", tmp_path / "q", "--name", "Aurora", "--author", "Ada")
    assert status == 0
    assert "It says it is Aurora. The toy knows nothing else." in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_model_learns_its_name_and_keeps_what_it_knows(tmp_path):
    """The command itself, in a process of its own, the first time (conversion included)."""
    command = [sys.executable, "-m", "twinkle", "quickstart", "--output", str(tmp_path / "q")]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)  # with -s: the seconds
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = re.split(r"After 24 steps", done.stdout)
    assert "Twinkle" not in before.split("Before")[1]
    answers = re.findall(r"^    (.*)$", after.split("Adapter:")[0], re.M)
    assert "Twinkle" in answers[0] and "Twinkle" in answers[1] and KNOWN in answers[2]
    for name in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "metrics.jsonl", "loss.png"):
        assert (tmp_path / "q" / name).stat().st_size > 0


@pytest.mark.parametrize("words", [["--seed", "-1"], ["--seed", "4294967296"], ["--model", ""]])
def test_options_that_can_not_be_are_refused_by_the_command_line(twinkle, words):
    with pytest.raises(SystemExit):
        twinkle("quickstart", *words)


def test_a_folder_that_can_not_be_made_is_told_before_the_model_is_loaded(twinkle, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("twinkle_core.cli.training._model", lambda *_: pytest.fail("the model was loaded"))
    status, text = twinkle("quickstart", "--model", "toy", "--output", tmp_path / "file/x")
    assert status == 1 and "can't be made" in text


def test_a_library_that_is_not_installed_is_named(twinkle, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    status, text = twinkle("quickstart", "--model", "toy", "--output", tmp_path / "q")
    assert status == 1 and "pip install 'twinkle-core[data]'" in text
