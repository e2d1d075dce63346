from __future__ import annotations

from baton.health import WorkerHealth
from baton.pool.health_watch import HealthWatch

WELL = WorkerHealth(is_ready=True, is_alive=True)
WEDGED = WorkerHealth(is_ready=False, is_alive=False, reason="no step for 40 s")


def test_silence_is_shown_after_3_seconds_and_leads_to_a_replacement_after_15() -> None:
    watch = HealthWatch(15.0)
    seen = []
    for _ in range(15):
        watch.heard(1.0, None)
        seen.append((watch.is_unhealthy, watch.is_lost))
    assert [shown for shown, _ in seen] == [False] * 2 + [True] * 13
    assert [lost for _, lost in seen] == [False] * 14 + [True]
    assert watch.reason == "it does not answer"


def test_a_worker_that_says_it_is_stuck_is_shown_at_once() -> None:
    watch = HealthWatch(15.0)
    watch.heard(1.0, WEDGED)
    assert (watch.is_unhealthy, watch.is_lost, watch.reason) == (True, False, "no step for 40 s")
    for _ in range(14):
        watch.heard(1.0, WEDGED)
    assert watch.is_lost


def test_any_progress_starts_the_count_again() -> None:
    watch = HealthWatch(15.0)
    for _ in range(3):
        for _ in range(14):
            watch.heard(1.0, None)
        assert not watch.is_lost
        watch.heard(1.0, WELL)
        assert not watch.is_unhealthy


def test_a_pool_that_was_stopped_itself_blames_nobody() -> None:
    watch = HealthWatch(15.0)
    # It slept for a minute between its question and the look for an answer.
    watch.heard(60.0, None)
    assert not watch.is_lost


def test_a_silence_of_everything_is_shown_and_nothing_follows() -> None:
    watch = HealthWatch(15.0)
    for _ in range(60):
        watch.heard(1.0, None, is_excused=True)
    assert (watch.is_unhealthy, watch.is_lost) == (True, False)
    for _ in range(11):
        watch.heard(1.0, None)
    assert not watch.is_lost
    watch.heard(1.0, None)
    assert watch.is_lost
