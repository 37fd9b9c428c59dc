"""Running a suite over a component with a planted fault."""

from __future__ import annotations

import pytest

from twinkle_core.testing import runner


@pytest.fixture
def caught():
    """The names of the tests that a component fails, without their parameters; ``texts`` holds what they say."""

    def run(suite, component, **attributes):
        cls = type("TestPlanted", (suite,), {"component": component, **attributes})
        outcomes = runner.run(cls)
        assert len(outcomes) > 5 or "_unusable" in vars(cls)
        run.texts = {o.test.partition("[")[0]: o.text for o in outcomes if o.outcome == runner.FAILED}
        run.expected = {o.test.partition("[")[0]: o.text for o in outcomes if o.outcome == runner.EXPECTED}
        run.left_out = {o.test.partition("[")[0]: o.text for o in outcomes if o.outcome == runner.LEFT_OUT}
        return set(run.texts)

    def once(suite, component, **attributes):
        """What is told where there is nothing to check: one failure, and no other test."""
        run(suite, component, **attributes)
        (text,) = run.texts.values()
        assert not run.left_out
        return text

    run.once = once
    return run
