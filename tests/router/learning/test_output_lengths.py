"""Expected output lengths against quantiles of sorted lists."""

from __future__ import annotations

import math
import random

import pytest

from router.learning.output_lengths import OutputLengths

NO_DECAY = 1.0


def quantile(lengths: list[int], fraction: float) -> int:
    """The smallest length that `fraction` of them do not exceed."""
    return sorted(lengths)[math.ceil(fraction * len(lengths)) - 1]


def test_before_any_answer_max_tokens_is_expected() -> None:
    lengths = OutputLengths()
    assert lengths.expected(500) == 500
    assert lengths.expected(500, 499) == 500
    assert lengths.expected(1) == 1


@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.99])
def test_short_answers_have_their_exact_quantile(fraction: float) -> None:
    rng, lengths, seen = random.Random(1), OutputLengths(fraction, decay=NO_DECAY), list[int]()
    for _ in range(400):
        seen.append(rng.randint(1, 15))
        lengths.observe(100, seen[-1])
    assert lengths.expected(100) == quantile(seen, fraction)
    for num_so_far in range(1, 12):
        longer = [length for length in seen if length > num_so_far]
        assert lengths.expected(100, num_so_far) == quantile(longer, fraction)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_any_answers_have_their_quantile_within_a_bin(seed: int, fraction: float) -> None:
    rng, lengths, seen = random.Random(seed), OutputLengths(fraction, decay=NO_DECAY), list[int]()
    for _ in range(2000):
        seen.append(min(int(rng.lognormvariate(5, 1)), 4096))
        lengths.observe(4096, seen[-1])
    for num_so_far in (0, 10, 100, 300, 1000):
        longer = [length for length in seen if length > num_so_far]
        assert len(longer) >= 8
        expected = quantile(longer, fraction)
        assert lengths.expected(4096, num_so_far) == pytest.approx(expected, rel=0.125, abs=1)


def test_what_is_expected_lies_between_the_next_token_and_max_tokens() -> None:
    rng, lengths = random.Random(2), OutputLengths()
    for _ in range(3000):
        max_tokens = rng.choice([1, 7, 64, 1000, 30_000])
        num_so_far = rng.randrange(max_tokens)
        assert num_so_far + 1 <= lengths.expected(max_tokens, num_so_far) <= max_tokens
        lengths.observe(max_tokens, rng.randint(0, max_tokens))


def test_classes_of_max_tokens_are_kept_apart() -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.observe(1000, 10)
        lengths.observe(4000, 800)
    assert lengths.expected(1000) == 10
    assert lengths.expected(600) == 10  # of the class 513 to 1024
    assert lengths.expected(4000) == pytest.approx(800, rel=0.125)


def test_a_class_that_is_little_known_is_like_all_others() -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.observe(4000, 12)
    for _ in range(7):
        lengths.observe(100, 3)
    assert lengths.expected(100) == 12
    assert lengths.expected(10) == 10  # never above max_tokens
    lengths.observe(100, 3)
    lengths.observe(100, 3)
    assert lengths.expected(100) == 3


def test_an_answer_longer_than_any_before_may_take_all_it_is_allowed() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.observe(1000, 100)
    assert lengths.expected(1000, 600) == 1000


def test_traffic_that_changes_is_followed() -> None:
    lengths = OutputLengths()
    for _ in range(5000):
        lengths.observe(1000, 14)
    for _ in range(1300):
        lengths.observe(1000, 4)
    # A share of exp(-1300 / 500) = 7 % of what counts is still long.
    assert lengths.expected(1000) == 4


def test_nothing_generated_is_a_length_and_less_is_none() -> None:
    lengths = OutputLengths()
    lengths.observe(100, -1)
    assert lengths.expected(100) == 100
    for _ in range(10):
        lengths.observe(100, 0)
    assert lengths.expected(100) == 100  # none of them had a first token
    for _ in range(100):
        lengths.observe(100, 5)
    assert lengths.expected(100) == 5
