"""Checkpoints: what is in the folder, and how it is verified before anything is loaded (L2).

======================  ==================================================================================
weights                 by the store: plain files that PEFT or the model's own library loads
trainer_state.json      :class:`TrainerState`; names, sizes and hashes of all other files
optimizer.safetensors   tensors of the optimizer's state under ``<state>/<parameter>``; ``optimizer.json`` the rest
scheduler.json          the scheduler's numbers
adapter.json            what a store keeps of the adapter beside its weights, if anything
engine.safetensors      tensors of the engine's state; ``engine.json`` the rest (the gradient scaler)
gradients.safetensors   the gradients of an open accumulation window, by parameter
rng.safetensors         random state of torch and devices; ``rng.json`` of Python and numpy
======================  ==================================================================================

Only the first two are there without ``save_optimizer``. No pickle is written or read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file, save_file

from twinkle_core import registry
from twinkle_core.contracts.adapters import BASE
from twinkle_core.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointUnfit,
    TwinkleError,
    WindowNotStepped,
)
from twinkle_core.log import get_logger
from twinkle_core.ops.sharded import whole
from twinkle_core.train import base_values, differences, rng
from twinkle_core.train.folder import STATE_FILE, recover, sha256
from twinkle_core.train.plain import from_plain, to_plain
from twinkle_core.train.session import Session
from twinkle_core.train.single import distinct
from twinkle_core.train.together import Failure, together
from twinkle_core.version import __version__

if TYPE_CHECKING:
    from twinkle_core.train.sessions import Sessions

SCHEMA = 1


class FileEntry(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", strict=True)
    size: int = Field(ge=0)
    sha256: str


class WindowState(BaseModel):
    """What ``AccumulationWindow.state_dict`` gives."""

    model_config = ConfigDict(extra="forbid", strict=True)
    size: int | None = Field(ge=1)
    count: int = Field(ge=0)
    weight: float = Field(ge=0, allow_inf_nan=False)
    acted: list[Literal["clip_grad_norm", "step", "zero_grad", "lr_step"]]
    closing: bool
    normalised: bool
    updated: bool


class TrainerState(BaseModel):
    """``trainer_state.json``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: int = SCHEMA
    twinkle_version: str
    adapter_name: str
    resumable: bool
    cur_step: int = Field(ge=0)
    consumed_train_samples: int = Field(ge=0)
    gradient_accumulation_steps: int | None = Field(ge=1)
    skipped_steps: int = Field(ge=0)
    window: WindowState
    gradient_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)  # of gradients.safetensors
    optimizer: str | None
    scheduler: str | None
    adapter: dict[str, Any]
    engine: dict[str, Any]
    mesh: str
    fingerprint: str
    base_sample: str | None = None  # of an adapter's base model, which the checkpoint does not hold
    plugins: list[dict[str, str]]
    files: dict[str, FileEntry]

    def progress(self) -> dict[str, Any]:
        """What ``load`` and ``resume_from_checkpoint`` return."""
        return {
            "cur_step": self.cur_step,
            "consumed_train_samples": self.consumed_train_samples,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }


