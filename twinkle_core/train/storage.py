"""The verbs that save and load (L2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from twinkle_core import plugins
from twinkle_core.errors import BadArgument, CheckpointMismatch, CheckpointNotRead, CheckpointNotWritten
from twinkle_core.train import base_values, checkpoint, folder, limits, restore, shards
from twinkle_core.train.session import Session
from twinkle_core.train.sessions import Sessions, one_at_a_time
from twinkle_core.train.together import Failure, meet, together, until_met

#: where checkpoints go when nobody says
OUTPUT_DIR = "output"


class StorageVerbs(Sessions):
    """save, load, resume_from_checkpoint, get_state_dict."""

    @one_at_a_time
    def save(
        self,
        name: str,
        output_dir: str | Path | None = None,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int | None = None,
        sharded: bool = False,
    ) -> str:
        """Write a checkpoint folder ``output_dir/name``, whole or not at all; one that is there is replaced at the end.

        All ranks call it together, and all return when the folder is whole. The first one writes; of an optimizer whose state
        lies apart each rank writes its own part.

        Args:
            name: a folder inside ``output_dir`` (default ``output``).
            save_optimizer: also what resuming needs: optimizer, scheduler, gradient scaler, random state, and the gradients of
                an open accumulation window.
            consumed_train_samples: progress of the data loader, given back by ``resume_from_checkpoint``.
            sharded: of a whole model's weights too each rank writes its own part: none ever holds all of them. ``load`` and
                ``resume_from_checkpoint`` take either form, on any number of ranks; other libraries take plain files alone.

        Returns:
            The folder.

        Raises:
            BadCheckpointName, BadArgument, CheckpointUnfit; CheckpointInTheWay: what stands there is no checkpoint, or holds
            files beside its own; or the new one would lie inside another. WindowNotStepped: with ``save_optimizer`` between
            clip_grad_norm and step. CheckpointNotWritten: the disk refused, here or on another rank; what was there is whole.
        """
        with until_met(self.engine):
            if consumed_train_samples is not None:
                limits.check_count("consumed_train_samples", consumed_train_samples)
            session = self._session(adapter_name)
            path = folder.target(output_dir if output_dir is not None else OUTPUT_DIR, name)
            meet(
                self.engine,
                about=f" as '{path}', {'with' if save_optimizer else 'without'} its optimizer" + ", sharded" * sharded,
            )
        parts = checkpoint.gather(self, session, resumable=save_optimizer, sharded=sharded)
        consumed = session.consumed_train_samples if consumed_train_samples is None else consumed_train_samples
        first = self.engine.mesh.world_size == 1 or self.engine.mesh.rank == 0
        with (
            contextlib.nullcontext() if sharded else self.adapters.gathered(session.name),
            together(self.engine, _not_written(path)),
            self._opened(path, first, shared=self.engine.collective or bool(parts.apart)) as temporary,
        ):
            if temporary is not None:
                checkpoint.write(self, session, temporary, parts, consumed, first=first, failure=_not_written(path))
        session.consumed_train_samples = consumed
        plugins.hooks().twinkle_checkpoint_saved(path=str(path), session=session)
        return str(path)

    @one_at_a_time
    def load(self, name: str, output_dir: str | Path | None = None, *, adapter_name: str | None = None) -> dict[str, Any]:
        """Load the weights of ``output_dir/name`` (also a plain PEFT or model folder) into the adapter or the base model.

        An open accumulation window is given up: its gradients belong to the weights before.

        Returns:
            ``{'cur_step', 'consumed_train_samples', 'gradient_accumulation_steps'}``; zeros and None for a plain folder.

        Raises:
            BadCheckpointName, CheckpointNotFound, CheckpointDamaged, CheckpointMismatch, CheckpointNotRead (one of these on
            another rank): nothing was changed. (An adapter that was trained on another base model of the same shapes is
            loaded, and a warning tells of it.)
        """
        with until_met(self.engine):
            session = self._session(adapter_name)
            path = folder.target(output_dir if output_dir is not None else OUTPUT_DIR, name)
        with together(self.engine, _not_read(path)):
            state = checkpoint.read_state(path)
            if state is not None:
                checkpoint.check_owner(state, session, path)
        meet(self.engine, about=checkpoint.said(state))
        self._load_weights(session, path)
        if state is not None:
            base_values.check(self, session, state, path, strict=False)
        plugins.hooks().twinkle_checkpoint_loaded(path=str(path), session=session)
        if state is None:
            return {"cur_step": 0, "consumed_train_samples": 0, "gradient_accumulation_steps": None}
        return state.progress()

    @one_at_a_time
    def resume_from_checkpoint(
        self, checkpoint_dir: str | Path, *, adapter_name: str | None = None, resume_only_model: bool = False
    ) -> dict[str, Any]:
        """Restore weights, optimizer, scheduler, scaler, accumulation window and random state.

        Set optimizer and scheduler first: their state is put into them. Everything is verified before anything
        changes. Loading twice sets twice, it does not add.

        Where the session was set up otherwise than the checkpoint, a warning names both values. The checkpoint's count, with
        two exceptions. The plan of core's schedulers (``num_training_steps``, ``num_warmup_steps``, ``min_lr_ratio``) is the
        new one, entered at the checkpoint's number of updates, so that a run can be prolonged; and a
        ``gradient_accumulation_steps`` that was set stays, unless the checkpoint holds an open window.

        An adapter meets the base model that it was trained on, by a sample of its values, or it is refused.

        Args:
            checkpoint_dir: what ``save(..., save_optimizer=True)`` wrote.
            resume_only_model: the weights alone; the session's progress is not touched.

        Returns:
            ``{'cur_step', 'consumed_train_samples', 'gradient_accumulation_steps'}``.

        Raises:
            CheckpointNotFound, CheckpointDamaged, CheckpointMismatch: the text names the file; CheckpointNotRead: one of these
            on another rank. Nothing was changed.
        """
        with until_met(self.engine):
            session = self._session(adapter_name)
            if not isinstance(checkpoint_dir, (str, Path)):
                raise BadArgument("checkpoint_dir", checkpoint_dir, "the path of a folder")
            path = Path(checkpoint_dir)
        with together(self.engine, _not_read(path)):
            state = checkpoint.inspect(path, resume_only_model=resume_only_model, hashes=True)
            checkpoint.check_owner(state, session, path)
        meet(self.engine, about=checkpoint.said(state))
        if state.fingerprint != base_values.fingerprint(self.adapters, session.name):
            raise CheckpointMismatch(
                str(path / folder.STATE_FILE), "it belongs to another model (names or shapes of parameters differ)"
            )
        base_values.check(self, session, state, path, strict=not resume_only_model)
        with together(self.engine, _not_read(path)):
            loaded = None if resume_only_model else restore.read(self, session, path, state)
        self._load_weights(session, path)
        if loaded is not None:
            restore.apply(self, session, loaded)
        plugins.hooks().twinkle_checkpoint_loaded(path=str(path), session=session)
        return state.progress()

    @one_at_a_time
    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
        """Tensors under plain keys (PEFT's for an adapter). Live: copy what you want to keep. Where ranks hold parts of the
        model under other names (Megatron's), all of them call it together, and each gets whole tensors."""
        with until_met(self.engine, self.engine.collective):
            name = self._session(adapter_name).name
        return self.adapters.state_dict(name)

    @contextlib.contextmanager
    def _opened(self, path: Path, first: bool, *, shared: bool) -> Iterator[Path | None]:
        """The folder to write into: the first rank makes it; ``shared``: all write there."""
        with contextlib.ExitStack() as stack:
            temporary = None
            with together(self.engine, _not_written(path)) if shared else contextlib.nullcontext():
                if first:
                    temporary = stack.enter_context(folder.replacing(path))
            if shared:
                temporary = next(p for p in self.engine.gather_objects(temporary, "world") if p is not None)
            yield temporary

    def _load_weights(self, session: Session, path: Path) -> None:
        """The store checks keys and shapes before it changes anything; then forwards and gradients of old weights go."""
        live = self.adapters.outline(session.name)
        apart = shards.place(path, "model")
        with together(self.engine, _not_read(path)):
            self.adapters.check_compatible(session.name, path)
            state = shards.read(apart, live) if apart.is_dir() else self.adapters.read(session.name, path)
        for key in live.keys() & state.keys():
            if live[key].is_floating_point() != state[key].is_floating_point():
                raise CheckpointMismatch(str(path), f"{key} is {state[key].dtype}, and {live[key].dtype} here")
        self.adapters.load_state_dict(session.name, state)
        session.pending.clear()
        session.window.reset()
        if session.optimizer is not None:
            self.engine.zero_grad(session.optimizer)
        for parameter in self._named(session).values():
            parameter.grad = None


def _not_written(path: Path) -> Failure:
    return lambda rank, why: CheckpointNotWritten(str(path), f"rank {rank} could not: {why}")


def _not_read(path: Path) -> Failure:
    return lambda rank, why: CheckpointNotRead(str(path), rank, why)
