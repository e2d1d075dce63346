"""Philox against the published vectors and an independent implementation with Python integers."""

from __future__ import annotations

import math
import random

import pytest
import torch

from engine.philox import GUMBEL_MAX, GUMBEL_MIN, gumbel, gumbel_of_all, philox

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def reference_philox(counter: list[int], key: list[int]) -> list[int]:
    """The round function as the paper writes it, on unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def run_philox(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([word]) for word in (*counter, *key))
    return [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    assert run_philox(words_of(counter), words_of(key)) == words_of(expected)


def test_equals_an_independent_implementation() -> None:
    rng = random.Random(5)
    for _ in range(50):
        counter, key = ([rng.getrandbits(32) for _ in range(size)] for size in (4, 2))
        assert run_philox(counter, key) == reference_philox(counter, key)


@pytest.mark.parametrize("whole_vocabulary", [False, True], ids=["some tokens", "all tokens"])
def test_gumbel_numbers_follow_the_documented_layout(whole_vocabulary: bool) -> None:
    seed, position, sample_index = 0xFEDCBA9876543210, 4711, 3
    token_ids = torch.tensor([0, 1, 2, 3, 4, 77, 49152])

    if whole_vocabulary:
        every = gumbel_of_all(49153, seed=seed, position=position, sample_index=sample_index)
        assert every.shape == (49153,)
        noise = every[token_ids]
    else:
        noise = gumbel(
            token_ids,
            seed_low=torch.full_like(token_ids, seed % 2**32),
            seed_high=torch.full_like(token_ids, seed >> 32),
            position=torch.full_like(token_ids, position),
            sample_index=torch.full_like(token_ids, sample_index),
        )

    for token_id, number in zip(token_ids.tolist(), noise.tolist(), strict=True):
        words = reference_philox([token_id // 4, position, sample_index, 0], [seed % 2**32, seed >> 32])
        uniform = ((words[token_id % 4] >> 9) + 0.5) / 2**23
        assert number == pytest.approx(-math.log(-math.log(uniform)), abs=2e-6)
    assert noise.dtype is torch.float32


def test_the_extreme_words_give_finite_numbers() -> None:
    # The smallest and largest u, computed in fp32 as the sampler does.
    uniform = (torch.tensor([0, 2**23 - 1]).float() + 0.5) * 2.0**-23

    smallest, largest = (-torch.log(-torch.log(uniform))).tolist()

    assert smallest == pytest.approx(GUMBEL_MIN, abs=1e-5)
    assert largest == pytest.approx(GUMBEL_MAX, abs=1e-5)
    assert smallest == pytest.approx(-2.8115, abs=1e-3)
    assert largest == pytest.approx(16.6355, abs=1e-3)
