"""What is told about a pool: whoever applies it holds what the pool holds."""

from __future__ import annotations

import itertools
import random

import pytest

from baton.prefix_keys import ROOT_KEY, PrefixKeys
from engine.block_pool import BlockPool
from engine.cache_reports import CacheReport, CacheReports, parents_first
from engine.prefix_index import Stored

SIZE = 2


def keys_of(tokens: list[int]) -> list[bytes]:
    return PrefixKeys(b"", block_size=SIZE).keys(tokens)


class Told:
    """A set of keys that does what the reports say, and checks what they promise."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def hear(self, reports: list[CacheReport], parent_of: dict[bytes, bytes]) -> None:
        for report in reports:
            if report.reset:
                self.keys.clear()
            assert not set(report.stored) & set(report.removed)
            assert not set(report.stored) & self.keys
            assert set(report.removed) <= self.keys
            self.keys -= set(report.removed)
            for index, key in enumerate(report.stored):
                assert parent_of.get(key) not in report.stored[index:]
            self.keys |= set(report.stored)


def store(pool: BlockPool, tokens: list[int], parent_of: dict[bytes, bytes]) -> list[int]:
    """Publishes a sequence as a request would; returns the blocks, which the caller owns."""
    keys = keys_of(tokens)
    blocks = pool.match(keys, tokens)
    num_missing = len(keys) - len(blocks)
    if not pool.can_allocate(num_missing):
        pool.release(blocks)
        return []
    first = len(blocks)
    blocks += pool.allocate(num_missing)
    for index in range(first, len(keys)):
        parent_of[keys[index]] = parent_key = keys[index - 1] if index else ROOT_KEY
        block_tokens = tokens[index * SIZE : (index + 1) * SIZE]
        pool.publish(blocks[index], keys[index], parent_key=parent_key, token_ids=block_tokens)
    return blocks


@pytest.mark.parametrize("max_events", [7, 1000], ids=["events lost at times", "none lost"])
@pytest.mark.parametrize("max_keys", [2, 100], ids=["parts", "whole"])
def test_reports_of_a_random_life_add_up_to_what_the_pool_holds(max_events: int, max_keys: int) -> None:
    rng = random.Random(5)
    pool = BlockPool(12, SIZE, max_events=max_events)
    reports, told, parent_of = CacheReports(pool, max_keys=max_keys), Told(), {}
    told.hear(reports.complete(), parent_of)
    held: list[list[int]] = []
    for _ in range(2000):
        match rng.randrange(12):
            case 0:
                pool.clear_cache()
            case 1 if held:
                pool.unpublish(rng.choice(held))
            case 2 | 3 | 4 | 5 if held:
                pool.release(held.pop(rng.randrange(len(held))))
            case 6:
                told.hear(reports.changes(), parent_of)
                assert told.keys == {entry.key for entry in pool.stored()}
            case _:
                # Few tokens: prefixes are often shared.
                tokens = [rng.randrange(2) for _ in range(2 * rng.randrange(1, 5))]
                held.append(store(pool, tokens, parent_of))


def test_what_comes_and_goes_between_two_reports_is_not_told() -> None:
    pool = BlockPool(1, SIZE)
    reports = CacheReports(pool)
    for tokens in ([1, 1], [2, 2], [3, 3]):
        pool.release(store(pool, tokens, {}))
    assert reports.changes() == [CacheReport(stored=(keys_of([3, 3])[0],))]
    for tokens in ([1, 1], [3, 3]):
        pool.release(store(pool, tokens, {}))
    assert reports.changes() == []
    pool.release(store(pool, [1, 1], {}))
    assert reports.changes() == [CacheReport(stored=(keys_of([1, 1])[0],), removed=(keys_of([3, 3])[0],))]
    assert reports.changes() == []


def test_a_list_is_told_in_parts_and_only_the_first_resets() -> None:
    pool = BlockPool(8, SIZE)
    keys = keys_of([1] * 10)
    store(pool, [1] * 10, {})
    assert CacheReports(pool, max_keys=2).complete() == [
        CacheReport(stored=tuple(keys[:2]), reset=True),
        CacheReport(stored=tuple(keys[2:4])),
        CacheReport(stored=tuple(keys[4:])),
    ]


def test_an_empty_cache_is_told_as_an_empty_list() -> None:
    assert CacheReports(BlockPool(8, SIZE)).complete() == [CacheReport(reset=True)]


def test_lost_events_are_told_as_the_complete_list() -> None:
    pool = BlockPool(8, SIZE, max_events=3)
    store(pool, [1] * 10, {})
    assert CacheReports(pool).changes() == [CacheReport(stored=tuple(keys_of([1] * 10)), reset=True)]
    pool.clear_cache()
    assert CacheReports(pool).changes() == [CacheReport(reset=True)]


def test_parents_come_first_in_whatever_order_they_were_stored() -> None:
    chain = [Stored(b"c", b"b"), Stored(b"x", b"gone"), Stored(b"a", ROOT_KEY), Stored(b"b", b"a")]
    assert parents_first(chain) == [b"a", b"b", b"c", b"x"]


def test_very_long_chains_are_no_deeper_than_the_stack() -> None:
    keys = [index.to_bytes(2, "big") for index in range(20_000)]
    chain = [Stored(key, parent) for parent, key in itertools.pairwise(keys)]
    assert parents_first(reversed(chain)) == keys[1:]


def test_the_pool_says_once_that_there_is_something_to_read() -> None:
    pool, told = BlockPool(8, SIZE), []
    pool.tell_of_events(lambda: told.append(1))
    blocks = store(pool, [1] * 6, {})
    assert len(told) == 1
    pool.unpublish(blocks)
    pool.clear_cache()
    assert len(told) == 1
    pool.drain_events()
    pool.clear_cache()
    assert len(told) == 2
    pool.allocate(1)
    assert len(told) == 2
