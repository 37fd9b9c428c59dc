"""All verbs of the training loop, written once over engine, store and session (L2)."""

from __future__ import annotations

from typing import Any

from twinkle_core import plugins
from twinkle_core.contracts.adapters import AdapterStore
from twinkle_core.contracts.engine import Engine
from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.train.setup import SetupVerbs
from twinkle_core.train.storage import StorageVerbs
from twinkle_core.train.update import UpdateVerbs


class SessionModel(UpdateVerbs, SetupVerbs, StorageVerbs, TwinkleModel):
    """A model over an engine (how to compute) and a store (whose weights). A backend derives from it and adds a constructor.

    ``forward.py`` computes, ``update.py`` closes windows, ``setup.py`` sets up and reports, ``storage.py`` saves and loads.

    Args:
        engine: how to compute.
        adapters: whose weights.
    """

    def __init__(self, engine: Engine, adapters: AdapterStore) -> None:
        super().__init__(engine, adapters)
        plugins.hooks().twinkle_model_created(model=self)

    @property
    def module(self) -> Any:
        """The torch network that it computes with: what a patch reaches."""
        return self.engine.module
