"""Every exception of twinkle with its text (L0). Other rooms raise these; none builds a text of its own.

An exception takes values and writes the sentence: what was given, why it can't be, and the way out. It is raised before any
state changes, unless its text says otherwise.
"""

from __future__ import annotations


class TwinkleError(Exception):
    """Base of all errors raised on purpose by twinkle."""


# ---------------------------------------------------------------------------------------------------- names and plugins


# ---------------------------------------------------------------------------------------------------- meshes and runtimes


class BadMesh(TwinkleError, ValueError):
    """Sizes of a mesh, or of a group, that can't be."""

    @classmethod
    def size(cls, name: str, value: object) -> BadMesh:
        return cls(f"{name}={value!r} is not a size; give a whole number from 1 up, or leave it out.")

    @classmethod
    def product(cls, sizes: dict[str, int], world_size: int) -> BadMesh:
        used = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
        product = 1
        for size in used.values():
            product *= size
        sum_ = " × ".join(f"{name}_size {size}" for name, size in used.items())
        return cls(
            f"{sum_} = {product}, which does not fit a world size of {world_size}.\n"
            f"    Start {product} processes, or give sizes whose product is {world_size}."
        )

    @classmethod
    def divides(cls, name: str, value: int, of: str, total: int) -> BadMesh:
        return cls(f"{name} = {value} must divide {of} = {total}; {total} / {value} = {total / value:.4g}.")

    @classmethod
    def rank(cls, rank: int, world_size: int) -> BadMesh:
        return cls(f"rank {rank} is outside a mesh of {world_size} (0 … {world_size - 1}).")

    @classmethod
    def group(cls, field: str, value: object, way: str) -> BadMesh:
        return cls(f"DeviceGroup({field}={value!r}): {way}.")


class AlreadyInitialized(TwinkleError, RuntimeError):
    """``initialize`` was called twice with different arguments."""

    def __init__(self, first: dict[str, object], second: dict[str, object]) -> None:
        different = [name for name in second if first.get(name) != second[name]]
        lines = "".join(f"\n    {name}: {first.get(name)!r} before, {second[name]!r} now" for name in different)
        super().__init__(f"twinkle.initialize was already called with other arguments:{lines}\n    Call it once, at the start.")


# ---------------------------------------------------------------------------------------------------- hubs and data


# ---------------------------------------------------------------------------------------------------- templates and processors


# ---------------------------------------------------------------------------------------------------- training


class BadWindowSize(TwinkleError, ValueError):
    """gradient_accumulation_steps that is no positive whole number."""

    def __init__(self, size: object) -> None:
        super().__init__(f"gradient_accumulation_steps={size!r} is not a whole number of at least 1.")


class WindowSizeChanged(TwinkleError, ValueError):
    """Another window size while a window is open."""

    def __init__(self, old: int, new: int, count: int) -> None:
        super().__init__(
            f"gradient_accumulation_steps={new} was given while a window of {old} is open ({count} of {old} backwards done).\n"
            f"    keep {old} until the window closes, close it with flush(), or give it up with zero_grad(drop=True)"
        )


class WindowNotStepped(TwinkleError, RuntimeError):
    """A backward on gradients that have been normalised already."""

    def __init__(self, count: int) -> None:
        super().__init__(
            f"the window of {count} backward(s) has been normalised and clipped, but not used: more gradients can't be added to it.\n"
            f"    call step() to use it or zero_grad() to drop it, then go on"
        )


class NoOptimizer(TwinkleError, RuntimeError):
    """A verb that needs an optimizer."""

    def __init__(self, verb: str, adapter: str, base_has_one: bool = False) -> None:
        hint = "\n    the base model has one, but an optimizer belongs to one adapter" if base_has_one and adapter else ""
        super().__init__(f"{verb}() of {_whose(adapter)} needs an optimizer: call set_optimizer({_by_name(adapter)}) first.{hint}")


class NoTrainableParameters(TwinkleError, ValueError):
    """An optimizer for nothing."""

    def __init__(self, adapter: str) -> None:
        super().__init__(f"{_whose(adapter)} has no trainable parameter, so there is nothing for an optimizer to train.")


class BadOptimizer(TwinkleError, ValueError):
    """An optimizer that can't be used here."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"optimizer {what} can't be used: {why}")


class BadScheduler(TwinkleError, ValueError):
    """A scheduler that can't be used here."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"scheduler {what} can't be used: {why}")


class NoForward(TwinkleError, RuntimeError):
    """A split verb without the forward it belongs to."""

    def __init__(self, verb: str, adapter: str) -> None:
        super().__init__(
            f"{verb}() of {_whose(adapter)} has no forward to work on: call forward({_by_name(adapter)}) first. "
            f"Each forward has one backward."
        )


class NoTemplate(TwinkleError, ValueError):
    """Raw trajectories without a template to encode them."""

    def __init__(self, adapter: str) -> None:
        super().__init__(
            f"the inputs are conversations ('messages'), and {_whose(adapter)} has no template to encode them.\n"
            f"    call set_template(...) first, or give encoded rows ('input_ids', 'labels')"
        )


class EmptyBatch(TwinkleError, ValueError):
    """Nothing to compute on."""

    def __init__(self, given: int = 0) -> None:
        why = f": the template dropped all {given} conversations" if given else " (no rows)"
        super().__init__(f"the batch is empty{why}. Give at least one row.")


class BadInputs(TwinkleError, ValueError):
    """Inputs of a form that is not known."""

    def __init__(self, why: str) -> None:
        super().__init__(f"inputs can't be used: {why}")


class NoLabels(TwinkleError, ValueError):
    """A loss that needs labels, and rows without."""

    def __init__(self, loss: str, keys: Iterable[str]) -> None:
        super().__init__(
            f"{loss} needs 'labels', and the rows have only: {_listed(keys)}.\n"
            f"    labels are aligned: labels[t] is the token that position t must predict, -100 where nothing is trained"
        )


