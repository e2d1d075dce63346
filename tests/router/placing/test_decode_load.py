"""What a router counts of its requests at a decode worker, held against a plain account of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from router.placing.decode_load import DecodeLoad

A, B = b"a" * 16, b"b" * 16
BLOCK = 16


def make_load() -> DecodeLoad:
    load = DecodeLoad()
    load.opened(BLOCK)
    return load


def place(
    load: DecodeLoad, attempt_id: bytes, num_tokens: int, expected: int = 0, num_local: int = 0
) -> None:
    load.place(
        attempt_id, num_tokens=num_tokens, expected_tokens=expected or num_tokens, num_local_tokens=num_local
    )


def counts(load: DecodeLoad) -> tuple[int, ...]:
    return (
        len(load),
        load.num_tokens,
        load.num_growth_blocks,
        load.num_local_tokens,
        load.num_decoding,
        load.num_decoding_tokens,
    )


def test_growth_is_what_the_expected_answer_takes_beyond_what_is_reserved() -> None:
    load = make_load()
    # 31 tokens and the next one are 2 blocks, 100 tokens are 7.
    place(load, A, 31, expected=100)
    assert load.num_growth_blocks == 5
    # With 32 the next one needs a third.
    place(load, B, 32, expected=100)
    assert load.num_growth_blocks == 5 + 4


def test_growth_shrinks_as_the_answer_grows_and_is_never_negative() -> None:
    load = make_load()
    place(load, A, 15, expected=48)
    seen = []
    for _ in range(60):
        load.grew(A, 1)
        seen.append(load.num_growth_blocks)
    # 1 block is reserved at first, 3 are expected; from 32 tokens on the third is there.
    assert seen == [1] * 16 + [0] * 44
    assert load.num_tokens == 75
    load.ended(A)
    assert counts(load) == (0,) * 6


def test_only_what_decodes_counts_as_decoding_and_once() -> None:
    load = make_load()
    place(load, A, 20)
    place(load, B, 30)
    load.committed(A)
    load.committed(A)
    assert (load.num_decoding, load.num_decoding_tokens, load.num_tokens) == (1, 20, 50)
    load.grew(A, 2)
    load.grew(B, 1)
    assert (load.num_decoding_tokens, load.num_tokens) == (22, 53)
    load.committed(B)
    assert (load.num_decoding, load.num_decoding_tokens) == (2, 53)


def test_a_prompt_that_the_worker_computes_waits_until_it_is_computed() -> None:
    load = make_load()
    place(load, A, 200, num_local=200)
    place(load, B, 50, num_local=10)
    assert load.num_local_tokens == 210
    load.prompt_computed(A)
    load.prompt_computed(A)
    assert load.num_local_tokens == 10
    load.ended(B)
    assert load.num_local_tokens == 0


def test_words_about_strangers_and_second_ends_change_nothing() -> None:
    load = make_load()
    place(load, A, 20, expected=90, num_local=20)
    before = counts(load)
    for strange in (load.committed, load.prompt_computed, load.ended):
        strange(B)
    load.grew(B, 5)
    assert counts(load) == before
    load.ended(A)
    load.ended(A)
    load.grew(A, 1)
    load.committed(A)
    assert counts(load) == (0,) * 6


@dataclass
class Answer:
    num_tokens: int
    expected: int
    num_local: int
    decodes: bool = False

    @property
    def growth(self) -> int:
        reserved, due = math.ceil((self.num_tokens + 1) / BLOCK), math.ceil(self.expected / BLOCK)
        return max(0, due - reserved)


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_a_plain_account_and_zero_at_the_end(seed: int) -> None:
    rng, load, account = random.Random(seed), make_load(), dict[bytes, Answer]()
    for number in range(300):
        act = rng.random()
        known = rng.choice(list(account)) if account else b""
        if act < 0.3 or not known:
            num_tokens = rng.randrange(1, 100)
            answer = Answer(num_tokens, num_tokens + rng.randrange(80), rng.choice((0, num_tokens)))
            account[number.to_bytes(16)] = answer
            place(load, number.to_bytes(16), num_tokens, answer.expected, answer.num_local)
        elif act < 0.4:
            account[known].decodes = True
            load.committed(known)
        elif act < 0.5:
            account[known].num_local = 0
            load.prompt_computed(known)
        elif act < 0.8:
            count = rng.randrange(1, 20)
            account[known].num_tokens += count
            load.grew(known, count)
        else:
            del account[known]
            load.ended(known)
        decoding = [a for a in account.values() if a.decodes]
        assert counts(load) == (
            len(account),
            sum(a.num_tokens for a in account.values()),
            sum(a.growth for a in account.values()),
            sum(a.num_local for a in account.values()),
            len(decoding),
            sum(a.num_tokens for a in decoding),
        )
    for known in account:
        load.ended(known)
    assert counts(load) == (0,) * 6
