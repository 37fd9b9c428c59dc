"""What a suite is told by class attributes is checked when its class is made, and each mistake is one error."""

from __future__ import annotations

import pytest

from twinkle_core import Loss
from twinkle_core.errors import BadSuite, UnknownCheck
from twinkle_core.testing import LossSuite, MetricSuite, ModelSuite, TemplateSuite


def made(suite, **attributes):
    return type("TestMine", (suite,), attributes)


@pytest.mark.parametrize(
    ("suite", "attributes", "says"),
    [
        (LossSuite, {"pakcing": False}, "TestMine has 'pakcing', which is no option of its suite. Did you mean 'packing'?"),
        (LossSuite, {"expected_failure": {}}, "Did you mean 'expected_failures'?"),
        (TemplateSuite, {"trains_every_turns": False}, "Did you mean 'trains_every_turn'?"),
        (LossSuite, {"packing": "no"}, "TestMine: packing is 'no'; it is to be True or False"),
        (LossSuite, {"packing": 0}, "packing is 0; it is to be True or False"),
        (LossSuite, {"arguments": "gamma=2"}, "arguments is 'gamma=2'; it is to be a dict"),
        (LossSuite, {"expected_failures": ["test_is_differentiable"]}, "it is to be a dict"),
        (LossSuite, {"expected_failures": {"test_is_differentiable": ""}}, "it is to be the reason, a text"),
        (MetricSuite, {"group": "2"}, "group is '2'; it is to be a whole number"),
        (MetricSuite, {"tolerance": "1e-3"}, "tolerance is '1e-3'; it is to be a number"),
        (MetricSuite, {"by_the_clock": "seconds"}, "it is to be a set, list or tuple of names"),
        (ModelSuite, {"adapters": None}, "adapters is None; it is to be True or False"),
    ],
)
def test_a_mistake_is_one_error(suite, attributes, says):
    with pytest.raises(BadSuite) as caught:
        made(suite, **attributes)
    assert says in str(caught.value)


def test_a_mistake_in_an_option_of_a_suite_between_is_found():
    between = made(LossSuite, packing=False)
    with pytest.raises(BadSuite, match="Did you mean 'packing'"):
        made(between, packng=True)


@pytest.mark.parametrize(
    "attributes",
    [
        {"packing": False, "float64": True, "arguments": {"gamma": 2.0}, "expected_failures": {}},
        {"lengths": (3, 5), "_pakcing": True, "__annotations__": {"packings": "int"}, "packings": False},
        {"floats": 8},  # an attribute of its own, of another kind than the option that it resembles
        {"component": Loss, "packed": lambda self: None, "pytestmark": [pytest.mark.slow]},
    ],
)
def test_what_is_right_or_its_own_passes(attributes):
    made(LossSuite, **attributes)


def test_numbers_may_be_written_without_a_point():
    made(MetricSuite, tolerance=1, by_the_clock={"seconds"})


def test_tests_that_are_not_there_are_refused_by_name():
    with pytest.raises(UnknownCheck, match="Did you mean 'test_is_differentiable'"):
        made(LossSuite, expected_failures={"test_is_diferentiable": "it is not"})
