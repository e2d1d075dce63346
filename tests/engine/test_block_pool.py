"""What the block pool promises, case by case; test_block_pool_machine.py mixes the cases."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.prefix_keys import ROOT_KEY, PrefixKeys
from engine.block_pool import BlockPool, OutOfBlocks
from engine.prefix_index import Removed, Resync, Stored

A, B, C = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [9, 9]


def keys_of(token_ids: Sequence[int], salt: bytes = b"") -> list[bytes]:
    return PrefixKeys(salt, block_size=2).keys(token_ids)


def publish(pool: BlockPool, block_ids: Sequence[int], token_ids: Sequence[int]) -> list[bool]:
    keys = keys_of(token_ids)
    return [
        pool.publish(
            block, key, parent_key=[ROOT_KEY, *keys][i], token_ids=token_ids[2 * i : 2 * i + 2]
        )
        for i, (block, key) in enumerate(zip(block_ids, keys, strict=True))
    ]  # fmt: skip


def cached(pool: BlockPool, token_ids: Sequence[int]) -> list[int]:
    """Computes a sequence from nothing and leaves it in the cache."""
    blocks = pool.allocate(len(token_ids) // 2)
    publish(pool, blocks, token_ids)
    pool.release(blocks)
    return blocks


def match(pool: BlockPool, token_ids: Sequence[int]) -> list[int]:
    return pool.match(keys_of(token_ids), token_ids)


def test_a_failed_release_takes_nothing() -> None:
    pool = BlockPool(4, 16)
    first, second = pool.allocate(2)

    with pytest.raises(ValueError, match="twice"):
        pool.release([first, first])
    with pytest.raises(ValueError, match="not in use"):
        pool.release([second, 99])

    assert (pool.num_used, pool.num_free) == (2, 2)


def test_a_block_is_released_as_often_as_it_is_owned() -> None:
    pool = BlockPool(4, 2)
    (block,) = cached(pool, C)
    assert match(pool, C) == match(pool, C) == [block]
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 3)
    pool.release([block])
    assert pool.num_used == 1
    pool.release([block])
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 1, 4)
    with pytest.raises(ValueError, match="not in use"):
        pool.release([block])


def test_the_longest_known_prefix_is_found_and_pinned() -> None:
    pool = BlockPool(6, 2)
    first = cached(pool, A)
    hits = match(pool, B)
    assert hits == first[:2]
    # With two of six pinned, four can be given; the third block of A is the last of them.
    assert len(pool.allocate(4)) == 4
    with pytest.raises(OutOfBlocks, match="1 blocks asked for, 0 of 6 free"):
        pool.allocate(1)
    assert match(pool, A) == first[:2]


def test_a_block_in_use_is_found_too() -> None:
    pool = BlockPool(6, 2)
    blocks = pool.allocate(3)
    assert publish(pool, blocks, A) == [True, True, True]
    assert match(pool, A) == blocks
    pool.release(blocks)
    assert (pool.num_used, pool.num_cached) == (3, 0)


def test_free_blocks_go_before_cached_ones_and_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(5, 2)
    old, new = cached(pool, [1, 1]), cached(pool, [2, 2])
    middle = cached(pool, [3, 3])
    pool.release(match(pool, [1, 1]))  # used again: now the youngest
    assert not set(pool.allocate(2)) & {*old, *new, *middle}
    assert [pool.allocate(1) for _ in range(3)] == [new, middle, old]


def test_of_a_chain_the_deepest_block_goes_first() -> None:
    pool = BlockPool(3, 2)
    blocks = cached(pool, A)
    assert [pool.allocate(1)[0] for _ in range(3)] == blocks[::-1]

    pool = BlockPool(3, 2)
    blocks = pool.allocate(3)
    publish(pool, blocks, A)
    pool.release(blocks, fence=1)
    pool.complete(1)
    assert [pool.allocate(1)[0] for _ in range(3)] == blocks[::-1]


def test_no_hit_for_an_old_prefix_after_reuse() -> None:
    pool = BlockPool(1, 2)
    (block,) = cached(pool, [1, 2])
    assert pool.allocate(1) == [block]
    assert match(pool, [1, 2]) == []
    assert publish(pool, [block], [3, 4]) == [True]
    assert match(pool, [1, 2]) == []
    assert match(pool, [3, 4]) == [block]


def test_the_first_block_of_a_key_stays() -> None:
    pool = BlockPool(4, 2)
    first, second = pool.allocate(2)
    assert publish(pool, [first], C) == [True]
    assert publish(pool, [second], C) == [False]
    assert publish(pool, [first], C) == [True]
    pool.release([first, second])
    assert (pool.num_cached, pool.num_free) == (1, 4)
    assert match(pool, C) == [first]


def test_a_key_of_other_tokens_or_of_another_parent_is_no_hit() -> None:
    pool = BlockPool(4, 2)
    first, second = pool.allocate(2)
    key, next_key = keys_of([1, 2, 3, 4])
    pool.publish(first, key, parent_key=ROOT_KEY, token_ids=[1, 2])
    pool.publish(second, next_key, parent_key=b"another", token_ids=[3, 4])
    assert pool.match([key], [1, 9]) == []
    assert pool.match([key, next_key], [1, 2, 3, 4]) == [first]
    assert pool.match([next_key], [3, 4]) == []


def test_a_tenant_does_not_find_the_prefix_of_another() -> None:
    pool = BlockPool(4, 2)
    cached(pool, C)
    assert pool.match(keys_of(C, salt=b"another tenant"), C) == []


def test_a_fenced_block_is_not_given_away_but_may_be_found() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.allocate(2)
    publish(pool, blocks, [1, 2, 3, 4])
    pool.release(blocks, fence=7)
    assert (pool.num_fenced, pool.num_free, pool.num_cached) == (2, 0, 0)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert match(pool, [1, 2]) == blocks[:1]
    assert (pool.num_fenced, pool.num_used) == (1, 1)
    pool.complete(6)
    assert pool.num_fenced == 1
    # Released without a fence of its own, but step 7 may still read it for the owner before.
    pool.release(blocks[:1])
    assert (pool.num_fenced, pool.num_free) == (2, 0)
    pool.complete(7)
    assert (pool.num_fenced, pool.num_free, pool.num_cached) == (0, 2, 2)


def test_the_fence_of_an_owner_that_left_first_holds_after_the_last_one() -> None:
    pool = BlockPool(1, 2)
    (block,) = cached(pool, C)
    match(pool, C)
    match(pool, C)
    pool.release([block], fence=3)
    assert (pool.num_used, pool.num_fenced) == (1, 0)
    pool.release([block])
    assert (pool.num_used, pool.num_fenced, pool.num_free) == (0, 1, 0)
    pool.complete(3)
    assert pool.num_free == 1


def test_of_several_fences_the_latest_counts() -> None:
    pool = BlockPool(1, 2)
    (block,) = cached(pool, C)
    for step in (3, 4, 3):
        pool.release(match(pool, C), fence=step)
    pool.complete(3)
    assert (pool.num_fenced, pool.num_free) == (1, 0)
    assert match(pool, C) == [block]
    pool.release([block])
    assert (pool.num_fenced, pool.num_free) == (1, 0)
    pool.complete(5)
    assert (pool.num_fenced, pool.num_free) == (0, 1)


def test_a_step_that_ends_frees_nothing_that_somebody_owns() -> None:
    pool = BlockPool(1, 2)
    (block,) = cached(pool, C)
    pool.release(match(pool, C), fence=3)
    assert match(pool, C) == [block]
    pool.complete(3)
    assert (pool.num_used, pool.num_free) == (1, 0)


def test_only_a_full_block_in_use_is_published_and_under_one_key() -> None:
    pool = BlockPool(2, 2)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="not in use"):
        pool.publish(1 - block, b"k", parent_key=ROOT_KEY, token_ids=[1, 2])
    with pytest.raises(ValueError, match="only full blocks"):
        pool.publish(block, b"k", parent_key=ROOT_KEY, token_ids=[1])
    pool.publish(block, b"k", parent_key=ROOT_KEY, token_ids=[1, 2])
    with pytest.raises(ValueError, match="another key"):
        pool.publish(block, b"other", parent_key=ROOT_KEY, token_ids=[1, 2])


def test_what_is_unpublished_is_not_found_and_not_kept() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(3)
    publish(pool, blocks, A)
    pool.unpublish(blocks[1:])
    assert match(pool, A) == blocks[:1]
    pool.release(blocks)
    assert (pool.num_cached, pool.num_free) == (0, 3)
    with pytest.raises(ValueError, match="not in use"):
        pool.unpublish(blocks[1:])


def test_without_a_prefix_cache_nothing_is_found_or_kept() -> None:
    pool = BlockPool(2, 2, prefix_cache=False)
    (block,) = pool.allocate(1)
    assert publish(pool, [block], C) == [False]
    assert match(pool, C) == []
    pool.release([block])
    assert (pool.num_cached, pool.num_free, pool.drain_events()) == (0, 2, [])


def test_a_cleared_cache_finds_nothing_and_takes_nothing_from_owners() -> None:
    pool = BlockPool(4, 2)
    cached(pool, C)
    blocks = pool.allocate(2)
    publish(pool, blocks, [1, 2, 3, 4])
    pool.clear_cache()
    assert (pool.num_cached, pool.num_free, pool.num_used) == (0, 2, 2)
    assert (match(pool, C), match(pool, [1, 2]), pool.stored()) == ([], [], [])
    assert pool.drain_events() == [Resync()]
    pool.release(blocks)
    assert pool.num_free == 4


def test_changes_are_told_in_order_and_once() -> None:
    pool = BlockPool(2, 2)
    cached(pool, [1, 2, 3, 4])
    first, second = keys_of([1, 2, 3, 4])
    assert set(pool.stored()) == {Stored(first, ROOT_KEY), Stored(second, first)}
    assert pool.drain_events() == [Stored(first, ROOT_KEY), Stored(second, first)]
    pool.allocate(1)
    assert pool.drain_events() == [Removed(second)]
    assert pool.drain_events() == []


def test_too_many_changes_are_told_as_such() -> None:
    pool = BlockPool(4, 2, max_events=3)
    for token in range(3):
        cached(pool, [token, token])
    assert len(pool.drain_events()) == 3
    for token in range(3, 10):
        cached(pool, [token, token])
    assert pool.drain_events() == [Resync()]
    assert {stored.key for stored in pool.stored()} == {keys_of([token] * 2)[0] for token in range(6, 10)}
    cached(pool, [10, 10])
    assert pool.drain_events() == [Removed(keys_of([6, 6])[0]), Stored(keys_of([10, 10])[0], ROOT_KEY)]


def test_a_pool_needs_room() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        BlockPool(0, 16)
    with pytest.raises(ValueError, match="cannot allocate -1"):
        BlockPool(1, 16).allocate(-1)
