from __future__ import annotations

import random
from collections import Counter

import pytest

from baton.bench.lengths import Lengths


def draws(text: str, count: int = 4000) -> Counter[int]:
    rng = random.Random(1)
    lengths = Lengths.parse(text)
    return Counter(lengths.draw(rng) for _ in range(count))


def test_one_length_is_that_length() -> None:
    assert set(draws("512", 20)) == {512}


def test_all_lengths_of_a_range_are_equally_likely() -> None:
    found = draws("10-13")
    assert set(found) == {10, 11, 12, 13}
    # 1000 of each expected, with a standard deviation of 27.
    assert all(abs(count - 1000) < 140 for count in found.values())


def test_a_mix_has_its_weights() -> None:
    found = draws("80:100, 20:1500")
    assert set(found) == {100, 1500}
    # 3200 expected, with a standard deviation of 25.
    assert abs(found[100] - 3200) < 130


@pytest.mark.parametrize("text", ["", "0", "-5", "7-3", "0:100", "a", "100,", "80:100;20:1", "1.5"])
def test_what_is_no_length_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no length|must have 1 or more tokens"):
        Lengths.parse(text)
