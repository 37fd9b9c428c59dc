"""Errors of backends (L0)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinkle_core.errors.base import TwinkleError, listed, meant
from twinkle_core.errors.checkpoints import CheckpointMismatch


class BadGeneration(TwinkleError, ValueError):
    """Options of ``generate`` that the model's library refuses."""

    def __init__(self, options: Mapping[str, Any], library_says: BaseException) -> None:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "the model's own settings"
        super().__init__(f"generate({given}) can't be done: {library_says}")


class Fp8Unavailable(TwinkleError, RuntimeError):
    """fp8 asked for where it can't run."""

    def __init__(self) -> None:
        super().__init__(
            "mixed_precision='fp8' needs a GPU with fp8 units (H100 class or newer) and the library transformer-engine, and "
            "this version of twinkle-transformers can't drive them yet. Use mixed_precision='bf16'."
        )


class UnknownModelClass(TwinkleError, LookupError):
    """A class name that transformers doesn't have."""

    def __init__(self, name: str, near: str | None) -> None:
        super().__init__(
            f"transformers has no model class '{name}'.{meant(near)}\n"
            f"    give a class, or a name such as 'AutoModelForCausalLM'; a folder or hub id goes into model_id=..."
        )


class NoModel(TwinkleError, ValueError):
    """A constructor without a model to load or build."""

    def __init__(self, owner: str, given: Iterable[str] = ()) -> None:
        words = [f"{name}=..." for name in given]
        instead = f"\n    what it was given beside its own parameters, {', '.join(words)}, names no model" if words else ""
        super().__init__(
            f"{owner} needs model_id=... (a folder, 'ms://...' or 'hf://...') or config=... for a model with random weights"
            f"{instead}"
        )


class ModelNotLoaded(TwinkleError, OSError):
    """A folder that the model's library can't load."""

    def __init__(self, folder: object, library_says: str) -> None:
        super().__init__(f"the model in '{folder}' could not be loaded: {library_says}")

    @classmethod
    def incomplete(cls, folder: object, model: str, missing: Sequence[str], unexpected: Sequence[str]) -> ModelNotLoaded:
        """Weights that are not in its files, or that the model has no place for."""
        kinds = (("lack", missing, "which would be random numbers"), ("hold", unexpected, "which it has no place for"))
        parts = [
            f"its files {verb} {len(keys)} weight(s) of {model}'s body or output, {what}: {listed(keys[:3])}"
            f"{', ...' if len(keys) > 3 else ''}"
            for verb, keys, what in kinds
            if keys
        ]
        return cls(
            folder, "; ".join(parts) + "\n    complete the folder, or give the model_cls or config that it was saved with"
        )


class HoldsAdapter(TwinkleError, ValueError):
    """An adapter's folder where a model is to be loaded from."""

    def __init__(self, folder: object, base: str | None) -> None:
        super().__init__(
            f"'{folder}' holds an adapter, not a model.\n"
            f"    load its base model (model_id={base or '...'!r}), then call add_adapter_to_model(name, '{folder}')"
        )


class UnknownOption(TwinkleError, ValueError):
    """A value that isn't one of those a parameter takes."""

    def __init__(self, parameter: str, value: object, near: str | None, known: Iterable[str]) -> None:
        super().__init__(f"{parameter}={value!r} is not known.{meant(near)}\n    it is one of: {listed(known)}")


class ManyProcesses(TwinkleError, RuntimeError):
    """A mesh of another number of processes than there are."""

    def __init__(self, owner: str, wanted: int, running: int, given: bool = True) -> None:
        whose = "its device mesh" if given else "no device mesh was given, and that of initialize(global_device_mesh=...)"
        are = "1 process is" if running == 1 else f"{running} processes are"
        super().__init__(
            f"{owner}: {whose} has {wanted} rank(s), and {are} running.\n"
            f"    Start {wanted}: torchrun --nproc-per-node {wanted} train.py; or give a mesh of {running}"
        )


