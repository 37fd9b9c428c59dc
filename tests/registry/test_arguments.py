"""Keyword arguments against signatures."""

from __future__ import annotations

import pytest
import torch

from twinkle_core.arguments import check
from twinkle_core.errors import MissingArgument, ReservedArgument, WrongArgument


def function(a, b=1, *, c, d=2):
    return a, b, c, d


def test_names_that_exist_pass():
    check(function, {"a": 1, "b": 2, "c": 3, "d": 4}, complete=True)
    check(function, ["b"])
    check(torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}, positional=1, complete=True)


def test_a_misspelt_name_is_told():
    with pytest.raises(WrongArgument, match=r"AdamW has no parameter 'weigth_decay'. Did you mean 'weight_decay'"):
        check(torch.optim.AdamW, {"weigth_decay": 0.1}, positional=1)
    with pytest.raises(WrongArgument, match="the loss has no parameter 'e'"):
        check(function, {"e": 1}, name="the loss")


def test_what_the_caller_fills_in_is_refused():
    with pytest.raises(ReservedArgument, match=r"AdamW gets its 'params' from twinkle"):
        check(torch.optim.AdamW, {"params": []}, positional=1)


def test_what_is_missing_is_told():
    with pytest.raises(MissingArgument, match="function needs 'a', 'c'"):
        check(function, {"b": 1}, complete=True)
    check(function, {"c": 1}, positional=1, complete=True)


def test_open_signatures_take_every_name():
    check(lambda **kwargs: kwargs, {"anything": 1})
    check(dict, {"anything": 1})  # no readable signature


def test_positional_only_parameters_are_not_keywords():
    def only(x, /):
        return x

    with pytest.raises(WrongArgument):
        check(only, {"x": 1})


def test_a_callable_object_is_checked_by_its_call():
    class Callable:
        def __call__(self, temperature):
            return temperature

    with pytest.raises(WrongArgument, match=r"Callable has no parameter 'temp'. Did you mean 'temperature'"):
        check(Callable(), {"temp": 1})
