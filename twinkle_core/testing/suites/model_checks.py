"""Building the models that a suite compares (L2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from twinkle_core.contracts.adapters import BASE
from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.errors import CannotBuild
from twinkle_core.testing.suites.base import Suite
from twinkle_core.testing.suites.training import Rows, seeded
from twinkle_core.testing.toys import random_rows


class ModelChecks(Suite):
    """What all checks of models share; see ``ModelSuite``."""

    kind = "model"
    adapters: ClassVar[bool] = True
    packing: ClassVar[bool] = True
    full_parameters: ClassVar[bool] = True
    ranks: ClassVar[bool] = True
    vocabulary: ClassVar[int] = 11
    learning_rate: ClassVar[float] = 1e-2
    sgd_learning_rate: ClassVar[float] = 0.3
    tolerance: ClassVar[float] = 5e-6
    generate_arguments: ClassVar[Mapping[str, Any]] = {}

    # ------------------------------------------------------------------------------------------------ what is checked

    def adapter_config(self, name: str) -> Any:
        """The config of an adapter; override it."""
        why = f"{type(self).__name__} has no adapter_config(name); write one, or say adapters = False"
        raise CannotBuild.because(self.kind, type(self).__name__, why)

    def capabilities(self, model: TwinkleModel) -> frozenset[str]:
        """What the model declares beyond what all have. A model without an Engine overrides it."""
        return frozenset(model.engine.capabilities)  # type: ignore[attr-defined]

    @classmethod
    def trained(cls) -> list[str]:
        """Adapters that are trained one after the other: '' is the model as a whole."""
        return [BASE] * cls.full_parameters + ["a"] * cls.adapters

    def ready(self, *names: str, optimizer: str = "sgd", lr: float | None = None) -> TwinkleModel:
        """A new model with these adapters, each with an optimizer ('': the whole model)."""
        if lr is None:
            lr = self.sgd_learning_rate if optimizer == "sgd" else self.learning_rate
        with seeded():
            model: TwinkleModel = self.build()
            for name in names:
                if name != BASE:
                    model.add_adapter_to_model(name, self.adapter_config(name))
                model.set_optimizer(optimizer, lr=lr, adapter_name=name)
        return model

    @pytest.fixture
    def model(self) -> TwinkleModel:
        """A new model without adapters."""
        return self.ready()

    @pytest.fixture
    def rows(self) -> Rows:
        """Encoded rows of different lengths, and a different number of labels."""
        return random_rows([6, 3, 9, 2, 5], vocabulary=self.vocabulary)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Tests that take ``name`` run for the whole model and for an adapter, as far as there are these."""
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", self.trained(), ids=lambda name: "adapter" if name else "whole")

    def network(self, model: TwinkleModel) -> torch.nn.Module:
        """What a patch reaches: the torch module that the model computes with."""
        module = getattr(model, "module", None)
        assert isinstance(module, torch.nn.Module), (
            f"{type(model).__name__}.module is {module!r}: patches reach the network by it, so give it the torch module"
        )
        return module
