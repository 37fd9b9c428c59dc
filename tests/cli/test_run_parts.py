"""The picture of the loss; signals; folders of checkpoints."""

from __future__ import annotations

import builtins
import signal
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from twinkle_core import errors
from twinkle_core.cli import checkpoints, plot, resume
from twinkle_core.cli.interrupts import Interrupts


def test_plot_or_the_reason_why_not(tmp_path, monkeypatch):
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 1.0, "eval_loss": 1.5}]
    assert plot.draw(rows, tmp_path / "loss.png", "t") is None
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert plot.draw([{"step": 1}], tmp_path / "no.png", "t") == "no loss was logged"
    imports = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imports(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert plot.draw(rows, tmp_path / "no.png", "t") == "matplotlib is not installed (pip install matplotlib)"
    assert not (tmp_path / "no.png").exists()


@pytest.mark.parametrize(("adapter", "then"), [("default", "its values are compared"), ("", "all weights come")])
def test_a_resumed_run_says_what_becomes_of_another_model(adapter, then):
    """Where all weights were trained, nothing of the named model is left to compare."""
    said = []
    config = SimpleNamespace(model=SimpleNamespace(id="there/new"))
    state = SimpleNamespace(engine={"model_id": "there/old"}, adapter_name=adapter)
    resume._tell_model(config, Path("checkpoint-2"), state, said.append)
    assert said[0].startswith(f"checkpoint-2 was trained from the model there/old, and there/new is given: {then}")
    config.model.id = "there/old"
    resume._tell_model(config, Path("checkpoint-2"), state, said.append)
    assert len(said) == 1


def test_the_plot_has_a_title_and_a_running_mean(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    rows = [{"step": n, "loss": float(n % 7)} for n in range(1, 61)]
    assert plot.draw(rows, tmp_path / "loss.png", "tiny on rows") is None
    (axes,) = figures[0].axes
    raw, mean = axes.get_lines()
    assert axes.get_title() == "tiny on rows" and mean.get_label() == "loss, mean of 6 logged"
    values = [row["loss"] for row in rows]
    assert list(raw.get_ydata()) == values and raw.get_alpha() < 1
    assert list(mean.get_ydata()) == [pytest.approx(statistics.fmean(values[max(0, n - 5) : n + 1])) for n in range(60)]
    assert plot.running_mean([1.0] * 19) == (None, 1)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_noted_and_the_handlers_are_put_back(number, status, capsys):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts("noted") as interrupts:
        assert interrupts.exit_status == 0
        signal.raise_signal(number)
        assert interrupts.received == number
        signal.raise_signal(signal.SIGTERM)  # a second SIGTERM is patient
    assert interrupts.exit_status == status
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert capsys.readouterr().out.count("noted") == 1


def test_a_second_ctrl_c_stops_at_once_and_puts_the_handlers_back():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert interrupts.received == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) == before


def test_checkpoints_are_ordered_by_step_and_the_oldest_go(tmp_path):
    for step in (10, 9, 100):
        (tmp_path / checkpoints.name_of(step)).mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    (tmp_path / "checkpoint-x").mkdir()
    assert [p.name for p in checkpoints.all_of(tmp_path)] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    assert checkpoints.to_resume("auto", tmp_path) == tmp_path / "checkpoint-100"
    assert checkpoints.rotate(tmp_path, None) == []
    assert [p.name for p in checkpoints.rotate(tmp_path, 1)] == ["checkpoint-9", "checkpoint-10"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-100", "checkpoint-11", "checkpoint-x"]
    assert checkpoints.all_of(tmp_path / "none") == [] and checkpoints.to_resume(None, tmp_path / "none") is None
    with pytest.raises(errors.OutputInUse, match="checkpoint-100"):
        checkpoints.to_resume(None, tmp_path)
    with pytest.raises(errors.NoCheckpoint):
        checkpoints.to_resume(str(tmp_path / "none"), tmp_path)
    assert checkpoints.step_of(tmp_path / "checkpoint-7", 3) == 7 and checkpoints.step_of(tmp_path / "best", 3) == 3
