"""One bucket: what it holds, what others draw from it, and what is assumed while they are not heard."""

from __future__ import annotations

import pytest

from router.tenancy.token_bucket import TokenBucket, backlog


def emptied(per_minute: int = 60) -> TokenBucket:
    bucket = TokenBucket(per_minute)
    bucket.take(0.0, per_minute)
    return bucket


def test_a_new_bucket_holds_a_minutes_worth_and_no_more() -> None:
    assert [TokenBucket(60).level(now) for now in (0.0, 5.0, 1e9)] == [60, 60, 60]


def test_an_empty_one_refills_evenly() -> None:
    bucket = emptied(120)
    assert [bucket.level(now) for now in (0.0, 0.5, 10.0, 60.0, 61.0)] == [0, 1, 20, 120, 120]


def test_a_clock_that_stands_still_or_goes_back_refills_nothing() -> None:
    bucket = emptied()
    assert [bucket.level(now) for now in (10.0, 10.0, 9.0, 10.0)] == [10, 10, 10, 10]


def test_the_wait_is_until_what_is_missing_has_come() -> None:
    bucket = emptied()
    assert (bucket.wait_s(0.0, 1), bucket.wait_s(0.0, 30), bucket.wait_s(20.0, 30)) == (1, 30, 10)
    assert bucket.wait_s(30.0, 30) == 0


@pytest.mark.parametrize("per_minute", [1, 7, 60, 997, 10**12])
def test_after_the_wait_there_is_enough(per_minute: int) -> None:
    bucket = emptied(per_minute)
    for amount in (1, per_minute / 3, per_minute, 5 * per_minute):
        now = 1000.1 + bucket.wait_s(1000.1, amount)
        assert bucket.wait_s(now, amount) == 0


def test_more_than_it_ever_holds_passes_when_it_is_full_and_is_paid_back() -> None:
    bucket = TokenBucket(60)
    assert bucket.wait_s(0.0, 100) == 0
    bucket.take(0.0, 100)
    assert bucket.level(0.0) == -40
    assert bucket.wait_s(0.0, 1) == 41
    # Full again after 100 s, and only then does another one pass.
    assert (bucket.wait_s(90.0, 100), bucket.wait_s(100.0, 100)) == (10, 0)


def test_what_others_took_is_missing_here() -> None:
    bucket = TokenBucket(60)
    bucket.take(0.0, 10)
    bucket.hear(0.0, 45)
    assert (bucket.level(0.0), bucket.wait_s(0.0, 10)) == (5, 5)


def steady(others_per_s: float, until: int = 120) -> TokenBucket:
    """A bucket of 60 per minute; others have taken evenly, heard once a second; it is empty then."""
    bucket = TokenBucket(60)
    for second in range(until + 1):
        bucket.hear(float(second), others_per_s)
    bucket.take(float(until), bucket.level(float(until)))
    return bucket


def test_while_others_are_not_heard_their_last_rate_lowers_the_refill() -> None:
    bucket = steady(0.75)
    bucket.assume(120.0)
    assert bucket.level(160.0) == pytest.approx(0.25 * 40, abs=0.1)
    assert bucket.wait_s(160.0, 20) == pytest.approx(10 / 0.25, rel=0.02)


def test_whatever_others_took_a_tenth_of_the_refill_stays() -> None:
    bucket = steady(5.0)
    bucket.assume(120.0)
    assert bucket.level(220.0) == pytest.approx(10)


def test_others_of_long_ago_are_forgotten() -> None:
    bucket = steady(0.75)
    for second in range(121, 181):
        bucket.hear(float(second), 0)
    bucket.take(180.0, bucket.level(180.0))
    bucket.assume(180.0)
    assert bucket.level(200.0) == pytest.approx(20, rel=0.01)


def test_what_was_assumed_is_not_drained_again_when_it_is_heard() -> None:
    bucket = steady(0.75)
    bucket.assume(120.0)
    assert bucket.level(160.0) == pytest.approx(10, abs=0.1)
    # They went on as assumed, and it is heard late and in parts.
    bucket.hear(160.0, 10)
    bucket.hear(160.0, 20)
    assert bucket.level(160.0) == pytest.approx(10, abs=0.1)
    # From here on it is more than was assumed.
    bucket.hear(160.0, 5)
    assert bucket.level(160.0) == pytest.approx(5, abs=0.1)


def test_when_others_are_heard_again_the_refill_is_whole() -> None:
    bucket = steady(0.75)
    bucket.assume(120.0)
    level = bucket.level(130.0)
    bucket.hear(130.0, 0)
    assert bucket.level(140.0) == pytest.approx(level + 10)


def test_a_falsehood_puts_nobody_behind_for_more_than_ten_minutes() -> None:
    bucket = TokenBucket(60)
    bucket.hear(0.0, 1e15)
    assert bucket.wait_s(0.0, 60) == 11 * 60
    # What this router itself let through counts in full.
    bucket.take(0.0, 100)
    bucket.hear(0.0, 1e15)
    assert bucket.level(0.0) == -700


@pytest.mark.parametrize(
    ("amounts", "missing"),
    [
        ([], 0),
        ([0, 0, 0], 0),
        ([0, 0, 7], 7),
        ([7, 0, 0], 0),
        ([25, 0, 0], 5),
        ([10, 10, 10, 10, 10, 10], 10),
        ([60, 0, 0, 0, 0, 30], 40),
        ([200, 0], 190),
    ],
)
def test_a_backlog_is_what_a_bucket_of_60_misses_that_refills_10_between(
    amounts: list[float], missing: float
) -> None:
    assert backlog(60, amounts, 10) == missing
