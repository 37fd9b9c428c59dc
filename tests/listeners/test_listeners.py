"""The metrics file and the progress bar, as listeners to real training."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from twinkle.listener import JsonLinesWriter, ProgressBar, listening
from twinkle_core import plugins
from twinkle_core.listeners import jsonl
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM, random_rows

ROWS = random_rows([4, 6, 3])


def model(*metrics, steps=0):
    built = session_model(TinyLM())
    built.set_optimizer("adamw", lr=1e-2)
    for metric in metrics or ("loss", "train"):
        built.add_metric(metric)
    return built


def train(built, steps):
    """The numbers of each step, as ``calculate_metric`` gave them."""
    numbers = []
    for _ in range(steps):
        built.forward_backward(ROWS)
        built.clip_grad_and_step()
        numbers.append(built.calculate_metric())
    return numbers


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def tell(metrics, step=1, name="", is_training=True):
    plugins.hooks().twinkle_metrics_logged(
        step=step, metrics=metrics, session=SimpleNamespace(name=name), is_training=is_training
    )


def test_lines_are_what_was_read(tmp_path):
    path, built = tmp_path / "new/metrics.jsonl", model()
    with listening(JsonLinesWriter(path, more=lambda: {"epoch": 0.5})):
        numbers = train(built, 3)
        assert built.calculate_metric() == {}  # nothing was gathered: no line
        built.forward_only(ROWS)
        evaluation = built.calculate_metric(is_training=False)
    train(built, 1)  # not heard any more
    rows = lines(path)
    assert [row["seconds"] for row in rows] == sorted(row.pop("seconds") for row in rows)
    assert rows[:3] == [{"step": i + 1, "epoch": 0.5, **found} for i, found in enumerate(numbers)]
    assert rows[3:] == [{"step": 3, "epoch": 0.5, "eval_loss": evaluation["loss"]}]
    assert {"loss", "lr", "grad_norm", "tokens_per_second"} <= set(rows[2])


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with listening(JsonLinesWriter(tmp_path / "m.jsonl")):
        tell({"loss": math.nan, "norm": math.inf, "lr": 1e-3})
    (row,) = lines(tmp_path / "m.jsonl")
    assert row["loss"] is None and row["norm"] is None and row["lr"] == 1e-3


def test_a_resumed_run_drops_the_lines_of_steps_that_it_does_again(tmp_path):
    path = tmp_path / "m.jsonl"
    with listening(JsonLinesWriter(path)):
        for step in range(1, 5):
            tell({"loss": step}, step)
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # cut short by a crash
    with listening(JsonLinesWriter(path, done=2)):
        tell({"loss": 33}, 3)
    assert [(row["step"], row["loss"]) for row in jsonl.read(path)] == [(1, 1), (2, 2), (3, 33)]
    JsonLinesWriter(path)
    assert jsonl.read(path) == [] == jsonl.read(tmp_path / "none")


def test_seconds_go_on_where_a_resumed_run_goes_on(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "seconds": 100.0}\n{"step": 2, "seconds": 200.0}\n{"step": 3, "seconds": 300.0}\n')
    with listening(JsonLinesWriter(path, done=2)):
        tell({"loss": 1.0}, 3)
    assert 200 <= lines(path)[-1]["seconds"] < 260
    with listening(JsonLinesWriter(path)):
        tell({"loss": 1.0}, 1)
    assert lines(path)[-1]["seconds"] < 60


def test_one_adapter_of_several(tmp_path):
    with listening(JsonLinesWriter(tmp_path / "a.jsonl", adapter_name="a"), JsonLinesWriter(tmp_path / "all.jsonl")):
        for name in ("a", "b", ""):
            tell({"loss": 1.0}, name=name)
    assert (len(lines(tmp_path / "a.jsonl")), len(lines(tmp_path / "all.jsonl"))) == (1, 3)


@pytest.mark.parametrize("tty", [True, False])
def test_rank_0_alone_writes_and_draws(tmp_path, monkeypatch, capsys, tty):
    monkeypatch.setattr("sys.stderr.isatty", lambda: tty)
    monkeypatch.setenv("RANK", "1")
    with listening(JsonLinesWriter(tmp_path / "x/m.jsonl"), ProgressBar(total=2)):
        train(model(), 2)
    assert not (tmp_path / "x").exists()
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_a_warning_and_training_goes_on(tmp_path, caplog):
    path, built = tmp_path / "m.jsonl", model()
    with listening(JsonLinesWriter(path)):
        path.unlink()
        path.mkdir()
        assert len(train(built, 3)) == 3
    assert [r.getMessage() for r in caplog.records if "JsonLinesWriter" in r.getMessage()] == [
        f"listener 'JsonLinesWriter' of this process failed in twinkle_metrics_logged: "
        f"IsADirectoryError: [Errno 21] Is a directory: '{path}'"
    ]


def test_a_file_that_cannot_be_written_is_told_before_training(tmp_path):
    (tmp_path / "m.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        JsonLinesWriter(tmp_path / "m.jsonl")


def test_where_there_is_no_terminal_progress_is_a_line_now_and_then(capsys, monkeypatch):
    built = model()
    with listening(ProgressBar(total=5)):
        numbers = train(built, 5)
    written = capsys.readouterr()
    assert "\r" not in written.err and written.out == ""
    first, last = written.err.splitlines()
    assert first == f"step 1 of 5: loss={numbers[0]['loss']:.3f}, lr=1.0e-02"
    assert last.startswith(f"step 5 of 5: loss={numbers[4]['loss']:.3f}, lr=1.0e-02, tok/s=")
    monkeypatch.setattr(ProgressBar, "every", 0.0)
    with listening(ProgressBar()):
        train(built, 3)
    assert [line[: line.index(":")] for line in capsys.readouterr().err.splitlines()] == ["step 1", "step 2", "step 3"]


def test_the_bar_shows_what_was_read(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    built = model()
    with listening(ProgressBar(total=6, done=1)):
        numbers = train(built, 4)
        built.forward_only(ROWS)
        evaluation = built.calculate_metric(is_training=False)
    drawn = capsys.readouterr().err.replace("\r", "\n").splitlines()
    last = drawn[-1]
    assert "5/6" in last and "lr=1.0e-02" in last
    assert f"loss={numbers[-1]['loss']:.3f}" in last and f"eval_loss={evaluation['loss']:.3f}" in last
    assert f"tok/s={numbers[-1]['tokens_per_second']:.0f}" in last
    assert last.index(" loss=") < last.index("lr=")
    assert any("1/6" in line for line in drawn)  # drawn before the first step
    assert train(built, 1) and capsys.readouterr().err == ""  # its block is over


def test_windows_that_were_skipped_count_too(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    built = model()
    with listening(ProgressBar(total=2)):
        built.forward_backward([{"input_ids": [1, 2], "labels": [-100, -100]}])
        built.clip_grad_and_step()
        train(built, 1)
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize("tty", [True, False])
def test_a_bar_that_is_not_to_be_shown(capsys, monkeypatch, tty):
    monkeypatch.setattr("sys.stderr.isatty", lambda: tty)
    with listening(ProgressBar(total=2, shown=False)):
        train(model(), 2)
    assert capsys.readouterr().err == ""


def test_lines_end_at_line_feeds_alone(tmp_path):
    path, text = tmp_path / "m.jsonl", "a\u2028b\u0085c\u2029d\x0b\x0c\x1e"
    with listening(JsonLinesWriter(path, more=lambda: {"text": text})):
        for step in (1, 2):
            tell({"loss": 1.0}, step)
    before = path.read_bytes()
    assert [row["text"] for row in jsonl.read(path)] == [text] * 2
    JsonLinesWriter(path, done=2)
    assert path.read_bytes() == before


def test_lines_that_cannot_be_read_hide_no_others_and_stay(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    odd = [b"{broken", b"[1, 2]", b"7", b"\xff\xfe\x00", b'{"step": "x"}', b"[" * 100_000]
    good = [b'{"step": 1, "loss": 1.0}', b'{"step":2,  "loss": NaN}']
    path.write_bytes(b"\n".join([good[0], *odd, good[1], b'{"step": 3}', b'{"step": 2']))
    assert [row["step"] for row in jsonl.read(path)] == [1, "x", 2, 3]
    assert caplog.messages == [f"{path}: not a JSON object in line 2, 3, 4, 5, 7; left as it is"]
    JsonLinesWriter(path, done=2)
    assert path.read_bytes() == b"\n".join([good[0], *odd, good[1], b""])


def test_a_last_line_that_lacks_but_its_end_counts(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    JsonLinesWriter(path, done=2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_numbers_within_are_null_too_where_they_are_not_finite(tmp_path):
    more = {"list": [1.0, math.inf, (math.nan,)], "map": {"a": -math.inf, "b": "NaN"}}
    with listening(JsonLinesWriter(tmp_path / "m.jsonl", more=lambda: more)):
        tell({"loss": 1.0})
    assert "NaN," not in (text := (tmp_path / "m.jsonl").read_text()) and "Infinity" not in text
    (row,) = lines(tmp_path / "m.jsonl")
    assert row["list"] == [1.0, None, [None]] and row["map"] == {"a": None, "b": "NaN"}
