from __future__ import annotations

import random

import pytest

from baton.cluster.restart_policy import RestartPolicy, pause_after_leaving_s


def pauses(policy: RestartPolicy, lives_s: list[float]) -> list[float | None]:
    return [policy.pause_s(lived_s) for lived_s in lives_s]


@pytest.mark.parametrize("seed", range(20))
def test_pauses_grow_from_a_fifth_of_a_second_to_five_and_are_jittered(seed: int) -> None:
    got = pauses(RestartPolicy(random.Random(seed)), [1.0] * 4)
    # 0.2 s x 3 each time, at most 5 s, of which the upper half is drawn.
    for pause_s, ceiling_s in zip(got, [0.2, 0.6, 1.8, 5.0], strict=True):
        assert pause_s is not None
        assert ceiling_s / 2 <= pause_s <= ceiling_s + 1e-9


def test_two_policies_do_not_pause_alike() -> None:
    assert RestartPolicy(random.Random(1)).pause_s(1.0) != RestartPolicy(random.Random(2)).pause_s(1.0)


def test_the_fifth_quick_death_in_a_row_is_the_last() -> None:
    got = pauses(RestartPolicy(random.Random(0)), [0.1, 29.9, 3.0, 0.0, 1.0])
    assert [pause is None for pause in got] == [False, False, False, False, True]


def test_half_a_minute_of_life_starts_a_new_count() -> None:
    policy = RestartPolicy(random.Random(0))
    assert None not in pauses(policy, [1.0] * 4)
    after_health = policy.pause_s(30.0)
    assert after_health is not None
    assert after_health <= 0.2
    assert [pause is None for pause in pauses(policy, [1.0] * 4)] == [False, False, False, True]


def test_what_left_on_request_comes_back_at_once_unless_it_leaves_at_once() -> None:
    assert pause_after_leaving_s(3.0) == 0.0
    assert pause_after_leaving_s(0.1) == pytest.approx(0.4)
