"""The command ``twinkle`` (L0). A command is a module ``twinkle_core.cli.<name>``, imported when it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from twinkle_core.cli import streams
from twinkle_core.errors import TwinkleError, UnknownCommand
from twinkle_core.names import closest

#: command -> its line in the help
COMMANDS = {
    "quickstart": "watch a small language model learn, here and now",
    "train": "train from a YAML file",
    "plugins": "what is installed, and whether it works",
    "check": "an installed distribution, or a class, against the contracts",
    "show": "one component: its class, parameters and text",
    "new": "begin a plugin that works already",
    "doctor": "this machine, its libraries and settings",
}
INTERRUPTED = 130  # what shells use for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: arguments without the program's name; default those of the process.

    Returns:
        The exit status: 0, 1 after an error of twinkle's (its text is on stderr; ``--traceback`` raises it) or where stdout
        takes no more, 2 where a command was asked for what is not there, 130 after Ctrl-C.
    """
    with streams.ready():
        return _guarded(argv)


def _guarded(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in arguments
    arguments = [a for a in arguments if a != "--traceback"]
    try:
        status = _run(arguments)
        sys.stdout.flush()  # a reader that has gone is noticed here, not on the interpreter's way out
        return status
    except TwinkleError as error:
        if traceback:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has gone: nothing to tell anybody
        streams.give_up()
        return 0
    except OSError as error:
        if not streams.lost():  # not of what was printed
            raise
        streams.give_up()
        print(f"the output can't be written: {error.strerror or error}", file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="twinkle",
        description="Write the training loop once; everything in it is a component that anyone can publish.",
        epilog="--traceback shows where an error was raised.",
    )
    parser.add_argument("--version", action="store_true", help="show the version and stop")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    word = next((a for a in arguments if not a.startswith("-")), None)
    if word in COMMANDS:
        import_module(f"twinkle_core.cli.{word}").add_parser(subparsers)
    else:
        _all_commands(subparsers, word)
    args = parser.parse_args(arguments)
    if args.version:
        from twinkle_core.version import __version__

        print(f"twinkle {__version__}")
        return 0
    if "run" not in args:
        parser.print_help()
        return 0
    return int(args.run(args) or 0)


def _all_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], word: str | None) -> None:
    """For the help, or for a command that somebody else provides.

    Raises:
        UnknownCommand: nobody provides ``word``.
    """
    from twinkle_core import plugins
    from twinkle_core.cli.plugins import try_hook_modules

    for name, line in COMMANDS.items():
        subparsers.add_parser(name, help=line)
    if word is None:  # the help must come, whatever is installed
        for fault in try_hook_modules():
            print(fault, file=sys.stderr)
    plugins.hooks().twinkle_register_commands(subparsers=subparsers)
    if word is not None and word not in subparsers.choices:
        raise UnknownCommand(word, closest(word, subparsers.choices), subparsers.choices)


if __name__ == "__main__":
    sys.exit(main())
