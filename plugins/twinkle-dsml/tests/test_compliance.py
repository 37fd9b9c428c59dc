"""Every template and release against the compliance suite."""

from __future__ import annotations

import pytest

from twinkle_core.testing import TemplateSuite, compliance
from twinkle_dsml.releases import RELEASES
from twinkle_dsml.template import DSMLTemplate
from twinkle_dsml.testing import tiny_tokenizer

CLASSES = compliance("twinkle-dsml", "template")
globals().update(CLASSES)


def test_every_template_has_its_suite():
    assert len(CLASSES) == 3


class TestEveryRelease(TemplateSuite):
    """Chat mode, in which all releases take conversations without thoughts."""

    @pytest.fixture(params=list(RELEASES))
    def template(self, request):
        self.arguments = {**self.arguments, "release": request.param}
        return self.build()

    component = DSMLTemplate
    arguments = {"model_id": tiny_tokenizer(), "enable_thinking": False}


class TestLastTurn(TemplateSuite):
    """Only what follows the last question is trained."""

    component = DSMLTemplate
    arguments = {"model_id": tiny_tokenizer(), "enable_thinking": False, "train_on": "last"}
    trains_every_turn = False
