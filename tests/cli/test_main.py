"""The command line itself."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from twinkle_core import hookimpl, plugins
from twinkle_core.cli import main as program
from twinkle_core.cli import streams
from twinkle_core.errors import UnknownCommand
from twinkle_core.version import __version__


def test_help_lists_the_commands(capsys):
    assert program.main([]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in program.COMMANDS)
    with pytest.raises(SystemExit) as end:
        program.main(["--help"])
    assert end.value.code == 0


def test_version(capsys):
    assert program.main(["--version"]) == 0
    assert capsys.readouterr().out == f"twinkle {__version__}\n"


def test_an_unknown_command_is_answered_with_the_near_one(capsys):
    assert program.main(["plugns"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("UnknownCommand: unknown command 'plugns'. Did you mean 'plugins'?\n    commands: ")
    with pytest.raises(UnknownCommand):
        program.main(["plugns", "--traceback"])


def test_an_error_is_its_text(capsys):
    assert program.main(["show", "loss/cros_entropy"]) == 1
    assert capsys.readouterr().err.startswith("UnknownName: unknown loss 'cros_entropy'. Did you mean 'cross_entropy'?")


def test_ctrl_c_is_no_traceback(monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "_run", interrupted)
    assert program.main(["doctor"]) == 130


def test_a_plugin_adds_a_command(capsys):
    class Commands:
        @hookimpl
        def twinkle_register_commands(self, subparsers):
            parser = subparsers.add_parser("greet", help="says hello")
            parser.add_argument("--name", default="you")
            parser.set_defaults(run=lambda args: print(f"hello {args.name}") or 7)

    plugins.register(Commands(), "greeter")
    try:
        assert program.main(["greet", "--name", "Ann"]) == 7
        assert capsys.readouterr().out == "hello Ann\n"
        program.main([])
        assert "says hello" in capsys.readouterr().out
        assert program.main(["gret"]) == 1
        assert "Did you mean 'greet'" in capsys.readouterr().err
    finally:
        plugins.unregister("greeter")


def test_a_command_that_cannot_be_added_is_a_warning_and_the_others_are_there(capsys, caplog):
    class Twice:
        @hookimpl
        def twinkle_register_commands(self, subparsers):
            subparsers.add_parser("train")  # twinkle's own

    class Good:
        @hookimpl
        def twinkle_register_commands(self, subparsers):
            subparsers.add_parser("greet").set_defaults(run=lambda args: 7)

    with plugins.listening(Good(), Twice()):
        assert program.main(["greet"]) == 7
    assert "listener 'Twice' of this process failed in twinkle_register_commands" in caplog.text


def test_it_runs_as_a_module_too():
    done = subprocess.run([sys.executable, "-m", "twinkle", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"twinkle {__version__}\n"


def test_a_reader_that_left_is_no_error():
    command = f"{sys.executable} -m twinkle plugins | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def command(*words, **environment):
    """The start of a process, for ``subprocess``."""
    return {"args": [sys.executable, "-m", "twinkle", *words], "env": os.environ | environment, "check": False}


def test_what_the_encoding_lacks_is_written_as_its_number():
    done = subprocess.run(**command("show", "loss/\u00e9\U0001f600", PYTHONIOENCODING="ascii"), capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("UnknownName: unknown loss '\\xe9\\U0001f600'.")
    done = subprocess.run(**command("new", "loss", os.fsdecode(b"\xff")), capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("BadPluginName: ")


def test_a_stream_with_a_narrow_encoding_is_put_back(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict", line_buffering=False)
    monkeypatch.setattr(sys, "stdout", out)
    with streams.ready():
        print("\u00e9 \udcff")
        assert out.buffer.getvalue() == b"\\xe9 \\udcff\n"  # out at once, too
    assert (out.errors, out.line_buffering) == ("strict", False)


@pytest.mark.parametrize("words", [("plugins",), ("plugins", "--json"), ("--version",), ("show", "loss/mse")])
def test_a_full_disk_under_stdout_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(**command(*words), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "the output can't be written: No space left on device\n")


def test_an_error_of_the_system_that_is_not_stdouts_is_raised(monkeypatch, capsys):
    def fails(arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program, "_run", fails)
    with pytest.raises(OSError, match="No space"):
        program.main(["doctor"])


@pytest.mark.parametrize(("closed", "status"), [(">&-", 0), ("2>&-", 0), (">&- 2>&-", 0)])
def test_closed_streams_are_no_error(closed, status):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m twinkle plugins {closed}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (status, "")


def test_an_error_goes_nowhere_where_stderr_is_closed():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m twinkle show loss/no 2>&-"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
