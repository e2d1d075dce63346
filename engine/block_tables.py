"""Gives requests their blocks, and lets them share what others have computed.

Owns the step from a request's tokens to blocks of the pool: prefix keys, lookup, growth,
publication. It must not know steps or batches. Tables only ever grow at their end, and a block
that may be shared is never written again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.limits import blocks_needed
from baton.prefix_keys import ROOT_KEY, PrefixKeys, rope_salt

if TYPE_CHECKING:
    from engine.block_pool import BlockPool
    from engine.request import Request


class BlockTables:
    """The block tables of all requests over one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def missing(self, request: Request) -> int:
        """Blocks that the request's tokens need beyond those it has."""
        return max(0, blocks_needed(request.num_tokens, self._pool.block_size) - len(request.block_ids))

    def lookup(self, request: Request, num_tokens: int) -> list[int]:
        """Blocks that hold the longest known prefix of the first num_tokens tokens, whole blocks only.

        They are pinned: the caller owns one reference to each. Prompt log-probabilities need every
        position computed, so a request that wants them finds nothing.
        """
        if request.params.prompt_logprobs is not None:
            return []
        num_blocks = num_tokens // self._pool.block_size
        return self._pool.match(self._keys(request)[:num_blocks], request.token_ids)

    def cover(self, request: Request) -> bool:
        """Gives the request, which then owns them, all blocks its tokens need; none if they are not free.

        A request without blocks takes over what is known of its tokens, and has that computed
        already. The last token is always left to compute: its logits are wanted.
        """
        held = [] if request.block_ids else self.lookup(request, request.num_tokens - 1)
        num_missing = self.missing(request) - len(held)
        if not self._pool.can_allocate(num_missing):
            self._pool.release(held)
            return False
        if held:
            self.adopt(request, held)
        request.block_ids += self._pool.allocate(num_missing)
        return True

    def adopt(self, request: Request, held: list[int]) -> None:
        """Makes blocks that lookup() found the beginning of the request's table."""
        request.block_ids = list(held)
        request.num_published_blocks = len(held)
        request.num_computed_tokens = request.num_cached_tokens = len(held) * self._pool.block_size

    def publish(self, request: Request) -> None:
        """Lets others find the request's blocks whose tokens are all computed."""
        size = self._pool.block_size
        num_full = min(request.num_computed_tokens // size, len(request.block_ids))
        if num_full <= request.num_published_blocks:
            return
        keys = self._keys(request)
        for index in range(request.num_published_blocks, num_full):
            self._pool.publish(
                request.block_ids[index],
                keys[index],
                parent_key=keys[index - 1] if index else ROOT_KEY,
                token_ids=request.token_ids[index * size : (index + 1) * size],
            )
        request.num_published_blocks = num_full

    def give_back(self, request: Request, fence: int | None = None) -> None:
        """Takes all blocks from the request; see BlockPool.release() for the fence."""
        block_ids, request.block_ids = request.block_ids, []
        request.num_published_blocks = 0
        self._pool.release(block_ids, fence)

    def _keys(self, request: Request) -> list[bytes]:
        if request.prefix_keys is None:
            salt = rope_salt(request.cache_salt, request.rope_step)
            request.prefix_keys = PrefixKeys(salt, block_size=self._pool.block_size)
        return request.prefix_keys.keys(request.token_ids)