class BadGroups(TwinkleError, ValueError):
    """A loss whose groups don't cover the rows."""

    def __init__(self, loss: str, sizes: Iterable[int], rows: int) -> None:
        super().__init__(f"{loss} cuts {rows} rows into groups of {list(sizes)}: sizes must be at least 1 and add up to {rows}.")


class RowsChanged(TwinkleError, ValueError):
    """Loss arguments for each row, and a template that changed the number of rows."""

    def __init__(self, name: str, given: int, encoded: int) -> None:
        super().__init__(
            f"the template made {encoded} rows of {given} conversations (dropped or split), so '{name}', which has one value for "
            f"each conversation, no longer fits.\n    encode first (template.batch_encode), then give rows and '{name}' that fit"
        )


class BadLossResult(TwinkleError, TypeError):
    """A loss that returns something else than a loss."""

    def __init__(self, loss: str, what: str) -> None:
        super().__init__(
            f"{loss} returned {what}. A loss returns LossOutput(sum, weight); a plain function may return a scalar tensor, the mean."
        )


class BadLossWeight(TwinkleError, ValueError):
    """A loss weight that is no count."""

    def __init__(self, weight: float) -> None:
        super().__init__(f"the weight of the window is {weight}: a loss must return how many items its sum is over, 0 or more.")


class NonFiniteGradients(TwinkleError, ArithmeticError):
    """NaN or infinite gradients. The weights and the optimizer are as they were; the window has been dropped."""

    def __init__(self, adapter: str, names: Iterable[str], more: int, loss: float | None) -> None:
        rest = f" and {more} more" if more else ""
        last = "" if loss is None else f" (last loss: {loss:g})"
        super().__init__(
            f"gradients of {_whose(adapter)} are not finite in {_listed(names, 'a parameter')}{rest}{last}.\n"
            f"    weights and optimizer are unchanged; the accumulation window was dropped. Lower the learning rate, look at the "
            f"data of this batch, or choose on_nonfinite='skip'"
        )


class Unsupported(TwinkleError, TypeError):
    """A verb that this backend does not have."""

    def __init__(self, verb: str, backend: str, instead: str) -> None:
        super().__init__(f"{backend} has no {verb}(). Use {instead}.")


# ---------------------------------------------------------------------------------------------------- adapters


def _whose(adapter: str) -> str:
    return f"adapter '{adapter}'" if adapter else "the base model"


def _by_name(adapter: str) -> str:
    return f"..., adapter_name='{adapter}'" if adapter else "..."


class UnknownAdapter(TwinkleError, KeyError):
    """An adapter that is not there."""

    def __init__(self, name: str, near: str | None, live: Iterable[str]) -> None:
        self.text = f"unknown adapter '{name}'.{_meant(near)}\n    adapters: {_listed(live, 'none yet; add_adapter_to_model makes one')}"
        super().__init__(self.text)

    def __str__(self) -> str:  # KeyError shows the repr of its text
        return self.text


class WhichAdapter(TwinkleError, ValueError):
    """Several adapters, and none named."""

    def __init__(self, live: Iterable[str]) -> None:
        super().__init__(
            f"which adapter? This model has {_listed(live)}.\n"
            f"    give adapter_name=..., or put the calls in `with model.adapter(name):` (adapter_name='' is the base model)"
        )


class DuplicateAdapter(TwinkleError, ValueError):
    """A second adapter of one name. The live one is untouched."""

    def __init__(self, name: str) -> None:
        super().__init__(f"adapter '{name}' is there already. Remove it first (remove_adapter), or choose another name.")


class BadAdapter(TwinkleError, ValueError):
    """An adapter's name, configuration or folder that can't be used. Nothing was changed."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"adapter '{name}' can't be made: {why}")


# ---------------------------------------------------------------------------------------------------- checkpoints


class BadCheckpointName(TwinkleError, ValueError):
    """A name that leaves the output folder."""

    def __init__(self, name: str, output_dir: str) -> None:
        super().__init__(f"save name {name!r} is not a folder inside output_dir '{output_dir}'. Give a plain name like 'step-100'.")


class CheckpointInTheWay(TwinkleError, FileExistsError):
    """Something that is no checkpoint stands where one is to be written."""

    def __init__(self, path: str) -> None:
        super().__init__(f"'{path}' is there and is not a checkpoint, so it is not replaced. Choose another name or move it away.")


class CheckpointNotWritten(TwinkleError, OSError):
    """Writing failed. What was there before is whole; nothing half-written is left."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"checkpoint '{path}' could not be written: {why}\n"
            f"    an older checkpoint of that name is whole; nothing half-written is left"
        )


class CheckpointNotFound(TwinkleError, FileNotFoundError):
    """No checkpoint there."""

    def __init__(self, path: str, why: str = "there is no such folder") -> None:
        super().__init__(f"no checkpoint at '{path}': {why}.")


class CheckpointDamaged(TwinkleError, ValueError):
    """A file that is missing, cut short or changed. Nothing was loaded."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"checkpoint file '{path}' is damaged: {why}. Nothing was loaded; take an older checkpoint.")


class CheckpointMismatch(TwinkleError, ValueError):
    """A checkpoint that belongs to something else. Nothing was loaded."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"checkpoint '{path}' does not fit: {why}. Nothing was loaded.")


class CheckpointUnfit(TwinkleError, ValueError):
    """A state that can't be written so that it could be resumed."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} can't be saved so that it could be resumed: {why}")


# ---------------------------------------------------------------------------------------------------- backends


# ---------------------------------------------------------------------------------------------------- configuration files and the command line
