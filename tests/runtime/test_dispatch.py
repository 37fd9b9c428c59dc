"""Declarations of remote calls: checked when written, found through inheritance, without effect here."""

from __future__ import annotations

import pytest

from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.runtime.dispatch import RemoteSpec, remote_class, remote_function, remote_spec


def test_a_declaration_changes_nothing_locally_and_is_inherited():
    class Parent:
        @remote_function(dispatch="slice_dp", collect="sum")
        def f(self, x):
            return x + 1

    @remote_class(execute="first")
    class Child(Parent):
        def f(self, x):
            return x + 2

    assert Child().f(1) == 3
    assert remote_spec(Child, "f") == RemoteSpec("slice_dp", "all", "sum")
    assert remote_spec(Child, "absent") is None


@pytest.mark.parametrize(("name", "value"), [("dispatch", "slices"), ("execute", "last"), ("collect", "average")])
def test_a_misspelt_declaration_is_refused_at_once(name, value):
    with pytest.raises(ValueError, match=value):
        remote_function(**{name: value})


def test_every_verb_of_the_contract_is_declared():
    verbs = TwinkleModel.__abstractmethods__
    assert len(verbs) == 27
    assert all(remote_spec(TwinkleModel, verb) is not None for verb in verbs)
