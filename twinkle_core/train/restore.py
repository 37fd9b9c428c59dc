"""A checkpoint's training state: read and checked against a session, then set (L2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from twinkle_core.errors import CheckpointMismatch
from twinkle_core.log import get_logger
from twinkle_core.ops.sharded import like
from twinkle_core.train import differences, rng, shards
from twinkle_core.train.checkpoint import TrainerState, data_of, reading
from twinkle_core.train.plain import from_plain
from twinkle_core.train.session import Session

if TYPE_CHECKING:
    from twinkle_core.train.sessions import Sessions


@dataclass(slots=True)
class Loaded:
    """A checkpoint's training state, read and checked against a session; nothing has been changed yet."""

    state: TrainerState
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    adapter: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    rng_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # where the session was set up otherwise


def read(model: Sessions, session: Session, folder: Path, state: TrainerState) -> Loaded:
    """Read and check all that ``apply`` will set.

    Raises:
        CheckpointMismatch: another model, optimizer or scheduler.
    """
    loaded = Loaded(state)
    parameters = model._named(session)
    source = str(folder / "optimizer.json")
    _same("optimizer", source, state.optimizer, session.optimizer, "set_optimizer")
    _same("scheduler", str(folder / "scheduler.json"), state.scheduler, session.scheduler, "set_lr_scheduler")
    if session.optimizer is not None:
        with reading(folder, "optimizer.json"):
            tensors, data = _tensors(folder, "optimizer", parameters), data_of(folder, "optimizer")
            loaded.optimizer = model.engine.prepare_optimizer_state(session.optimizer, parameters, tensors, data, folder)
            loaded.notes += differences.of_optimizer(session.optimizer, data["groups"])
    if session.scheduler is not None:
        with reading(folder, "scheduler.json"):
            scheduler = from_plain(data_of(folder, "scheduler")["state"], session.scheduler.state_dict())
            loaded.notes += differences.of_scheduler(session.scheduler, scheduler)
            loaded.scheduler = scheduler
    if "adapter.json" in state.files:
        with reading(folder, "adapter.json"):
            loaded.adapter = from_plain(data_of(folder, "adapter"))
    with reading(folder, "engine.json"):
        loaded.engine = from_plain(data_of(folder, "engine")) | _tensors(folder, "engine")
    with reading(folder, "gradients.safetensors"):
        loaded.gradients = _tensors(folder, "gradients", parameters)
    for name, gradient in loaded.gradients.items():
        if name not in parameters or parameters[name].shape != gradient.shape:
            source = str(folder / "gradients.safetensors")
            raise CheckpointMismatch(source, f"parameter {name} is not here, or of another shape")
    with reading(folder, "rng.json"):
        mesh = model.engine.mesh
        rank = mesh.rank if mesh.world_size > 1 else 0
        mine = rng.of_rank(_tensors(folder, "rng"), data_of(folder, "rng"), rank, mesh.streams[rank])
        if mine is None:
            loaded.notes.append(f"it holds no random state of rank {rank}: this rank draws on from its own")
            mine = rng.capture()
        loaded.rng_tensors, loaded.rng = mine
        rng.check(loaded.rng_tensors, loaded.rng)
    is_open = state.window.count > 0 and not {"step", "zero_grad"} & set(state.window.acted)
    loaded.notes += differences.of_window(session.window.size, state.window.size, is_open)
    return loaded


def _same(part: str, source: str, saved: str | None, live: Any, verb: str) -> None:
    here = None if live is None else type(live).__name__
    if saved == here:
        return
    if here is None:
        why = f"it holds the state of the {part} {saved}, and none is set; call {verb}(...) first"
    elif saved is None:
        why = f"it holds no {part} state, and {here} is set"
    else:
        why = f"it holds the state of {saved}, and the {part} here is {here}"
    raise CheckpointMismatch(source, f"{why} (or load the weights alone: resume_only_model=True)")


def _tensors(folder: Path, stem: str, parameters: Mapping[str, torch.Tensor] = MappingProxyType({})) -> dict[str, torch.Tensor]:
    """What a part of a checkpoint holds; where that is in shards, this rank's share, cut as the parameters are."""
    path, apart = folder / f"{stem}.safetensors", shards.place(folder, stem)
    if not apart.is_dir():
        return load_file(path) if path.is_file() else {}
    owner = {key: key.rpartition("/")[2] for key in shards.describe(apart)}
    return shards.read(apart, {key: parameters[name] for key, name in owner.items() if name in parameters})


def apply(model: Sessions, session: Session, loaded: Loaded) -> None:
    """Set everything but the weights. Sets, never adds: twice is once. Random state comes last, so nothing draws after it."""
    state = loaded.state
    if session.optimizer is not None:
        assert loaded.optimizer is not None
        session.optimizer.load_state_dict(loaded.optimizer)
        # torch notes on the optimizer that it has stepped, and warns about an lr_step before that; this one did, elsewhere
        session.optimizer._opt_called = state.cur_step > 0  # type: ignore[attr-defined]
    if session.scheduler is not None:
        session.scheduler.load_state_dict(loaded.scheduler)
    model.adapters.load_training_state(session.name, loaded.adapter)
    model.engine.load_state_dict(loaded.engine)
    rescale = model.engine.loss_scale() / state.gradient_scale  # 1 unless the precision is another
    parameters, gradients = model._named(session), {}
    for name, gradient in loaded.gradients.items():
        gradient = like(gradient, parameters[name]).to(parameters[name].device, parameters[name].dtype)
        gradients[name] = gradient if rescale == 1 else gradient.mul_(rescale)
    model.engine.set_window_gradients(parameters, gradients)
    size = session.window.size
    session.window.load_state_dict(state.window.model_dump())
    if session.window.open and model.engine.mesh.data_rank:
        session.window.weight = 0  # it is that of all ranks, and they are added up at the end
    if size is not None and (not session.window.open or session.window.size is None):
        session.window.size = size
    session.cur_step, session.skipped_steps = state.cur_step, state.skipped_steps
    session.optimizer_age = state.cur_step
    session.consumed_train_samples = state.consumed_train_samples
    for note in loaded.notes:
        get_logger().warning(note)
    rng.restore(loaded.rng_tensors, loaded.rng)
