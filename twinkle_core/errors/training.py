"""Errors of training (L0)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twinkle_core.errors.adapters import by_name, whose
from twinkle_core.errors.base import TwinkleError, listed, meant


class BadArgument(TwinkleError, ValueError):
    """A value that a parameter can't have. Nothing was changed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name}={value!r}: it must be {allowed}.")


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
            f"the window of {count} backward(s) has been normalised, but not used: more gradients can't be added to it.\n"
            f"    call step() to use it or zero_grad() to drop it, then go on"
        )


class NoOptimizer(TwinkleError, RuntimeError):
    """A verb that needs an optimizer."""

    def __init__(self, verb: str, adapter: str, base_has_one: bool = False) -> None:
        hint = "\n    the base model has one, but an optimizer belongs to one adapter" if base_has_one and adapter else ""
        call = f"set_optimizer({by_name(adapter)})"
        super().__init__(f"{verb}() of {whose(adapter)} needs an optimizer: call {call} first.{hint}")


class NoTrainableParameters(TwinkleError, ValueError):
    """An optimizer, or a backward, for nothing."""

    def __init__(self, adapter: str) -> None:
        super().__init__(f"{whose(adapter)} has no trainable parameter, so there is nothing to train.")


class BadOptimizer(TwinkleError, ValueError):
    """An optimizer that can't be used here."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"optimizer {what} can't be used: {why}")


class NotInOptimizer(TwinkleError, RuntimeError):
    """Parameters that became trainable after the optimizer was set: their gradients would pile up, and nothing would use them.

    ``window``: how many backwards an open window holds, which made no gradients of them.
    """

    def __init__(self, adapter: str, names: Sequence[str], window: int = 0) -> None:
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        some = listed(names[:3]) + rest
        call = f"set_optimizer({by_name(adapter)})"
        if window:
            super().__init__(
                f"{some} of {whose(adapter)} became trainable inside a window: its {window} backward(s) made no gradients "
                f"of them, so an optimizer set now would get wrong ones.\n"
                f"    close the window with flush() or give it up with zero_grad(drop=True), then call {call}"
            )
            return
        super().__init__(
            f"{some} of {whose(adapter)} became trainable after its optimizer was set, which does not hold them.\n"
            f"    call {call} again, add them to it (optimizer.add_param_group), or freeze them"
        )


class BadScheduler(TwinkleError, ValueError):
    """A scheduler that can't be used here."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"scheduler {what} can't be used: {why}")


class NoForward(TwinkleError, RuntimeError):
    """A split verb without the forward it belongs to."""

    def __init__(self, verb: str, adapter: str) -> None:
        super().__init__(
            f"{verb}() of {whose(adapter)} has no forward to work on: call forward({by_name(adapter)}) first. "
            f"Each forward has one backward."
        )


class NotInForward(NoForward):
    """A loss set after a forward that did not compute what it reads."""

    def __init__(self, loss: str, missing: Iterable[str], adapter: str) -> None:
        TwinkleError.__init__(
            self,
            f"{loss} needs {listed(missing)}, which the last forward of {whose(adapter)} did not compute: it was made for "
            f"the loss before.\n    call it again after set_loss(...)",
        )


class NoTemplate(TwinkleError, ValueError):
    """Raw trajectories without a template to encode them."""

    def __init__(self, adapter: str) -> None:
        super().__init__(
            f"the inputs are conversations or texts ('messages', 'text'), and {whose(adapter)} has no template to encode "
            f"them.\n"
            f"    call set_template(...) first, or give encoded rows ('input_ids', 'labels')"
        )

    @classmethod
    def of_completions(cls, adapter: str) -> NoTemplate:
        """Texts were asked for, and there are ids."""
        error = cls.__new__(cls)
        TwinkleError.__init__(
            error,
            f"generate() gives texts, and {whose(adapter)} has no template to decode them with.\n"
            f"    call set_template(...) first, or take rows of ids: generate(..., return_rows=True)",
        )
        return error


class EmptyBatch(TwinkleError, ValueError):
    """Nothing to compute on."""

    def __init__(self, given: int = 0) -> None:
        why = f": the template dropped all {given} conversations" if given else " (no rows)"
        super().__init__(f"the batch is empty{why}. Give at least one row.")


class BadInputs(TwinkleError, ValueError):
    """Inputs of a form that is not known."""

    def __init__(self, why: str) -> None:
        super().__init__(f"inputs can't be used: {why}")


class RowsDisagree(TwinkleError, ValueError):
    """Rows of tenants that are not the rows of the batch."""

    def __init__(self, rows: Sequence[int], adapters: int, found: int) -> None:
        super().__init__(
            f"rows={list(rows)} of {adapters} tenant(s) must be one number a tenant, and together the {found} rows of the input"
        )


class LabelsMissing(TwinkleError, ValueError):
    """A loss that needs labels, and rows without."""

    def __init__(self, loss: str, keys: Iterable[str]) -> None:
        super().__init__(
            f"{loss} needs 'labels', and the rows have only: {listed(keys)}.\n"
            f"    labels are aligned: labels[t] is the token that position t must predict, -100 where nothing is trained"
        )


