"""Checkpoints: what is in the folder, and how it is verified before anything is loaded (L2).

======================  ==================================================================================
weights                 by the store: plain files that PEFT or the model's own library loads
trainer_state.json      :class:`TrainerState`; names, sizes and hashes of all other files
optimizer.safetensors   tensors of the optimizer's state under ``<state>/<parameter>``; ``optimizer.json`` the rest
scheduler.json          the scheduler's numbers
adapter.json            what a store keeps of the adapter beside its weights, if anything
engine.safetensors      tensors of the engine's state; ``engine.json`` the rest (the gradient scaler)
gradients.safetensors   the gradients of an open accumulation window, by parameter
*-shards/               ``model``, ``optimizer`` or ``gradients`` that lie apart on ranks, in place of the file (``shards``)
rng.safetensors         random state of torch and devices; ``rng.json`` of Python and numpy
======================  ==================================================================================

Only the first two are there without ``save_optimizer``. No pickle is written or read.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import save_file

from twinkle_core import registry
from twinkle_core.contracts.adapters import BASE
from twinkle_core.errors import (
    BadArgument,
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointNotWritten,
    TwinkleError,
    WindowNotStepped,
)
from twinkle_core.ops.sharded import is_sharded
from twinkle_core.train import base_values, rng, shards
from twinkle_core.train.folder import STATE_FILE, recover, sha256
from twinkle_core.train.normalise import as_scalar
from twinkle_core.train.plain import to_plain
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
    sharded: list[str] = []  # what is in shards
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
    """Everything beside the weights, gathered before a file is written: tensors and plain data by stem. ``apart``: tensors of
    which each rank writes its own parts, the weights too where they are to be in shards; the same names on all ranks."""

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    apart: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    window: dict[str, Any] = field(default_factory=dict)
    resumable: bool = True
    base_sample: str | None = None

    def put(self, stem: str, tensors: dict[str, torch.Tensor]) -> None:
        """Tensors, which ranks write together if they lie apart on them."""
        (self.apart if any(is_sharded(t) for t in tensors.values()) else self.tensors)[stem] = tensors


def gather(model: Sessions, session: Session, *, resumable: bool = True, sharded: bool = False) -> Parts:
    """The training state of a session (``resumable`` False: what is kept with weights alone; ``sharded``: and the weights, as
    they lie on ranks). Changes nothing. All ranks call it together.

    Raises:
        BadArgument: these weights can't be ``sharded``. WindowNotStepped: gradients have been normalised and not used.
        CheckpointUnfit: a state that is not plain data, or an open window over ranks that can't be brought together.
    """
    parts = Parts(window=session.window.state_dict(), resumable=resumable)
    if sharded:
        weights = model.adapters.sharded_state(session.name)
        if weights is None:
            whose = f"adapter '{session.name}'" if session.name else type(model).__name__
            raise BadArgument("sharded", True, f"False: the weights of {whose} are written as plain files")
        parts.apart["model"] = weights
    if resumable:
        _gather_state(model, session, parts)
    parts.base_sample = base_values.sample(model.adapters) if session.name != BASE else None
    return parts


def _gather_state(model: Sessions, session: Session, parts: Parts) -> None:
    window, optimizer = session.window, session.optimizer
    if window.normalised and not window.finished:
        raise WindowNotStepped(window.count)
    if optimizer is not None:
        parameters = model._named(session)
        tensors, parts.data["optimizer"] = model.engine.optimizer_state(optimizer, parameters)
        parts.put("optimizer", tensors)
        if session.scheduler is not None:
            name = type(session.scheduler).__name__
            state = to_plain(session.scheduler.state_dict(), f"the state of scheduler {name}")
            parts.data["scheduler"] = {"class": name, "state": state}
    if held := model.adapters.training_state(session.name):
        parts.data["adapter"] = to_plain(held, f"the training state of adapter '{session.name}'")
    if counts := [n for n in model.engine.gather_objects(window.count if window.open else None, "world") if n is not None]:
        parts.put("gradients", model.engine.window_gradients(model._named(session)))
        weight = float(model.engine.all_reduce(as_scalar(window.weight if window.open else 0, model.engine.device)))
        parts.window |= {"count": max(counts), "weight": weight}
    state = model.engine.state_dict()
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    plain = {k: v for k, v in state.items() if k not in tensors}
    parts.tensors["engine"], parts.data["engine"] = tensors, to_plain(plain, "the state of the engine")
    captured = model.engine.gather_objects(rng.capture(), "world")
    parts.tensors["rng"], parts.data["rng"] = rng.join(captured, model.engine.mesh.streams)


def _write_shards(model: Sessions, folder: Path, parts: Parts, first: bool) -> None:
    """Collective."""
    places = [shards.place(folder, stem) for stem in parts.apart]
    with contextlib.suppress(OSError):
        for place in places if first else ():
            place.mkdir()
    model.engine.gather_objects(None, "world")  # nobody looks before they are made
    seen = model.engine.gather_objects(all(place.is_dir() for place in places), "world")
    if not all(seen):
        why = f"rank {seen.index(False)} can't write there: the disk is full, or it is not one that all ranks share"
        raise CheckpointNotWritten(str(folder), why)
    for stem, tensors in parts.apart.items():
        shards.write(shards.place(folder, stem), tensors)


def _all(model: Sessions, failure: Failure) -> contextlib.AbstractContextManager[None]:
    """What all ranks write together, where they do."""
    return together(model.engine, failure) if model.engine.collective else contextlib.nullcontext()


def write(
    model: Sessions, session: Session, folder: Path, parts: Parts, consumed: int, *, first: bool, failure: Failure
) -> None:
    """Write a checkpoint's files into an empty folder.

    ``first``: whether this rank writes what ranks do not hold apart. The others are here where there is something else, or
    the engine is ``collective``; ``failure``: what they raise when one of them could not write.
    """
    if parts.apart:
        _write_shards(model, folder, parts, first)
    if "model" not in parts.apart and (first or model.engine.collective):
        with _all(model, failure):
            model.adapters.write(session.name, folder)
    weights = base_values.fingerprint(model.adapters, session.name)
    if parts.resumable and session.optimizer is not None:
        with _all(model, failure):
            model.engine.write_shards(session.optimizer, folder)
    if not first:
        return
    if "model" in parts.apart:
        model.adapters.write_beside(session.name, folder)
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
        window=WindowState(**parts.window),
        gradient_scale=model.engine.loss_scale(),
        optimizer=None if session.optimizer is None else type(session.optimizer).__name__,
        scheduler=None if session.scheduler is None else type(session.scheduler).__name__,
        adapter=_described(model.adapters.describe(session.name)),
        engine=_described(model.engine.describe()),
        mesh=repr(model.engine.mesh),
        sharded=sorted(parts.apart),
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
            with reading(folder, f"{stem}.json"):
                data_of(folder, stem)
    return state


def said(state: TrainerState | None) -> str:
    """Words for what is read, which is the same on all ranks wherever each finds it."""
    if state is None:
        return ""
    files = zlib.crc32(repr(sorted((name, file.sha256) for name, file in state.files.items())).encode())
    return f" of a checkpoint of step {state.cur_step} ({files:08x})"


def read_state(folder: Path, *, hashes: bool = True) -> TrainerState | None:
    """``trainer_state.json``, and all files it names verified; None where there is no such file (a plain PEFT or model folder),
    or transformers' Trainer wrote it.

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
    if isinstance(raw, dict) and "log_history" in raw and "schema_version" not in raw:
        return None  # transformers' Trainer gives a file of its own this name
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


@contextlib.contextmanager
def reading(folder: Path, file: str) -> Iterator[None]:
    """Whatever goes wrong with a file's content is said of the file, before anything has changed."""
    try:
        yield
    except TwinkleError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
        why = f"its content can't be used ({type(error).__name__}: {error})"
        raise CheckpointDamaged(str(folder / file), why) from error


def data_of(folder: Path, stem: str) -> dict[str, Any]:
    """What a file with plain data holds."""
    path = folder / f"{stem}.json"
    if not path.is_file():
        raise CheckpointDamaged(str(path), "it is missing")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def check_owner(state: TrainerState, session: Session, path: Path) -> None:
    """Raise CheckpointMismatch if one of the two is an adapter and the other the base model."""
    if (state.adapter_name == BASE) == (session.name == BASE):
        return
    holds = f"adapter '{state.adapter_name}'" if state.adapter_name else "the whole base model"
    here = f"adapter '{session.name}'" if session.name else "the base model"
    way = "name an adapter: adapter_name=..." if state.adapter_name else "name the base model: adapter_name=''"
    raise CheckpointMismatch(str(path), f"it holds {holds}, and it was to be loaded into {here}; {way}")
