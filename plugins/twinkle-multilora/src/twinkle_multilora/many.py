"""``forward_backward`` of several tenants in one call: checked together, then run one after the other."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twinkle_core.contracts.adapters import BASE
from twinkle_core.errors import BadArgument, BadRow
from twinkle_core.errors.adapters import whose
from twinkle_core.isolation import Attempt, attempt
from twinkle_core.runtime.dispatch import remote_function
from twinkle_core.train import limits
from twinkle_core.train.calls import Asked, Call
from twinkle_core.train.forward import ForwardVerbs
from twinkle_core.train.sessions import one_at_a_time
from twinkle_core.train.together import calling, until_met

if TYPE_CHECKING:
    import torch

    from twinkle_core.contracts.model import Inputs

#: what a call gave, or what it raised
Outcome = Any


class Many(ForwardVerbs):
    """``forward_backward`` for many tenants at once. How the calls run is a subclass's to say; here they take turns."""

    @remote_function(dispatch="slice_each", collect="loss_each")
    @one_at_a_time
    def forward_backward_many(
        self,
        inputs: Mapping[str, Inputs],
        *,
        gradient_accumulation_steps: int | None = None,
        temperature: float = 1.0,
        **loss_args: Any,
    ) -> dict[str, torch.Tensor]:
        """``forward_backward`` of several tenants: in as few passes as the scheduler's token budget allows, where the model has
        a scheduler, else one after the other.

        What comes out is, bit for bit, what a ``forward_backward`` of each tenant alone gives, in any order and company.

        Args:
            inputs: by tenant: encoded rows, one collated batch, or conversations. On several ranks: this rank's, of the same
                tenants on all; ``[]`` where it has none of a tenant's. Where the model lives on workers: all rows, which are
                divided over their data ranks as those of a ``forward_backward`` are.
            gradient_accumulation_steps: becomes each session's.
            temperature: as for ``forward``.
            loss_args: for the losses. A dict whose keys are tenants, by their names or their slots', gives each its own, and
                those that it doesn't name nothing; any other value goes to all.

        Returns:
            By tenant, what its ``forward_backward`` returns: a float where the model lives on workers.

        Raises:
            What ``forward_backward`` raises of a call that can't be: nothing was changed then, of any tenant. BadArgument: a
            tenant is named twice, or the base model; a loss argument names tenants, and something else or one who has no rows
            in this call. What a tenant's loss raises is raised after the others are done.
        """
        with calling(self.engine, "forward_backward_many", self._named_in(inputs)), until_met(self.engine, self.engine.in_step):
            limits.check_temperature(temperature)
            many = self._asked(inputs, gradient_accumulation_steps, temperature)
            own = self._own([asked.session.name for asked in many], loss_args)
        many = [replace(asked, loss_args=own[asked.session.name]) for asked in many]
        # ranks may name tenants in any order, and serve them in one
        order = sorted(many, key=lambda asked: self._slot(asked.session.name)) if self.engine.mesh.world_size > 1 else many
        ready = self._all_ready(order)
        _raise_first(order, ready)
        calls = [call for call in ready if isinstance(call, Call)]
        outcomes = dict(zip(map(id, order), self._run_all(calls), strict=True))
        in_order = [outcomes[id(asked)] for asked in many]
        _raise_first(many, in_order)
        return dict(zip(inputs, in_order, strict=True))

    # ------------------------------------------------------------------------------------------------ inside

    def _named_in(self, inputs: Any) -> str:
        """Whose rows they are, in one order on all ranks: by the names of tenants also where they are given by slots'."""
        known, names = self.adapters.known_as, inputs if isinstance(inputs, Mapping) else ()
        return ", ".join(sorted(known(name) if isinstance(name, str) else str(name) for name in names))

    def _asked(self, inputs: Any, gradient_accumulation_steps: int | None, temperature: float) -> list[Asked]:
        """A call for each tenant, without arguments for its loss."""
        if not isinstance(inputs, Mapping) or not inputs:
            given = {} if isinstance(inputs, Mapping) else type(inputs).__name__
            raise BadArgument("inputs", given, "a dict: each tenant's name, and its rows")
        many: list[Asked] = []
        for name, rows in inputs.items():
            if name is None:  # a verb without a name may mean the only one there is; here nobody is meant
                raise BadArgument("inputs", name, "each tenant once, by its name or its slot's")
            session = self._session(name)
            if session.name == BASE or any(asked.session is session for asked in many):
                raise BadArgument("inputs", name, "each tenant once, by its name or its slot's")
            self._check_enabled("forward_backward_many", session)
            many.append(Asked(session, rows, None, gradient_accumulation_steps, temperature))
        return many

    def _own(self, tenants: Sequence[str], loss_args: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Each tenant's loss arguments: its part of dicts by tenant, and all others whole.

        Raises:
            BadArgument: a dict with names of tenants and other keys, or a tenant who is not in this call, or one twice.
        """
        own: dict[str, dict[str, Any]] = {name: {} for name in tenants}
        for key, value in loss_args.items():
            meant = {given: self._tenant(given) for given in value} if isinstance(value, Mapping) else {}
            if not any(meant.values()):
                for args in own.values():
                    args[key] = value
                continue
            for given, name in meant.items():
                if name not in own or key in own[name]:
                    raise BadArgument(key, given, f"a dict by tenant, each once, of tenants in this call: {', '.join(tenants)}")
                own[name][key] = value[given]
        return own

    def _tenant(self, given: Any) -> str | None:
        """Whose name, or whose slot's, it is."""
        name = self.adapters.known_as(given) if isinstance(given, str) else BASE
        return name if name != BASE and name in self.sessions else None

    def _slot(self, name: str) -> int:
        return int(self.adapters.slot(name).index)  # type: ignore[attr-defined]

    def _all_ready(self, many: Sequence[Asked]) -> list[Call | BaseException]:
        """Calls that are checked and on the device, or what is wrong with them."""
        return [result_of(attempt(functools.partial(self._ready_on_all, asked))) for asked in many]

    def _ready_on_all(self, asked: Asked) -> Call:
        """``_ready``, for which ranks meet: a call that is wrong on one of them is wrong on all."""
        with calling(self.engine, "forward_backward_many", asked.session.name), until_met(self.engine):
            return self._ready(asked)

    def _run_all(self, calls: Sequence[Call]) -> Sequence[Outcome]:
        """Calls of different sessions. What one raises is its outcome."""
        return [self._attempt(call) for call in calls]

    def _attempt(self, call: Call) -> Outcome:
        done = attempt(lambda: self._run(call))  # what it raises is raised to the tenant whose call it is
        return result_of(done)


def result_of(done: Attempt[Any]) -> Any:
    """What was made, or what was raised."""
    return done.value if done.error is None else done.error


def _raise_first(many: Sequence[Asked], outcomes: Sequence[Any]) -> None:
    for asked, outcome in zip(many, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            if isinstance(outcome, BadRow):
                outcome.adapter = asked.session.name
            outcome.add_note(f"twinkle: in the call of {whose(asked.session.name)}")
            raise outcome