class BadLayout(TwinkleError, ValueError):
    """A mesh that a backend can't lay a model over."""

    def __init__(self, owner: str, why: str) -> None:
        super().__init__(f"{owner} can't be laid over this device mesh: {why}")

    @classmethod
    def divides(cls, owner: str, size: str, value: int, of: str, total: int) -> BadLayout:
        return cls(owner, f"{size} = {value} must divide the model's {of} = {total}; {total} / {value} = {total / value:.4g}")


class NoDevice(TwinkleError, ValueError):
    """A device that isn't there."""

    def __init__(self, device: str) -> None:
        super().__init__(f"the mesh asks for device_type='{device}', and torch sees none here. Use device_type='cpu'.")


class PackingLeaks(TwinkleError, ValueError):
    """Packing asked of a model whose rows then see each other. ``cure``: the value of padding_free with which they do not."""

    def __init__(self, model: str, why: str, cure: bool = False) -> None:
        packs = " (or leave the rows' position_ids out, where each is one sample)" if cure else ""
        what = "packed rows" if not cure else "these packed rows"
        super().__init__(f"{model} can't train on {what}: {why}.\n    use a processor with padding_free={cure}{packs}")


class NotComputed(TwinkleError, ValueError):
    """A quantity that a loss or metric needs and this model doesn't have."""

    def __init__(self, model: str, need: str, why: str) -> None:
        super().__init__(f"{model} gives no {need}: {why}")


class BadLabels(TwinkleError, ValueError):
    """Labels that are not one whole number for each position, where log-probabilities of labels are wanted."""

    TOKENS = "aligned labels, one whole number for each token: what it must predict, or -100 where nothing is trained"

    def __init__(self, why: str, wanted: str = TOKENS) -> None:
        super().__init__(f"labels can't be used: {why}.\n    give {wanted}")


class WrongType(TwinkleError, TypeError):
    """A constructor's argument of a type that can't be used."""

    def __init__(self, owner: str, parameter: str, value: object, wanted: str) -> None:
        super().__init__(f"{owner}: {parameter}={value!r} is a {type(value).__name__}; it must be {wanted}.")


class WeightsMismatch(CheckpointMismatch):
    """Tensors that are not those of the model or adapter. Nothing was loaded."""

    def __init__(
        self,
        what: str,
        *,
        missing: Sequence[str] = (),
        unknown: Sequence[str] = (),
        misshapen: Sequence[tuple[str, Sequence[int], Sequence[int]]] = (),
        parted: Sequence[str] = (),
        mistyped: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        shapes = [f"{key} is {list(there)} in the file and {list(here)} here" for key, there, here in misshapen]
        types = [f"{key} is {there} in the file and {here} here" for key, there, here in mistyped]
        found = {
            "missing": missing,
            "unknown": unknown,
            "misshapen": shapes,
            "of another kind": types,
            "tied here, different there": parted,
        }
        lines = [
            f"{label} ({len(keys)}): {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}"
            for label, keys in found.items()
            if keys
        ]
        TwinkleError.__init__(self, f"the tensors don't fit {what}. Nothing was loaded.\n    " + "\n    ".join(lines))


class LoadedTooEarly(TwinkleError, RuntimeError):
    """A library that was imported before what must be there first."""

    def __init__(self, library: str, first: str) -> None:
        super().__init__(f"'{library}' was imported before {first}; make the model first, or import twinkle's plugin before it")


class OnlyOwn(TwinkleError, ValueError):
    """An optimizer or scheduler that this backend can't drive."""

    def __init__(self, owner: str, kind: str, given: object, why: str, own: str) -> None:
        name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
        super().__init__(f"{owner} takes no {kind} '{name}': {why}.\n    use set_{own}")


class UnsupportedFamily(TwinkleError, ValueError):
    """A model family that a backend can't load, train or write rightly."""

    def __init__(self, owner: str, family: str, why: str, way: str) -> None:
        super().__init__(f"{owner} and '{family}': {why}.\n    {way}")


class ManyLayouts(TwinkleError, RuntimeError):
    """Two meshes in one process where a library has room for one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(
            f"Megatron's process groups are of the whole process, and a model that lives uses\n    {first}\n"
            f"so there is no room for\n    {second}\n    drop the first model (del model), or give both the same mesh"
        )
