"""A prefix in a pool's cache, as a lease gets it."""

from __future__ import annotations

from baton.prefix_keys import ROOT_KEY, PrefixKeys
from engine.block_pool import BlockPool


def cached_prefix(pool: BlockPool, num_blocks: int) -> list[int]:
    """Pinned blocks of the sequence 0, 1, 2, ...; whoever asks again gets the same ones."""
    token_ids = list(range(num_blocks * pool.block_size))
    keys = PrefixKeys(b"", block_size=pool.block_size).keys(token_ids)
    block_ids = pool.match(keys, token_ids)
    for index in range(len(block_ids), num_blocks):
        block_ids += pool.allocate(1)
        start = index * pool.block_size
        pool.publish(
            block_ids[-1],
            keys[index],
            parent_key=[ROOT_KEY, *keys][index],
            token_ids=token_ids[start : start + pool.block_size],
        )
    return block_ids
