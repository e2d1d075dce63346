"""What an attempt asks of the dispatcher, and what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.v1 import common_pb2
from router.decode_link import DecodeLink
from router.placing.places import Decision
from router.placing.prompt_keys import PromptKeys
from router.prefill_link import PrefillLink

Placed = Decision[PrefillLink, DecodeLink]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An attempt that wants workers.

    num_tokens: there are so far, prompt and generated.  kv_tokens: whose KV it may ever store.
    expected_tokens: that it is expected to store.
    may_be_local: whether a decode worker computes them, in any placement, where no prefill worker can ever
        hold so many: when the request was taken, they were fewer.
    keys: prefix keys of those there are; None for an attempt that must compute them all.
    arrived_at: when the request first came, in loop seconds: its place in line follows from it, also on a
        second attempt.  due_at: when its first token is due.
    is_strict: whether it is refused where that cannot be met.
    is_new: whether the queue's bound applies.
    avoid: incarnations of workers that are taken only if no other can.
    """

    attempt_id: bytes
    num_tokens: int
    kv_tokens: int
    expected_tokens: int
    keys: PromptKeys | None
    arrived_at: float
    due_at: float
    may_be_local: bool = False
    is_strict: bool = False
    is_new: bool = True
    tenant: str = ""
    weight: float = 1.0
    priority: common_pb2.Priority.ValueType = common_pb2.PRIORITY_NORMAL
    avoid: frozenset[int] = frozenset()

    @property
    def reserve_tokens(self) -> int:
        """Tokens that a decode worker reserves for at first: those there are, and one more if it may come."""
        return min(self.num_tokens + 1, self.kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Where an attempt runs. Credit is spent and blocks are counted until undone or used.

    prefill: None where the decode worker computes the prompt itself.
    bucket: label of its length bucket.  num_uncached_tokens: what that goes by.
    decision: why; None where there was nothing to decide.
    """

    attempt_id: bytes
    prefill: PrefillLink | None
    decode: DecodeLink
    cost: int = 0
    bucket: str = ""
    num_uncached_tokens: int = 0
    decision: Placed | None = None

    @property
    def links(self) -> list[PrefillLink | DecodeLink]:
        """The workers that take part."""
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]

    def give_back(self) -> None:
        """Gives the credit back; for an attempt that never reached the prefill worker. Idempotent."""
        if self.prefill is not None:
            self.prefill.give_back(self.attempt_id)

    def undo(self) -> None:
        """Ends an attempt that reached nobody."""
        for link in self.links:
            link.breaker.ended()
        self.give_back()
        self.decode.detach(self.attempt_id)


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """An attempt that waits.

    num_uncached_tokens: of the prompt, at the worker that has most of it.
    cached, held: leading tokens that prefill and decode workers have, as of matched_at.
    """

    wanted: Wanted
    assigned: asyncio.Future[Assignment]
    num_uncached_tokens: int = 0
    matched_at: float = float("-inf")
    cached: Mapping[int, int] = field(default_factory=dict)
    held: Mapping[int, int] = field(default_factory=dict)