def _described(value: Any) -> Any:
    """A description as JSON holds it; what it can't hold, as text."""
    if isinstance(value, Mapping):
        return {str(k): _described(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_described(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


# ---------------------------------------------------------------------------------------------------- writing


@dataclass(slots=True)
class Parts:
    """Everything beside the weights, gathered before a file is written: tensors and plain data by stem."""

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    resumable: bool = True
    base_sample: str | None = None


def gather(model: Sessions, session: Session, *, resumable: bool = True) -> Parts:
    """The training state of a session (``resumable`` False: what is kept with weights alone). Changes nothing. All ranks call
    it together: what lies apart is brought together, on the CPU.

    Raises:
        WindowNotStepped: gradients have been normalised and not used. CheckpointUnfit: a state that is not plain data, or an
        open window over several ranks.
    """
    parts = Parts(resumable=resumable)
    if resumable:
        _gather_state(model, session, parts)
    parts.base_sample = base_values.sample(model.adapters) if session.name != BASE else None
    return parts


def _gather_state(model: Sessions, session: Session, parts: Parts) -> None:
    window, optimizer = session.window, session.optimizer
    if window.normalised and not window.finished:
        raise WindowNotStepped(window.count)
    if window.open and model.engine.mesh.world_size > 1:
        why = f"its gradients lie apart on {model.engine.mesh.world_size} ranks; save after an update, or flush() first"
        raise CheckpointUnfit("an accumulation window that is open", why)
    if optimizer is not None:
        parameters = model._named(session)
        tensors, parts.data["optimizer"] = model.engine.optimizer_state(optimizer, parameters)
        parts.tensors["optimizer"] = {k: whole(t).cpu() for k, t in tensors.items()}
        if session.scheduler is not None:
            name = type(session.scheduler).__name__
            state = to_plain(session.scheduler.state_dict(), f"the state of scheduler {name}")
            parts.data["scheduler"] = {"class": name, "state": state}
    if held := model.adapters.training_state(session.name):
        parts.data["adapter"] = to_plain(held, f"the training state of adapter '{session.name}'")
    if window.open:
        found = {k: model.engine.gradient(p) for k, p in model._named(session).items()}
        parts.tensors["gradients"] = {k: g for k, g in found.items() if g is not None}
    state = model.engine.state_dict()
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    plain = {k: v for k, v in state.items() if k not in tensors}
    parts.tensors["engine"], parts.data["engine"] = tensors, to_plain(plain, "the state of the engine")
    captured = model.engine.gather_objects(rng.capture(), "world")
    parts.tensors["rng"], parts.data["rng"] = rng.join(captured)


def write(
    model: Sessions, session: Session, folder: Path, parts: Parts, consumed: int, *, first: bool, failure: Failure
) -> None:
    """Write a checkpoint's files into an empty folder.

    ``first``: whether this rank writes what ranks do not hold apart. The others are here where the engine is ``collective``;
    ``failure``: what they raise when one of them could not write.
    """
    with together(model.engine, failure):
        model.adapters.write(session.name, folder)
    weights = base_values.fingerprint(model.adapters, session.name)
    if parts.resumable and session.optimizer is not None:
        with together(model.engine, failure):
            model.engine.write_shards(session.optimizer, folder)
    if not first:
        return
    for stem, tensors in parts.tensors.items():
        if tensors:
            save_file(distinct({k: t.cpu() for k, t in tensors.items()}), folder / f"{stem}.safetensors")
    for stem, data in parts.data.items():
        (folder / f"{stem}.json").write_text(json.dumps(data))
    files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    state = TrainerState(
        twinkle_version=__version__,
        adapter_name=session.name,
        resumable=parts.resumable,
        cur_step=session.cur_step,
        consumed_train_samples=consumed,
        gradient_accumulation_steps=session.window.size,
        skipped_steps=session.skipped_steps,
        window=WindowState(**session.window.state_dict()),
        gradient_scale=model.engine.loss_scale(),
        optimizer=None if session.optimizer is None else type(session.optimizer).__name__,
        scheduler=None if session.scheduler is None else type(session.scheduler).__name__,
        adapter=_described(model.adapters.describe(session.name)),
        engine=_described(model.engine.describe()),
        mesh=repr(model.engine.mesh),
        fingerprint=weights,
        base_sample=parts.base_sample,
        plugins=registry.snapshot(),
        files={name: FileEntry(size=p.stat().st_size, sha256=sha256(p)) for name, p in files.items()},
    )
    (folder / STATE_FILE).write_text(state.model_dump_json(indent=1))


# ---------------------------------------------------------------------------------------------------- reading


def inspect(folder: Path, *, resume_only_model: bool = False, hashes: bool = False) -> TrainerState:
    """What a checkpoint says of itself, without a model: all that ``resume_from_checkpoint`` would find wrong with the folder
    alone. Ask it before data and model are loaded.

    Args:
        folder: what ``save`` wrote.
        resume_only_model: whether weights alone are wanted; else it must hold the training state.
        hashes: read all files whole and compare their hashes; False: that they are there and of their sizes, and the hashes of
            those with plain data. (Resuming compares all hashes in any case.)

    Raises:
        CheckpointNotFound: no folder, or one without ``trainer_state.json``. CheckpointDamaged, CheckpointMismatch: the text
        names the file.
    """
    state = read_state(folder, hashes=hashes)
    if state is None:
        raise CheckpointNotFound(str(folder), f"the folder has no {STATE_FILE}; load() takes plain folders")
    if resume_only_model:
        return state
    if not state.resumable:
        raise CheckpointMismatch(
            str(folder), "it holds weights alone (saved without save_optimizer=True); load it with resume_only_model=True"
        )
    for stem, there in (("engine", True), ("rng", True), ("optimizer", state.optimizer), ("scheduler", state.scheduler)):
        if there:
            with _reading(folder, f"{stem}.json"):
                _data(folder, stem)
    return state


def read_state(folder: Path, *, hashes: bool = True) -> TrainerState | None:
    """``trainer_state.json``, and all files it names verified; None where there is no such file (a plain PEFT or model folder).

    Args:
        hashes: compare the hashes of all files, which reads them whole; False: of the small ones with plain data alone.

    Raises:
        CheckpointNotFound, CheckpointDamaged, CheckpointMismatch: the text names the file.
    """
    try:
        recover(folder)
        there = folder.is_dir()
    except OSError as error:  # a name that no disk takes
        raise CheckpointNotFound(str(folder), error.strerror or str(error)) from error
    if not there:
        raise CheckpointNotFound(str(folder))
    path = folder / STATE_FILE
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointDamaged(str(path), f"it is not valid JSON ({error})") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA:
        raise CheckpointMismatch(str(path), f"its schema is version {version}; this twinkle reads version {SCHEMA}")
    try:
        state = TrainerState.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointDamaged(str(path), f"field '{where}': {first['msg']}") from error
    for name, entry in state.files.items():
        _verify(folder, name, entry, hashes or name.endswith(".json"))
    return state


def _verify(folder: Path, name: str, entry: FileEntry, hashes: bool) -> None:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointDamaged(str(path), "it lies outside the checkpoint")
    if not path.is_file():
        raise CheckpointDamaged(str(path), "it is missing")
    size = path.stat().st_size
    if size != entry.size:
        raise CheckpointDamaged(str(path), f"it has {size} bytes and was written with {entry.size}")
    if hashes and sha256(path) != entry.sha256:
        raise CheckpointDamaged(str(path), "its content has changed since it was written (sha256 differs)")


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


@contextlib.contextmanager
def _reading(folder: Path, file: str) -> Iterator[None]:
    """Whatever goes wrong with a file's content is said of the file, before anything has changed."""
    try:
        yield
    except TwinkleError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
        why = f"its content can't be used ({type(error).__name__}: {error})"
        raise CheckpointDamaged(str(folder / file), why) from error


def check_owner(state: TrainerState, session: Session, path: Path) -> None:
    """Raise CheckpointMismatch if one of the two is an adapter and the other the base model."""
    if (state.adapter_name == BASE) == (session.name == BASE):
        return
    holds = f"adapter '{state.adapter_name}'" if state.adapter_name else "the whole base model"
    here = f"adapter '{session.name}'" if session.name else "the base model"
    way = "name an adapter: adapter_name=..." if state.adapter_name else "name the base model: adapter_name=''"
    raise CheckpointMismatch(str(path), f"it holds {holds}, and it was to be loaded into {here}; {way}")


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
        with _reading(folder, "optimizer.json"):
            tensors, data = _tensors(folder, "optimizer"), _data(folder, "optimizer")
            loaded.optimizer = model.engine.prepare_optimizer_state(session.optimizer, parameters, tensors, data, folder)
            loaded.notes += differences.of_optimizer(session.optimizer, data["groups"])
    if session.scheduler is not None:
        with _reading(folder, "scheduler.json"):
            scheduler = from_plain(_data(folder, "scheduler")["state"], session.scheduler.state_dict())
            loaded.notes += differences.of_scheduler(session.scheduler, scheduler)
            loaded.scheduler = scheduler
    if "adapter.json" in state.files:
        with _reading(folder, "adapter.json"):
            loaded.adapter = from_plain(_data(folder, "adapter"))
    with _reading(folder, "engine.json"):
        loaded.engine = from_plain(_data(folder, "engine")) | _tensors(folder, "engine")
    with _reading(folder, "gradients.safetensors"):
        loaded.gradients = _tensors(folder, "gradients")
    for name, gradient in loaded.gradients.items():
        if name not in parameters or parameters[name].shape != gradient.shape:
            source = str(folder / "gradients.safetensors")
            raise CheckpointMismatch(source, f"parameter {name} is not here, or of another shape")
    with _reading(folder, "rng.json"):
        mine = rng.of_rank(_tensors(folder, "rng"), _data(folder, "rng"), model.engine.mesh.rank)
        if mine is None:
            loaded.notes.append(f"it holds no random state of rank {model.engine.mesh.rank}: this rank draws on from its own")
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


def _tensors(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    path = folder / f"{stem}.safetensors"
    return load_file(path) if path.is_file() else {}


def _data(folder: Path, stem: str) -> dict[str, Any]:
    path = folder / f"{stem}.json"
    if not path.is_file():
        raise CheckpointDamaged(str(path), "it is missing")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


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
    for name, parameter in model._named(session).items():
        gradient = loaded.gradients.get(name)
        if gradient is not None:
            gradient = gradient.to(parameter.device, parameter.dtype)
            gradient = gradient if rescale == 1 else gradient.mul_(rescale)
        model.engine.set_gradient(parameter, gradient)
    size = session.window.size
    session.window.load_state_dict(state.window.model_dump())
    if size is not None and (not session.window.open or session.window.size is None):
        session.window.size = size
    session.cur_step, session.skipped_steps = state.cur_step, state.skipped_steps
    session.consumed_train_samples = state.consumed_train_samples
    for note in loaded.notes:
        get_logger().warning(note)
    rng.restore(loaded.rng_tensors, loaded.rng)
