"""What a start does where kernels fail, and what it loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.errors import ConfigError, InternalError
from engine.kernels.choices import UNMEASURED
from engine.kernels.tuning import loaded, tune
from tests.engine.kernels.tuning_fakes import FakeFunction, FakeTimer, contest, fake_launch, norm_launch


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


FAILURES = [
    (torch.OutOfMemoryError("tried to allocate 2 GiB"), ConfigError, "ran out of the device's memory"),
    (RuntimeError("an illegal memory access"), InternalError, "illegal memory access"),
]


@pytest.mark.parametrize(("error", "raised", "words"), FAILURES)
@pytest.mark.parametrize("where", ["data", "copies", "contest", "contest's run"])
def test_failures_are_named_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, raised: type[ConfigError], words: str
) -> None:
    fail, contests, made = failing(error), [], norm_launch
    if where == "data":
        made = fail
    elif where == "copies":
        monkeypatch.setattr("engine.kernels.tuning.copied", fail)
    else:
        sides = fail if where == "contest" else lambda *_: (fail, fail)
        contests = [replace(contest([]), sides=sides)]
    timer = FakeTimer(3.0, 2.0, 1.0)

    with pytest.raises(raised, match=words) as caught:
        tune([norm_launch()], contests, timer=timer, made=lambda _: made())

    assert caught.value.field == "kernels"
    assert "set kernels to torch" in caught.value.message


def test_memory_that_runs_out_in_a_run_is_not_the_configurations_fault() -> None:
    function = FakeFunction(failing=(8,), error=torch.OutOfMemoryError("tried to allocate 2 GiB"))

    with pytest.raises(ConfigError, match="ran out of the device's memory"):
        tune([fake_launch(function)], timer=FakeTimer(2.0, 1.0))


def test_a_call_is_loaded_as_it_was_chosen_and_as_an_unmeasured_one_runs() -> None:
    function = FakeFunction()
    launch = fake_launch(function)
    choices = tune([launch], timer=FakeTimer(3.0, 2.0, 1.0))
    assert choices.config(launch).num_warps == 16
    function.calls.clear()

    assert loaded([launch], choices) == choices

    assert sorted(function.loads) == [4, 16]
    assert function.calls == []


def test_where_the_first_configuration_does_not_load_the_next_one_is_chosen() -> None:
    launch = fake_launch(FakeFunction(failing=(4,)))

    choices = loaded([launch], UNMEASURED)

    assert choices.config(launch).num_warps == 8
    with pytest.raises(InternalError, match=r"kernel fake loads .*shared memory.*set kernels to torch"):
        loaded([fake_launch(FakeFunction(failing=(4, 8, 16)))], UNMEASURED)
