"""One life of a receiver in a storm: a tiny pool, its leases, and the requests that decode in it.

Owns what a decode worker owns, and its own books beside it: which attempt has which blocks, and what
lies in them. Every byte is compared with arithmetic when a write commits and when its request ends.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.limits import blocks_needed
from baton.prefix_keys import ROOT_KEY
from engine.block_pool import BlockPool
from kvtransfer.contract import FirstToken, GoneReason
from kvtransfer.lease_table import Lease, LeaseTable, Refusal
from kvtransfer.receiver import KvReceiver
from tests.kvtransfer.storm_sender import Prompt, draw_cache
from tests.kvtransfer.storm_values import FREE, RESERVED, block_keys, kv_of, tokens_of


@dataclass(eq=False)
class Attempt:
    """One try to get a prompt's KV into one receiver.

    excuses: what has happened to it that it need not succeed.
    """

    attempt_id: bytes
    prompt: Prompt
    token: FirstToken
    receiver: ReceiverSide
    excuses: set[str] = field(default_factory=set)
    lease: Lease[Attempt] = field(init=False)
    task: asyncio.Task[Any] | None = None
    num_held: int = 0
    num_damaged: int = 0
    is_committed: bool = False


class ReceiverSide:
    """One incarnation of a receiver."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        rng: random.Random,
        *,
        num_layers: int,
        ttl_s: float,
        complain: Callable[[str], None],
        counts: Counter[str],
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self.address = f"{name}/{incarnation}"
        # It dies, and then it is dead.
        self.is_dead = self.is_gone = False
        self._counts = counts
        self.cache = draw_cache(rng, num_layers, num_prompts=3)
        self.cache.logical.fill_(FREE)
        self.pool = BlockPool(self.cache.shape.num_blocks, self.cache.shape.block_size)
        self.leases: LeaseTable[Attempt] = LeaseTable(self.pool, rng=rng, ttl_s=ttl_s, tombstone_s=3 * ttl_s)
        self.receiver: KvReceiver[Attempt] = KvReceiver(
            self.leases,
            self.cache,
            incarnation,
            clock=lambda: 0.0,
            on_committed=self._on_committed,
            on_lost=self._on_lost,
        )
        self._complain = complain
        self._rng = rng
        self._owned: dict[bytes, list[int]] = {}
        self._published: dict[int, tuple[int, int]] = {}
        self._num_steps = 0

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def reserve(self, attempt: Attempt, max_held_blocks: int) -> Lease[Attempt] | Refusal:
        """A lease that holds up to so many blocks already."""
        prompt, size = attempt.prompt, self.block_size
        keys = block_keys(prompt.sequence, size)[: min(max_held_blocks, prompt.num_tokens // size)]
        held = self.pool.match(keys, tokens_of(prompt.sequence))
        lease = self.leases.reserve(
            attempt.attempt_id,
            attempt,
            num_blocks=blocks_needed(prompt.num_tokens, size),
            num_tokens=prompt.num_tokens,
            held_block_ids=held,
            now=self.now(),
        )
        if isinstance(lease, Refusal):
            self.pool.release(held)
            return lease
        attempt.lease, attempt.num_held = lease, lease.num_held_tokens
        self._owned[attempt.attempt_id] = list(lease.block_ids)
        self._enter(lease.block_ids[len(held) :])
        return lease

    def _enter(self, block_ids: list[int]) -> None:
        """New blocks: nobody has written there since they were left."""
        for block_id in block_ids:
            known = self._published.pop(block_id, None)
            if known is not None:
                self._check_block(block_id, *known)
        if not (self.cache.logical[block_ids] == FREE).all():
            written = [block_id for block_id in block_ids if not self._is_free(block_id)]
            self._complain(f"{self.name}: free blocks {written} were written")
        self.cache.logical[block_ids] = RESERVED

    def _is_free(self, block_id: int) -> bool:
        return bool((self.cache.logical[block_id] == FREE).all())

    def _check_block(self, block_id: int, sequence: int, index: int) -> None:
        """A published block, evicted now, is what it was; it is free from here on."""
        first = index * self.block_size
        expected = kv_of(sequence, first, first + self.block_size, self.cache.shape.num_layers)
        if not torch.equal(self.cache.logical[block_id].float().permute(3, 0, 1, 2, 4), expected):
            self._complain(f"{self.name}: cached block {block_id} has changed")
        self.cache.logical[block_id] = FREE

    def _on_committed(self, lease: Lease[Attempt], token: FirstToken) -> None:
        attempt = lease.payload
        if self.is_gone or lease.attempt_id not in self._owned or attempt.is_committed:
            self._complain(f"{self.name}: {lease.attempt_id!r} committed, and must not any more")
        if token != attempt.token:
            self._complain(f"{self.name}: {token} arrived, {attempt.token} was sent")
        attempt.is_committed = True
        self._check(lease, "at its commit")
        self._count(attempt)

    def _count(self, attempt: Attempt) -> None:
        theirs, ours = attempt.prompt.shape, self.cache.shape
        self._counts["committed with held tokens"] += attempt.num_held > 0
        if attempt.num_held == attempt.prompt.num_tokens:
            self._counts["everything held"] += 1
            return
        self._counts[f"{theirs.dtype} -> {ours.dtype}"] += 1
        self._counts[f"{theirs.block_size} -> {ours.block_size} tokens"] += 1
        self._counts[f"{theirs.layout} -> {ours.layout}"] += 1

    def _on_lost(self, lease: Lease[Attempt], reason: GoneReason) -> None:
        self.left(lease)

    def _check(self, lease: Lease[Attempt], when: str) -> None:
        """All tokens of all layers are right, and nothing is written behind them."""
        prompt, shape = lease.payload.prompt, self.cache.shape
        blocks_NLKHSD = self.cache.logical[lease.block_ids].float()
        kv_TLKHD = blocks_NLKHSD.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
        expected = kv_of(prompt.sequence, 0, prompt.num_tokens, shape.num_layers)
        if not torch.equal(kv_TLKHD[: prompt.num_tokens], expected):
            wrong = (kv_TLKHD[: prompt.num_tokens] != expected).nonzero()[0].tolist()
            found = kv_TLKHD[tuple(wrong)].item()
            self._complain(f"{lease.attempt_id!r} {when}: {found} at token, layer, k/v, head, dim {wrong}")
        if not (kv_TLKHD[prompt.num_tokens :] == RESERVED).all():
            self._complain(f"{lease.attempt_id!r} {when}: slots behind the last token were written")

    def cancel(self, attempt_id: bytes) -> None:
        """Ends an uncommitted attempt, as a router's CancelCommand does."""
        lease = self.leases.release(attempt_id, GoneReason.CANCELLED, self.now())
        if lease is not None:
            self.left(lease)

    def expire(self) -> int:
        """Ends what was not renewed; returns how many."""
        expired = self.leases.expire(self.now())
        for lease in expired:
            self.left(lease)
        return len(expired)

    def left(self, lease: Lease[Attempt]) -> None:
        """A lease was released. Before its commit its blocks were too; after it they are given back here."""
        attempt = lease.payload
        if self._owned.pop(attempt.attempt_id, None) is None:
            self._complain(f"{self.name}: the lease of {attempt.attempt_id!r} ended twice")
            return
        own = lease.block_ids[attempt.num_held // self.block_size :]
        if attempt.is_committed:
            self._check(lease, "at its end")
            own = self._publish(lease)
            self._give_back(lease.block_ids)
        self.cache.logical[own] = FREE

    def _publish(self, lease: Lease[Attempt]) -> list[int]:
        """Makes full blocks findable, as decoding does; returns those that are not."""
        attempt = lease.payload
        sequence, size = attempt.prompt.sequence, self.block_size
        keys, tokens = block_keys(sequence, size), tokens_of(sequence)
        own = []
        for index in range(attempt.num_held // size, len(lease.block_ids)):
            block_id, span = lease.block_ids[index], tokens[index * size : (index + 1) * size]
            is_full = (index + 1) * size <= attempt.prompt.num_tokens
            parent = keys[index - 1] if index else ROOT_KEY
            if is_full and self.pool.publish(block_id, keys[index], parent_key=parent, token_ids=span):
                self._published[block_id] = (sequence, index)
            else:
                own.append(block_id)
        self.pool.drain_events()
        return own

    def _give_back(self, block_ids: list[int]) -> None:
        """Some requests end while a step still runs."""
        if self._rng.random() < 0.7:
            self.pool.release(block_ids)
            return
        self._num_steps += 1
        self.pool.release(block_ids, fence=self._num_steps)
        asyncio.get_running_loop().call_later(0.003, self.pool.complete, self._num_steps)

    def defects(self) -> list[str]:
        """Whether the pool agrees with the books; any time."""
        pool = self.pool
        used = {block_id for block_ids in self._owned.values() for block_id in block_ids}
        found = []
        if pool.num_free + pool.num_used + pool.num_fenced != pool.num_blocks or pool.num_used != len(used):
            found.append(
                f"{self.name}: {pool.num_free} free, {pool.num_used} used, {pool.num_fenced} fenced of "
                f"{pool.num_blocks} blocks, {len(used)} in the books"
            )
        if self.leases.num_leases != len(self._owned):
            found.append(f"{self.name}: {self.leases.num_leases} leases, {len(self._owned)} in the books")
        if self.receiver.counters["saturated_values"]:
            found.append(f"{self.name}: values were saturated")
        return found

    def leftovers(self) -> list[str]:
        """What is left over when every transfer has ended."""
        self.pool.complete(self._num_steps)
        left = {
            "blocks": self.pool.num_blocks - self.pool.num_free,
            "leases": self.leases.num_leases,
            "reserved blocks": self.leases.num_reserved_blocks,
            "open writes": self.receiver.num_open_writes,
        }
        written = [
            block_id
            for block_id in range(self.pool.num_blocks)
            if block_id not in self._published and not self._is_free(block_id)
        ]
        left["written free blocks"] = len(written)
        return [f"{self.name} has {count} {what} left" for what, count in left.items() if count]