class NotDeclared(TwinkleError, TypeError):
    """A loss that failed after it had read an output that it does not declare, so that nobody computed it.

    ``read``: all that it had read till then. ``plain``: it is a function.
    """

    def __init__(
        self, loss: str, missing: str, read: Iterable[str], needs: Iterable[str], cause: BaseException, *, plain: bool
    ) -> None:
        wanted = "{" + ", ".join(repr(name) for name in sorted(read)) + "}"
        name = loss if loss.isidentifier() else "function"
        way = f"before set_loss: {name}.needs = {wanted}" if plain else f"in its class: needs = frozenset({wanted})"
        default = " (all that a function gets which declares nothing)" if plain and set(needs) == {"logits"} else ""
        super().__init__(
            f"{loss} read outputs.{missing}, which was not computed: its needs are {listed(sorted(needs))}{default}.\n"
            f"    declare what it reads {way}\n"
            f"    what failed: {type(cause).__name__}: {cause}"
        )


class BadNeeds(TwinkleError, TypeError):
    """What a loss or metric declares to read is no set of names, or names what no model gives."""

    @classmethod
    def kind(cls, owner: str, needs: object) -> BadNeeds:
        names = [needs] if isinstance(needs, str) else needs
        words = names if isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names) else ["logps"]
        wanted = "{" + ", ".join(repr(word) for word in words) + "}"
        return cls(f"needs of {owner} is {needs!r} ({type(needs).__name__}); it must be a set of names: frozenset({wanted})")

    @classmethod
    def unknown(cls, owner: str, name: str, near: str | None, known: Iterable[str]) -> BadNeeds:
        return cls(f"{owner} needs '{name}', which is no output of a model.{meant(near)}\n    outputs: {listed(known)}")


class BadMetricResult(TwinkleError, TypeError):
    """A metric that calculates something else than numbers by name."""

    def __init__(self, metric: str, what: str) -> None:
        super().__init__(
            f"{metric}.calculate() returned {what}. It must return a dict of numbers by name, {{}} where there is none."
        )


class BadGroups(TwinkleError, ValueError):
    """A loss whose groups don't cover the rows."""

    def __init__(self, loss: str, sizes: Iterable[int], rows: int) -> None:
        super().__init__(f"{loss} cuts {rows} rows into groups of {list(sizes)}: sizes are at least 1 and add up to {rows}.")


class RowsChanged(TwinkleError, ValueError):
    """Loss arguments for each row, or groups of rows, and a template that changed the number of rows."""

    def __init__(self, name: str | None, given: int, encoded: int) -> None:
        made = f"the template made {encoded} rows of {given} conversations (dropped or split), so "
        super().__init__(
            f"{made}'{name}', which has one value for each conversation, no longer fits.\n"
            f"    encode first (template.batch_encode), then give rows and a '{name}' that fits them"
            if name is not None
            else f"{made}pairs or other groups of them came apart.\n"
            f"    encode them in a Dataset, which drops a group as a whole"
        )


class BadLossSetting(TwinkleError, ValueError):
    """A setting of a loss that is out of its range."""

    def __init__(self, loss: str, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{loss}({name}={value!r}): {name} must be {allowed}.")


class BadLossArgument(TwinkleError, ValueError):
    """An argument of a loss's call that doesn't fit the batch."""

    def __init__(self, loss: str, name: str, why: str, wanted: str) -> None:
        super().__init__(f"{loss} can't use '{name}': {why}.\n    give {wanted}")


class BadLossResult(TwinkleError, TypeError):
    """A loss that returns something else than a loss."""

    def __init__(self, loss: str, what: str) -> None:
        super().__init__(
            f"{loss} returned {what}. A loss returns LossOutput(sum, weight); a plain function may return a scalar tensor, "
            f"the mean."
        )


class BadLossWeight(TwinkleError, ValueError):
    """A loss weight that is no count."""

    def __init__(self, weight: float) -> None:
        super().__init__(
            f"the weight of the window is {weight} (nan also where one call's was negative): a loss must return how many items "
            f"its sum is over, 0 or more.\n"
            f"    weights and optimizer are unchanged; the accumulation window was dropped"
        )


class NonFiniteGradients(TwinkleError, ArithmeticError):
    """NaN or infinite gradients. The weights and the optimizer are as they were; the window has been dropped."""

    def __init__(self, adapter: str, names: Iterable[str], more: int, loss: float | None) -> None:
        rest = f" and {more} more" if more else ""
        last = "" if loss is None else f" (last loss: {loss:g})"
        super().__init__(
            f"gradients of {whose(adapter)} are not finite in {listed(names, 'a parameter')}{rest}{last}.\n"
            f"    weights and optimizer are unchanged; the accumulation window was dropped. Lower the learning rate, look at "
            f"the data of this batch, or choose on_nonfinite='skip'"
        )


class Unsupported(TwinkleError, TypeError):
    """A verb that this backend does not have."""

    def __init__(self, verb: str, backend: str, instead: str) -> None:
        super().__init__(f"{backend} has no {verb}(). Use {instead}.")
