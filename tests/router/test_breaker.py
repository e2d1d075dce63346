"""The breaker's three states, against times written out by hand."""

from __future__ import annotations

from router.breaker import Breaker


def opened(now: float = 100.0) -> Breaker:
    breaker = Breaker()
    for _ in range(5):
        assert breaker.allows(now)
        breaker.failed(now)
    return breaker


def test_five_failures_in_a_row_open_it_for_a_second() -> None:
    breaker = opened(100.0)
    assert not breaker.allows(100.0)
    assert not breaker.allows(100.99)
    assert breaker.allows(101.0)


def test_a_success_in_between_forgets_the_failures() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(4):
            breaker.failed(1.0)
        breaker.succeeded()
    assert breaker.allows(1.0)


def test_half_open_admits_one_attempt_at_a_time() -> None:
    breaker = opened(100.0)
    breaker.placed()
    assert not breaker.allows(105.0)
    # The probe told nothing: its client left.
    breaker.ended()
    assert breaker.allows(105.0)
    breaker.placed()
    breaker.succeeded()
    assert breaker.allows(105.0)
    breaker.placed()
    assert breaker.allows(105.0)


def test_a_failed_probe_doubles_the_pause_up_to_a_limit() -> None:
    breaker, now, pauses = opened(0.0), 0.0, []
    for _ in range(7):
        pause = next(step for step in range(1, 100) if breaker.allows(now + step))
        pauses.append(pause)
        now += pause
        breaker.placed()
        breaker.failed(now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
