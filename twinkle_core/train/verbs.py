"""All verbs of the training loop, written once over engine, store and session (L2)."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import Any

from twinkle_core import plugins
from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.runtime.calls import Rows
from twinkle_core.runtime.dispatch import remote_class
from twinkle_core.runtime.proxy import Remote
from twinkle_core.train import losses, micro
from twinkle_core.train.setup import SetupVerbs
from twinkle_core.train.storage import StorageVerbs
from twinkle_core.train.update import UpdateVerbs


class Announced(ABCMeta):
    """Classes whose models are announced once they are complete: when the constructor of the outermost class is through."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().__call__(*args, **kwargs)
        if not isinstance(model, Remote):  # a proxy's model is announced where it lives
            plugins.hooks().twinkle_model_created(model=model)
        return model

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's, which ``inspect`` would not look for behind a ``__call__``."""
        whole: Any = inspect.signature(cls.__init__)  # type: ignore[misc]
        return whole.replace(parameters=list(whole.parameters.values())[1:])  # type: ignore[no-any-return]


@remote_class(execute="all")
class SessionModel(UpdateVerbs, SetupVerbs, StorageVerbs, TwinkleModel, metaclass=Announced):
    """A model over an engine (how to compute) and a store (whose weights). A backend derives from it and adds a constructor.

    ``forward.py`` computes, ``update.py`` closes windows, ``setup.py`` sets up and reports, ``storage.py`` saves and loads.

    Args:
        engine: how to compute.
        adapters: whose weights.
    """

    @property
    def module(self) -> Any:
        """The torch network that it computes with: what a patch reaches."""
        return self.engine.module

    def grouping(self, *, adapter_name: str | None = None) -> Any:
        """The session's name, the ``groups`` of its loss, where it has some, and whether its processor pads on the left."""
        session = self._session(adapter_name)
        return session.name, losses.grouping(self._loss(session)), self._pads_left(session)

    def share(self, collect: str, answer: Any, *, adapter_name: str | None = None) -> Any:
        """A loss as (sum, weight) of this rank; an output with how its rows lie."""
        session = self._session(adapter_name)
        if collect == "loss":
            total, weight = session.last_sums
            return float(total), float(weight)
        waiting = session.pending.get(False) or session.pending.get(True) or []
        packed = any(micro.is_packed(part.batch.inputs) for part in waiting)
        return Rows(answer, packed, self._pads_left(session))
