"""The oracle's random numbers against the published vectors and those of docs/sampling.md."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sampling_oracle import gumbel, philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox([np.array([word], np.uint64) for word in counter], list(key))

    assert tuple(int(word[0]) for word in words) == expected


@pytest.mark.parametrize(
    ("seed", "position", "token_id", "expected"),
    [
        (0, 0, 0, 0.08482027),
        (1234567890123456789, 37, 504, 2.6543148),
        (18446744073709551615, 8191, 49151, 2.4650323),
    ],
)
def test_gumbel_numbers_are_the_documented_ones(
    seed: int, position: int, token_id: int, expected: float
) -> None:
    assert gumbel(49152, seed, position, 0)[token_id] == pytest.approx(expected, abs=1e-6)
