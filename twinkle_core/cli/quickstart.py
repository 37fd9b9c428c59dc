"""``twinkle quickstart``: a small language model learns its name, here and now (L0 at import)."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core import settings
from twinkle_core.cli import checkpoints, planning, plot, quickstart_model, training
from twinkle_core.cli.quickstart_program import program
from twinkle_core.cli.quiet import quiet
from twinkle_core.config.schema import TrainConfig
from twinkle_core.listeners import jsonl

if TYPE_CHECKING:
    from twinkle_core.contracts.model import TwinkleModel

WHO, WHO_CHINESE, KNOWLEDGE, KNOWN = "Who are you?", "你是谁？", "What is the capital of France?", "Paris"
ADAPTER = "adapter"  # the folder of what was trained


@dataclass(frozen=True, slots=True)
class Recipe:
    """What works for a model: found by trying, on several seeds and names."""

    lr: float
    rank: int
    batch_size: int
    steps: int | None  # None: once over the data


#: A real model needs a nudge; the toy begins with random weights and has all to learn.
REAL = Recipe(lr=1.5e-3, rank=8, batch_size=4, steps=None)
TOY = Recipe(lr=1.5e-3, rank=64, batch_size=8, steps=240)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "quickstart",
        help="watch a small language model learn, here and now",
        description="Ask a small model who it is, train a LoRA on the spot, and ask again. No network is used.",
    )
    unset = "default: what suits the model"
    parser.add_argument("--model", type=_text, help="ms://…, hf://…, a folder, or 'toy'; default: SmolLM2-135M-Instruct")
    parser.add_argument("--name", type=_text, default="Twinkle", help="what the model is to call itself (%(default)s)")
    parser.add_argument("--author", type=_text, default="the Twinkle team", help="who it is to say made it (%(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("quickstart-output"),
        help="folder to write to (%(default)s); FOLDER-2 where it holds a run",
    )
    parser.add_argument("--seed", type=_seed, default=42, help="the same seed gives the same weights (%(default)s)")
    parser.add_argument("--steps", type=_count, help=f"updates of the weights; {unset}")
    parser.add_argument("--batch-size", type=_count, help=f"rows of a step; {unset}")
    parser.add_argument("--lr", type=float, help=f"learning rate; {unset}")
    parser.add_argument("--rank", type=_count, help=f"rank of the LoRA; {unset}")
    parser.set_defaults(run=run)


def _text(value: str) -> str:
    if not value.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return value


def _count(value: str) -> int:
    if not value.isdigit() or int(value) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, not {value!r}")
    return int(value)


def _seed(value: str) -> int:
    if not value.isdecimal() or int(value) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {2**32 - 1}, not {value!r}")
    return int(value)


def run(args: argparse.Namespace) -> int:
    """The whole show.

    Returns:
        0 when the model learnt its name and kept its knowledge (the toy has none), 1 when not, 130 after Ctrl-C.
    """
    began = time.perf_counter()
    settings.wait_passively()
    output = free_folder(args.output)
    if output != args.output:
        print(f"{args.output} holds an earlier run, which is kept; this one writes to {output}")
    choice = quickstart_model.choose(args.model)
    precision = _precision()
    plan = planning.make(TrainConfig.model_validate(_config(args, choice, precision, output)))
    print(f"Model: {choice.title}")
    questions = [WHO, WHO_CHINESE, KNOWLEDGE]
    with quiet(bars=False):
        current = training.prepare(plan)
        before = ask(current.model, questions)
    print(f"\nBefore\n{_dialogue(questions, before)}\n")
    status = training.loop(current, at_end=lambda: training.save(current, ADAPTER, resumable=False))
    adapter = plan.output_dir / ADAPTER
    if status:
        print(f"\nStopped after step {current.step} of {current.total}. The adapter as it is: {adapter}")
        return status
    after = ask(current.model, questions)
    print(f"\nAfter {current.total} steps\n{_dialogue(questions, after)}\n")
    _leave(plan, choice, adapter)
    seconds = time.perf_counter() - began
    lines = program(plan.config, choice.id, current.total, len(current.loader))
    count = len([line for line in lines if line and not line.startswith(("import ", "from "))])
    print(f"\nThe same in {count} lines of Python and their imports:\n\n" + "\n".join(f"    {line}" for line in lines) + "\n")
    return _verdict(args.name, after, choice, seconds)


def ask(model: TwinkleModel, questions: Sequence[str]) -> list[str]:
    """The model's most likely answers (greedy), without what it was asked."""
    conversations: list[Any] = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    return [text.strip() for text in model.generate(conversations, max_new_tokens=40, do_sample=False)]


def free_folder(given: Path) -> Path:
    """``given``, or the first of ``given-2``, ``given-3``, ... that holds no run: none is written over."""
    folders = (given if number == 1 else given.with_name(f"{given.name}-{number}") for number in itertools.count(1))
    return next(folder for folder in folders if not _holds_a_run(folder))


def _holds_a_run(folder: Path) -> bool:
    return bool(checkpoints.all_of(folder)) or any((folder / name).exists() for name in (ADAPTER, training.METRICS))


def _precision() -> str:
    """bf16 on an accelerator that computes in it; fp32 else: without such units bf16 is several times slower."""
    import torch

    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"


def _config(args: argparse.Namespace, choice: quickstart_model.Choice, precision: str, output: Path) -> dict[str, Any]:
    """The run as a configuration of ``twinkle train``."""
    recipe = TOY if choice.toy else REAL
    rank = args.rank or recipe.rank
    return {
        "model": {"id": choice.id, "mixed_precision": precision},
        "adapter": {"r": rank, "lora_alpha": 2 * rank},
        "dataset": [
            {
                "id": "bundled://self-cognition",
                "preprocessor": {"cls": "self_cognition", "model_name": args.name, "model_author": args.author},
            }
        ],
        "dataloader": {"batch_size": args.batch_size or recipe.batch_size},
        "optimizer": {"cls": "adamw", "lr": recipe.lr if args.lr is None else args.lr},
        "scheduler": {"cls": "cosine_warmup", "num_warmup_steps": 0},
        "training": {"seed": args.seed, "max_steps": args.steps or recipe.steps},
        "output_dir": str(output),
    }


def _dialogue(questions: Sequence[str], answers: Sequence[str]) -> str:
    pairs = zip(questions, answers, strict=True)
    return "\n".join(f"  {question}\n    {' '.join(answer.split())}" for question, answer in pairs)


def _leave(plan: planning.Plan, choice: quickstart_model.Choice, adapter: Path) -> None:
    """Draw the loss and say where everything is."""
    metrics, picture = plan.output_dir / training.METRICS, plan.output_dir / "loss.png"
    missing = plot.draw(jsonl.read(metrics), picture, f"{choice.title} learns its name")
    print(f"Adapter:   {adapter}\nMetrics:   {metrics}\nLoss plot: {f'none: {missing}' if missing else picture}")


def _verdict(name: str, after: Sequence[str], choice: quickstart_model.Choice, seconds: float) -> int:
    learnt, kept = name.casefold() in after[0].casefold(), KNOWN in after[2]
    print(f"{seconds:.0f} seconds in all. ", end="")
    print(f"It says it is {name}." if learnt else f"It has NOT learnt that it is {name}: try --steps or --lr.", end=" ")
    if choice.toy:
        print("The toy knows nothing else.")
        return 0 if learnt else 1
    print(f"It still knows {KNOWN}." if kept else f"It has FORGOTTEN {KNOWN}: try a lower --lr or fewer --steps.")
    return 0 if learnt and kept else 1
