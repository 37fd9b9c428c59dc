"""``twinkle train CONFIG.yaml``: supervised fine-tuning from one file (L0 at import)."""

from __future__ import annotations

import argparse
import json

from twinkle_core import errors, plugins, settings
from twinkle_core.cli import checkpoints

_TEXT = """\
Train from one YAML file. Every key can be set beside it: --key value or --key=value, with dots for sections
(--optimizer.lr 1e-4 --training.max_steps 100 --adapter null). All faults are told, with their lines, before anything is loaded.

Writes to output_dir: checkpoint-N (with save_steps, and at the end), metrics.jsonl, loss.png, config.yaml,
data_order.json (what fixes the order of the rows: a resumed run must have the same).
Ctrl-C and SIGTERM leave a checkpoint after the running step (exit status 130, 143); a second Ctrl-C stops at once.
A resumed run has the weights of an unbroken one, bit for bit.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "train",
        help="train from a YAML file",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="twinkle train CONFIG.yaml [--resume [FOLDER]] [--key value ...]\n       twinkle train --schema",
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of CONFIG.yaml and stop")
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="see --schema and cookbook/sft.yaml")
    # declared for the help; what follows CONFIG.yaml is read by config.load.options
    parser.add_argument("--resume", nargs="?", const=checkpoints.AUTO, metavar="FOLDER", help="go on; default: with the newest")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Train, or print the schema."""
    from twinkle_core.config.load import load, options

    given = options(args.rest)
    own = {key: value for key, value in given if key in ("resume", "schema", "help")}
    overrides = [(key, value) for key, value in given if key not in own]
    if "help" in own:
        args.parser.print_help()
        return 0
    if args.schema or "schema" in own:
        from twinkle_core.config.schema import TrainConfig

        print(json.dumps(TrainConfig.model_json_schema(), indent=2))
        return 0
    if args.config is None:
        raise errors.NoConfigGiven()
    settings.wait_passively()
    config, source = load(args.config, overrides)
    resume = (own["resume"] or checkpoints.AUTO) if "resume" in own else args.resume

    from twinkle_core.cli import sft, sft_plan
    from twinkle_core.cli.quiet import quiet

    plan = sft_plan.make(config, source, resume)
    plugins.hooks().twinkle_configure(config=config)
    if resume is not None and plan.resume is None:
        print(f"{plan.output_dir} holds no checkpoint: the run begins at step 0")
    with quiet():
        return sft.run(plan)
