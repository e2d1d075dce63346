"""One setting of config.json at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.errors import ModelError
from baton.model_settings import positive_number, switch, whole_number


def test_a_setting_of_its_type_is_taken() -> None:
    assert whole_number({"n": 3}, "n") == 3
    assert positive_number({"x": 3}, "x") == positive_number({"x": None}, "x", 3.0) == 3.0
    assert switch({"on": True}, "on")
    assert not switch({"on": False}, "on", default=True)
    assert not switch({"on": None}, "on")


@pytest.mark.parametrize("value", [None, 0, -1, 1.0, "3", True, [3]])
def test_what_is_no_whole_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ModelError, match=r"^config\.json: n is .*; it must be a positive integer"):
        whole_number({"n": value}, "n")


@pytest.mark.parametrize("value", [None, 0, -0.5, math.inf, math.nan, 10**400, "3", True])
def test_what_is_no_positive_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ModelError, match=r"^config\.json: x is .*; write a positive number"):
        positive_number({"x": value}, "x")


@pytest.mark.parametrize("value", [0, 1, "false"])
def test_what_is_no_switch_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ModelError, match=r"^config\.json: on is .*; write true or false"):
        switch({"on": value}, "on")
