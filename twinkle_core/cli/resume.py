"""What a checkpoint's folder tells a run that is to go on from it, before data and model are loaded (L0 at import)."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core import errors
from twinkle_core.cli import checkpoints, planning, quickstart_model, run_files
from twinkle_core.config.schema import Component, TrainConfig

if TYPE_CHECKING:
    from twinkle_core.train.checkpoint import TrainerState

_WEIGHTS_ALONE = "For a new start from these weights alone give adapter.path (or model.id, where all weights were trained)"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run goes on. ``config``: the plan's, with the values that the checkpoint keeps: what the run really uses."""

    folder: Path
    step: int
    config: TrainConfig


def look(plan: planning.Plan, folder: Path, say: Callable[[str], None]) -> Start:
    """Check all that the folder tells, and say which values of the configuration the checkpoint overrules.

    The base model's own values tell only when it is loaded whether they are those that the adapter was trained on.

    Raises:
        CheckpointNotFound, CheckpointDamaged: a file is missing, cut short or changed. CheckpointMismatch: weights alone,
        another adapter, optimizer or scheduler. DataOrderChanged: another seed or shuffle.
    """
    from twinkle_core.train import checkpoint
    from twinkle_core.train.folder import STATE_FILE

    inside = checkpoints.all_of(folder)
    if inside and not (folder / STATE_FILE).is_file():
        why = f"the folder has no {STATE_FILE}; its newest checkpoint: --resume {inside[-1]}"
        raise errors.CheckpointNotFound(str(folder), why)
    state = checkpoint.inspect(folder, resume_only_model=True)  # without hashes of weights, which resuming compares
    if not state.resumable:
        raise errors.CheckpointMismatch(str(folder), f"it holds weights alone. {_WEIGHTS_ALONE}")
    _check_adapter(plan.config, folder, state)
    _tell_model(plan.config, folder, state, say)
    run_files.check_data_order(run_files.drawing(plan.config), folder)
    config = plan.config
    optimizer, scheduler = _stand_ins(plan)
    _check_class("optimizer", folder, state.optimizer, optimizer)
    _check_class("scheduler", folder, state.scheduler, scheduler)
    kept = {"optimizer": _of_optimizer(plan, optimizer, folder)}
    if scheduler is not None:
        kept["scheduler"] = _of_scheduler(plan, scheduler, folder)
    for kind, values in kept.items():
        part: Component = getattr(config, kind)
        for key, value in values.items():
            given = f"{key}={part.arguments[key]!r}" if key in part.arguments else f"the default {key}"
            where = plan.source.origin((kind, key)) if (kind, key) in plan.source.origins else kind
            say(f"{where}: {given} is not used; {folder.name} goes on with its own {value!r}. {_WEIGHTS_ALONE}.")
        if values:
            config = config.model_copy(update={kind: Component.model_validate({"cls": part.cls, **part.arguments, **values})})
    return Start(folder, checkpoints.step_of(folder, state.cur_step), config)


def _check_adapter(config: TrainConfig, folder: Path, state: TrainerState) -> None:
    """All weights or a LoRA, and of which rank."""
    holds = f"the adapter '{state.adapter_name}'" if state.adapter_name else "all weights of a model"
    if (config.adapter is None) != (not state.adapter_name):
        way = "give the adapter section that it had" if state.adapter_name else "train all weights: --adapter null"
        raise errors.CheckpointMismatch(str(folder), f"it holds {holds}; {way}")
    try:
        saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # a kind of adapter that keeps no such file
    rank = saved.get("r") if isinstance(saved, dict) else None
    if config.adapter is not None and config.adapter.path is None and rank not in (None, config.adapter.r):
        raise errors.CheckpointMismatch(str(folder), f"its adapter has r={rank}, and r={config.adapter.r} is asked for")


def _tell_model(config: TrainConfig, folder: Path, state: TrainerState, say: Callable[[str], None]) -> None:
    """Another name can be the same model, so it is no fault yet; where all weights were trained, the checkpoint has them."""
    before, now = state.engine.get("model_id"), config.model.id
    if isinstance(before, str) and now not in (before, quickstart_model.DEFAULT, quickstart_model.TOY):
        then = "its values are compared when it is loaded" if state.adapter_name else "all weights come from the checkpoint"
        say(f"{folder.name} was trained from the model {before}, and {now} is given: {then}")


def _check_class(part: str, folder: Path, saved: str | None, live: Any) -> None:
    here = None if live is None else type(live).__name__
    if saved != here:
        has = f"the state of the {part} {saved}" if saved else f"no state of a {part}"
        why = f"it holds {has}, and {here or f'no {part}'} is asked for. {_WEIGHTS_ALONE}"
        raise errors.CheckpointMismatch(str(folder / f"{part}.json"), why)


def _stand_ins(plan: planning.Plan) -> tuple[Any, Any]:
    """The optimizer and the scheduler over a parameter of no importance."""
    optimizer = planning.stand_in_optimizer(plan.classes["optimizer"], plan.config.optimizer.arguments)
    if plan.config.scheduler is None:
        return optimizer, None
    cls = plan.classes["scheduler"]
    return optimizer, cls(optimizer, **planning.with_lengths(cls, plan.config.scheduler.arguments, planning.LONG))


def _of_optimizer(plan: planning.Plan, live: Any, folder: Path) -> dict[str, Any]:
    """Arguments whose values in the checkpoint are others. A learning rate that a schedule moves is compared where it began."""
    from twinkle_core.train.optim import HOW
    from twinkle_core.train.plain import to_plain

    here, saved = live.param_groups[0], _read(folder / "optimizer.json")["groups"][0]
    moved = {"momentum", "betas"} if "max_momentum" in here else set()  # by a schedule that moves momenta too
    left_out = {"params", *HOW} | moved
    found = {}
    for key in (_takes(plan.classes["optimizer"]) & here.keys() & saved.keys()) - left_out:
        at = "initial_lr" if key == "lr" and "initial_lr" in here and "initial_lr" in saved else key
        if to_plain(here[at], f"'{key}' of the optimizer") != saved[at]:
            found[key] = saved[at]
    return dict(sorted(found.items()))


def _of_scheduler(plan: planning.Plan, live: Any, folder: Path) -> dict[str, Any]:
    """Arguments whose values in the checkpoint are others and count: all but a plan that the scheduler keeps (``plan``)."""
    here, saved = live.state_dict(), _read(folder / "scheduler.json")["state"]
    keys = _takes(plan.classes["scheduler"]) - {"optimizer", "last_epoch", *getattr(live, "plan", ())}
    plain = (bool, int, float, str, list, tuple, type(None))
    return {key: saved[key] for key in sorted(keys & here.keys() & saved.keys()) if _differ(here[key], saved[key], plain)}


def _differ(here: Any, saved: Any, plain: tuple[type, ...]) -> bool:
    return isinstance(here, plain) and (list(here) if isinstance(here, tuple) else here) != saved


def _takes(cls: Any) -> set[str]:
    return set(inspect.signature(cls).parameters)


def _read(path: Path) -> Mapping[str, Any]:
    """A file whose hash was found right."""
    if not path.is_file():
        raise errors.CheckpointDamaged(str(path), "it is missing")
    content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
