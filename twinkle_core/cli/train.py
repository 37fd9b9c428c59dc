"""``twinkle train CONFIG.yaml``: training from one file (L0 at import)."""

from __future__ import annotations

import argparse
import json

from twinkle_core import errors, plugins, settings
from twinkle_core.cli import checkpoints

_TEXT = """\
Training from one YAML file. All its faults are told at once, with their lines, before anything is loaded.

Task
  task: sft        conversations, of which the assistant's turns are trained (the default)
  task: pt         plain text, all of it trained, packed to template.max_length without padding
  task: dpo        pairs of a preferred and a refused answer; loss: simpo, cpo or orpo do without a reference
  task: embedding  groups of a text, one that belongs to it and some that do not, which preprocessor: triplet makes of rows

Override
  Every key can be set beside the file: --key value or --key=value, with dots for sections and numbers for items of lists:
  --optimizer.lr 1e-4 --training.max_steps 100 --dataset.slice 100 --adapter null

Resume
  --resume goes on from the newest checkpoint in output_dir, and begins at step 0 where there is none; --resume FOLDER goes
  on from that checkpoint. A run that is at its end is left as it is: raise training.max_steps or training.epochs.
  Rows, seed and shuffle must be those of the run. The checkpoint keeps its own optimizer and scheduler: where the
  configuration has other values, those that are not used are told. Weights are those of an unbroken run, bit for bit.

Several processes
  torchrun --nproc-per-node 2 -m twinkle train CONFIG.yaml
  Each batch is shared by them; mesh: says how (mesh: {fsdp_size: 2} lays the weights apart; nothing: each has them all). The
  first one writes and speaks for all. A checkpoint can be resumed by any number of processes.

Workers of a Ray cluster
  mode: ray puts the model on workers, as many as mesh: has ranks (workers: {device_type: CPU} on CPUs), here or on the cluster
  that RAY_ADDRESS names; this process drives them. output_dir must be a folder that the first worker sees too.

Written to output_dir
  checkpoint-N     weights and all that --resume needs: each training.save_steps, at the end, and where a signal stops it
  metrics.jsonl    a line each training.logging_steps, and one for each evaluation
  loss.png         the loss over the steps (needs matplotlib)
  config.yaml      what was really used, options included; twinkle train reads it
  data_order.json  what fixes which row comes when: a resumed run must have the same

Exit status
  0    trained, or nothing to do
  1    an error; its text is on stderr, and --traceback shows where it was raised
  2    a command line that can't be read
  130  stopped by Ctrl-C, 143 by SIGTERM: after the running step, with a checkpoint; a second Ctrl-C stops at once, without
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
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="see --schema, and the YAML files of the cookbook")
    # declared for the help; what follows CONFIG.yaml is read by config.load.options
    parser.add_argument("--resume", nargs="?", const=checkpoints.AUTO, metavar="FOLDER", help="go on; see above")
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

    from twinkle_core.cli import planning, training
    from twinkle_core.cli.quiet import quiet

    plan = planning.make(config, source, resume)
    plugins.hooks().twinkle_configure(config=plan.config)
    if resume is not None and plan.resume is None and plan.first:
        print(f"{plan.output_dir} holds no checkpoint: the run begins at step 0")
    with quiet():
        return training.run(plan)
