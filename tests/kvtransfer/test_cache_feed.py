"""Who is told what of a prefix cache, and when."""

from __future__ import annotations

import asyncio

from baton.prefix_keys import ROOT_KEY, PrefixKeys
from baton.v1 import common_pb2
from engine.block_pool import BlockPool
from kvtransfer.cache_feed import CacheFeed

KEYS = PrefixKeys(b"", block_size=1).keys(range(9))


class Rig:
    def __init__(self, *, prefix_cache: bool = True) -> None:
        self.pool = BlockPool(4, 1, prefix_cache=prefix_cache)
        self.feed: CacheFeed[str] = CacheFeed(self.pool, self._send)
        self.sent: list[tuple[str, common_pb2.CacheChanges]] = []

    def _send(self, listener: str, changes: common_pb2.CacheChanges) -> None:
        self.sent.append((listener, changes))

    def store(self, index: int) -> None:
        (block,) = self.pool.allocate(1)
        parent_key = KEYS[index - 1] if index else ROOT_KEY
        self.pool.publish(block, KEYS[index], parent_key=parent_key, token_ids=[index])
        self.pool.release([block])

    def heard(self) -> list[tuple[str, common_pb2.CacheChanges]]:
        sent, self.sent = self.sent, []
        return sent


def told(stored: bytes = b"", removed: bytes = b"", *, reset: bool = False) -> common_pb2.CacheChanges:
    return common_pb2.CacheChanges(stored=stored, removed=removed, reset=reset)


async def test_who_joins_is_told_all_and_then_what_changes_in_one_message_per_turn() -> None:
    rig = Rig()
    rig.store(0)
    rig.feed.join("a")
    assert rig.heard() == [("a", told(KEYS[0], reset=True))]
    rig.store(1)
    rig.store(2)
    assert rig.heard() == []
    await asyncio.sleep(0)
    assert rig.heard() == [("a", told(KEYS[1] + KEYS[2]))]
    await asyncio.sleep(0)
    assert rig.heard() == []


async def test_an_eviction_outside_a_step_is_told_too() -> None:
    rig = Rig()
    rig.store(0)
    rig.feed.join("a")
    rig.heard()
    rig.pool.allocate(4)
    await asyncio.sleep(0)
    assert rig.heard() == [("a", told(removed=KEYS[0]))]


async def test_who_joins_between_a_change_and_its_message_takes_nothing_from_the_others() -> None:
    rig = Rig()
    rig.feed.join("a")
    rig.store(0)
    rig.feed.join("b")
    assert rig.heard() == [("a", told(reset=True)), ("a", told(KEYS[0])), ("b", told(KEYS[0], reset=True))]
    await asyncio.sleep(0)
    assert rig.heard() == []
    rig.store(1)
    await asyncio.sleep(0)
    assert rig.heard() == [("a", told(KEYS[1])), ("b", told(KEYS[1]))]


async def test_who_has_left_hears_no_more_and_misses_nothing_by_coming_back() -> None:
    rig = Rig()
    rig.feed.join("a")
    rig.feed.leave("a")
    rig.feed.leave("a")
    rig.heard()
    rig.store(0)
    await asyncio.sleep(0)
    assert rig.heard() == []
    rig.feed.join("a")
    assert rig.heard() == [("a", told(KEYS[0], reset=True))]


async def test_a_cleared_cache_is_told_as_an_empty_list() -> None:
    rig = Rig()
    rig.store(0)
    rig.feed.join("a")
    rig.heard()
    rig.pool.clear_cache()
    await asyncio.sleep(0)
    assert rig.heard() == [("a", told(reset=True))]


async def test_without_a_prefix_cache_nothing_is_told() -> None:
    rig = Rig(prefix_cache=False)
    rig.feed.join("a")
    rig.store(0)
    await asyncio.sleep(0)
    rig.pool.clear_cache()
    await asyncio.sleep(0)
    assert rig.heard() == []
