"""When a client asks again: the policy by itself, with a clock and chance that the test holds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton import Retry
from baton.errors import (
    BY_CODE,
    BatonError,
    Cancelled,
    ConfigError,
    Draining,
    Overloaded,
    Unavailable,
)
from baton.retry import Tries


class Longest(random.Random):
    """Always draws the longest pause."""

    def uniform(self, a: float, b: float) -> float:
        assert a == 0.0
        return b


def tries(**policy: Any) -> Tries:
    return Tries(Retry(**policy), Longest())


def word(error: BatonError, now: float, of: Tries, *, begun: bool = False) -> float | None:
    """A router's own error."""
    return of.pause_after(error, now, is_routers_word=True, has_begun=begun)


def loss(now: float, of: Tries, *, begun: bool = False) -> float | None:
    return of.pause_after(Unavailable("gone"), now, is_routers_word=False, has_begun=begun)


def test_pauses_double_up_to_the_longest() -> None:
    some = tries(initial_s=0.5, max_s=3.0)
    assert [loss(0.0, some) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_pauses_are_spread_from_nothing_to_the_longest() -> None:
    drawn = [loss(0.0, Tries(Retry(initial_s=2.0), random.Random(seed))) for seed in range(200)]
    numbers = [pause for pause in drawn if pause is not None]
    assert len(numbers) == 200
    assert min(numbers) < 0.1
    assert 1.9 < max(numbers) <= 2.0
    # The mean of 200 uniform draws from 0 to 2 is 1, its deviation 2 / sqrt(12 * 200) = 0.04.
    assert sum(numbers) / 200 == pytest.approx(1.0, abs=0.2)


def test_all_tries_share_one_budget_from_the_first_failure() -> None:
    some = tries(total_s=10.0)
    assert loss(100.0, some) is not None
    # 0.1 s are left, and the longest pause is 0.5 s by now.
    assert loss(109.9, some) == pytest.approx(0.1)
    assert loss(110.1, some) is None


def test_a_new_token_begins_a_new_budget() -> None:
    some = tries(total_s=10.0, initial_s=0.5, max_s=8.0)
    assert [loss(at, some) for at in (0.0, 1.0)] == [0.5, 1.0]
    some.progress()
    assert not some.is_searching
    assert loss(60.0, some, begun=True) == 0.5
    assert loss(70.1, some, begun=True) is None


def test_a_budget_of_nothing_never_asks_again() -> None:
    assert loss(0.0, tries(total_s=0.0)) is None
    leaving = Draining("leaving")
    assert tries(total_s=0.0).pause_after(leaving, 0.0, is_routers_word=True, was_accepted=True) is None


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_calls_are_counted_the_first_one_too(max_attempts: int) -> None:
    some = tries(max_attempts=max_attempts)
    made = 1
    while loss(0.0, some) is not None:
        made += 1
    assert made == max_attempts


def test_a_full_router_is_asked_when_it_says() -> None:
    some = tries(total_s=10.0, initial_s=0.25)
    assert word(Overloaded("full", retry_after_s=4.0), 0.0, some) == 4.25
    # 7 s are over; 4 more would be too long.
    assert word(Overloaded("full", retry_after_s=4.0), 7.0, some) is None


def test_only_what_may_pass_is_tried_again() -> None:
    """The errors whose table in baton/errors.py says `retry`, and no other."""
    passing = {code for code, cls in BY_CODE.items() if word(cls("x"), 0.0, tries()) is not None}
    assert passing == {"OVERLOADED", "UNAVAILABLE", "DRAINING", "PEER_LOST", "KV_TRANSFER_FAILED"}


@pytest.mark.parametrize("error", [Overloaded("x"), Unavailable("x")], ids=["full", "no worker"])
def test_after_the_first_token_a_routers_word_ends_the_answer(error: BatonError) -> None:
    assert word(error, 0.0, tries(), begun=True) is None
    # Unless it is in the middle of looking for a router that goes on.
    some = tries()
    assert loss(0.0, some, begun=True) is not None
    assert word(error, 0.1, some, begun=True) is not None


def test_a_router_that_leaves_or_is_gone_is_left_at_any_time() -> None:
    for begun in (False, True):
        assert word(Draining("leaving"), 0.0, tries(), begun=begun) is not None
        assert loss(0.0, tries(), begun=begun) is not None


def test_a_router_that_leaves_as_planned_costs_a_request_that_waited_there_nothing() -> None:
    some = tries(total_s=10.0, initial_s=0.5)
    assert word(Unavailable("no worker"), 0.0, some) == 0.5
    leaving = Draining("leaving")
    pause_s = some.pause_after(leaving, 60.0, is_routers_word=True, was_accepted=True)
    assert pause_s == 0.5
    # One that takes nothing new is another matter.
    assert word(leaving, 70.0, some) is not None
    assert word(leaving, 70.1, some) is None
    other = tries(total_s=10.0)
    assert word(Unavailable("no worker"), 0.0, other) is not None
    lost = Unavailable("gone")
    assert other.pause_after(lost, 60.0, is_routers_word=False, was_accepted=True) is None


def test_calls_that_a_dying_router_cancels_are_losses() -> None:
    cancelled = Cancelled("by the other end")
    assert tries().pause_after(cancelled, 0.0, is_routers_word=False, has_begun=True) is not None
    assert word(cancelled, 0.0, tries()) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"total_s": -1.0}, "total_s"),
        ({"total_s": float("inf")}, "total_s"),
        ({"initial_s": "soon"}, "initial_s"),
        ({"max_s": True}, "max_s"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": 1.5}, "max_attempts"),
    ],
)
def test_a_bad_policy_is_refused_by_field(fields: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=field) as error:
        Retry(**fields)
    assert error.value.field == field
