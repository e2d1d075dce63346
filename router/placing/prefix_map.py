"""Which workers hold which prefixes: an exact index of what they report.

A synchronous core. It knows keys and incarnations; what a held prefix is worth is decided elsewhere.

Every key maps to a bit mask of the workers that hold it, so that one look-up per block serves all
workers, however many. Blocks of different sizes have different keys and live in the same table.
Bounded: a worker has at most as many keys as it has blocks; one that claims more, or says what cannot
be, is forgotten, and its session has to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.errors import PeerLost
from baton.prefix_keys import KEY_BYTES
from baton.v1 import common_pb2
from router.placing.prompt_keys import PromptKeys


class _Holder:
    """One worker. mask: its bit."""

    __slots__ = ("block_size", "keys", "mask")

    def __init__(self, mask: int, block_size: int) -> None:
        self.mask = mask
        self.block_size = block_size
        self.keys: set[bytes] = set()


class PrefixMap:
    """What every worker holds, by its incarnation, as of its last report."""

    def __init__(self) -> None:
        self._holders: dict[int, _Holder] = {}
        self._masks: dict[bytes, int] = {}
        # By the number of its bit. Numbers of workers that are gone are used again, so masks stay short.
        self._worker_of: dict[int, int] = {}
        # The workers of each block size.
        self._mask_of_size: dict[int, int] = {}

    @property
    def num_keys(self) -> int:
        """Keys held, counted once per worker that holds them."""
        return sum(len(holder.keys) for holder in self._holders.values())

    def apply(self, worker: int, changes: common_pb2.CacheChanges, block_size: int, max_keys: int) -> None:
        """Notes what a worker said. Its first report must begin a complete list.

        block_size: of the worker, in tokens.  max_keys: blocks that it has.
        Raises PeerLost, and forgets the worker, if the report cannot be true: changes to nothing, a key that
        is not whole, a key both stored and removed, more keys than blocks.
        """
        stored, removed = set(_split(changes.stored)), set(_split(changes.removed))
        if changes.reset:
            self.forget(worker)
            self._admit(worker, block_size)
        holder = self._holders.get(worker)
        if holder is None:
            raise PeerLost("its first report on its prefix cache is no complete list")
        gained, lost = stored - holder.keys, removed & holder.keys
        num_keys = len(holder.keys) + len(gained) - len(lost)
        if num_keys > max_keys or not stored.isdisjoint(removed) or not _is_whole(changes):
            self.forget(worker)
            raise PeerLost(
                f"its report on its prefix cache, after which it would hold {num_keys} of {max_keys} blocks, "
                "cannot be true"
            )
        self._remove(holder, lost)
        self._store(holder, gained)

    def forget(self, worker: int) -> None:
        """The worker is gone, and what it held. Idempotent."""
        holder = self._holders.pop(worker, None)
        if holder is None:
            return
        self._remove(holder, holder.keys.copy())
        del self._worker_of[holder.mask.bit_length() - 1]
        self._mask_of_size[holder.block_size] ^= holder.mask
        if not self._mask_of_size[holder.block_size]:
            del self._mask_of_size[holder.block_size]

    def match(self, prompt: PromptKeys) -> dict[int, int]:
        """Leading tokens of the prompt that each worker holds, in whole blocks; who holds none is absent.

        Computes no keys past the first block that nobody holds.
        """
        held: dict[int, int] = {}
        for block_size, everybody in self._mask_of_size.items():
            for num_blocks, mask in self._runs(
                prompt, block_size, prompt.num_tokens // block_size, everybody
            ):
                for worker in self._workers(mask):
                    held[worker] = num_blocks * block_size
        return held

    def leaving_last(self, held: Mapping[int, int], num_tokens: int) -> dict[int, int]:
        """The same for who computes the prompt: not its last token, whose logits are wanted.

        held: by match().  num_tokens: of the prompt.
        """
        rest = {
            worker: tokens if tokens < num_tokens else tokens - self._holders[worker].block_size
            for worker, tokens in held.items()
        }
        return {worker: tokens for worker, tokens in rest.items() if tokens}

    def _runs(
        self, prompt: PromptKeys, block_size: int, max_blocks: int, everybody: int
    ) -> Iterator[tuple[int, int]]:
        """(blocks held from the start, the workers that hold so many and no more), without zeros."""
        masks, keys, still = self._masks, prompt.computed(block_size), everybody
        for index in range(max_blocks):
            key = keys[index] if index < len(keys) else prompt.extend(block_size)
            holding = still & masks.get(key, 0)
            if holding != still:
                if index:
                    yield index, still ^ holding
                still = holding
                if not still:
                    return
        if max_blocks > 0:
            yield max_blocks, still

    def _workers(self, mask: int) -> Iterator[int]:
        while mask:
            lowest = mask & -mask
            yield self._worker_of[lowest.bit_length() - 1]
            mask ^= lowest

    def _admit(self, worker: int, block_size: int) -> _Holder:
        number = next(n for n in range(len(self._worker_of) + 1) if n not in self._worker_of)
        self._worker_of[number] = worker
        holder = self._holders[worker] = _Holder(1 << number, block_size)
        self._mask_of_size[block_size] = self._mask_of_size.get(block_size, 0) | holder.mask
        return holder

    def _store(self, holder: _Holder, keys: set[bytes]) -> None:
        masks, mask = self._masks, holder.mask
        for key in keys:
            masks[key] = masks.get(key, 0) | mask
        holder.keys |= keys

    def _remove(self, holder: _Holder, keys: set[bytes]) -> None:
        masks, mask = self._masks, holder.mask
        for key in keys:
            left = masks[key] ^ mask
            if left:
                masks[key] = left
            else:
                del masks[key]
        holder.keys -= keys


def _split(keys: bytes) -> list[bytes]:
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def _is_whole(changes: common_pb2.CacheChanges) -> bool:
    return len(changes.stored) % KEY_BYTES == len(changes.removed) % KEY_BYTES == 0
