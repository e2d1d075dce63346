"""Binds waiting requests to workers, late: only when a prefill worker has granted
credit and a decode worker that it can reach has blocks.

Runs synchronously whenever something changed; it owns no task. While no prefill worker
reaches a decode worker, waiting requests are kept for a short grace and then fail.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from baton.errors import Unavailable
from router.buckets import BucketQueue, Waiting
from router.decode_link import DecodeLink
from router.fleet import Fleet, Pair
from router.prefill_link import PrefillLink
from router.retry_budget import RetryBudget

RETRY_WITHOUT_WORKERS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Where an attempt runs. Credit is spent and blocks are counted until undone or used.

    prefill: None where the decode worker computes the prompt itself.
    """

    attempt_id: bytes
    prefill: PrefillLink | None
    cost: int
    decode: DecodeLink

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ticket:
    """An attempt that waits: its tokens so far and those whose KV it may ever store.

    avoid: incarnations of workers that failed this request before; others are preferred.
    """

    attempt_id: bytes
    num_tokens: int
    kv_tokens: int
    avoid: frozenset[int]
    assigned: asyncio.Future[Assignment]

    @property
    def reserve_tokens(self) -> int:
        """Tokens that a decode worker reserves for at first."""
        return first_tokens(self.num_tokens, self.kv_tokens)


class Dispatcher:
    """Gives waiting attempts their workers.

    queue: the waiting attempts.
    retries: the further attempts left to this router.
    grace_s: how long they are kept while no prefill worker reaches a decode worker, in seconds.
    """

    def __init__(self, queue: BucketQueue[Ticket], *, grace_s: float) -> None:
        self.retries = RetryBudget()
        self._queue = queue
        self._grace_s = grace_s
        self._fleet: Fleet | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._is_down = False
        self._was_staffed = False

    def attach(self, fleet: Fleet) -> None:
        """Names the workers to assign to; kick() does nothing before."""
        self._fleet = fleet

    async def assign(
        self,
        attempt_id: bytes,
        num_tokens: int,
        kv_tokens: int,
        *,
        enqueued_at: float,
        is_new: bool,
        avoid: frozenset[int] = frozenset(),
    ) -> Assignment:
        """Waits in the queue for workers.

        enqueued_at: when the request first came, in loop seconds; its place in
            line follows from it, also on a second attempt.
        is_new: whether the queue's bound applies.
        avoid: incarnations of workers that are taken only if no other can.
        Raises Overloaded when the queue is full, Unavailable when no prefill worker
        has reached a decode worker for the grace time.
        """
        loop = asyncio.get_running_loop()
        ticket = Ticket(
            attempt_id=attempt_id,
            num_tokens=num_tokens,
            kv_tokens=kv_tokens,
            avoid=avoid,
            assigned=loop.create_future(),
        )
        item = self._queue.push(ticket, num_tokens, enqueued_at, is_new=is_new)
        self.kick()
        try:
            return await ticket.assigned
        except asyncio.CancelledError:
            if not self._queue.remove(item) and _has_result(ticket.assigned):
                ticket.assigned.result().undo()
            raise

    def assign_to(
        self, decode: DecodeLink, attempt_id: bytes, num_tokens: int, kv_tokens: int
    ) -> Assignment | None:
        """A decode worker that is to compute the prompt itself; None if it has no room now."""
        reserve_tokens = first_tokens(num_tokens, kv_tokens)
        if not decode.can_take(reserve_tokens):
            return None
        decode.hold(attempt_id, reserve_tokens)
        decode.breaker.placed()
        return Assignment(attempt_id=attempt_id, prefill=None, cost=0, decode=decode)

    def kick(self) -> None:
        """Assigns whatever fits now. To be called whenever capacity may have changed."""
        if self._fleet is None:
            return
        pairs = list(self._fleet.pairs())
        self._watch(is_complete=bool(pairs), is_staffed=self._fleet.is_staffed)
        now = asyncio.get_running_loop().time()
        while self._queue.pop(partial(_try_place, pairs), now) is not None:
            pass

    def close(self) -> None:
        """Cancels the timer."""
        if self._give_up is not None:
            self._give_up.cancel()

    def _watch(self, *, is_complete: bool, is_staffed: bool) -> None:
        # Workers that have just met get the grace anew: it takes them a moment to reach each other.
        if is_complete or (is_staffed and not self._was_staffed):
            self._is_down = False
            self.close()
            self._give_up = None
        self._was_staffed = is_staffed
        if is_complete:
            return
        if self._is_down:
            self._fail_all()
        elif self._give_up is None:
            self._give_up = asyncio.get_running_loop().call_later(self._grace_s, self._declare_down)

    def _declare_down(self) -> None:
        self._give_up = None
        if self._fleet is not None and self._fleet.is_pairing:
            # It takes as long as a transport takes to load, and ends with a word of the worker.
            self._give_up = asyncio.get_running_loop().call_later(self._grace_s, self._declare_down)
            return
        self._is_down = True
        self._fail_all()

    def _fail_all(self) -> None:
        assert self._fleet is not None
        for item in self._queue.drain():
            if not item.value.assigned.done():
                item.value.assigned.set_exception(
                    Unavailable(self._fleet.shortage, retry_after_s=RETRY_WITHOUT_WORKERS_S)
                )


def first_tokens(num_tokens: int, kv_tokens: int) -> int:
    """Tokens that a decode worker reserves for at first: those there are and the next, if one may come."""
    return min(num_tokens + 1, kv_tokens)


def _try_place(pairs: list[Pair], item: Waiting[Ticket]) -> bool:
    """Whether the attempt need not wait any longer: it has its workers, is cancelled, or fits nowhere."""
    ticket = item.value
    if ticket.assigned.cancelled():
        # Its owner has not had its turn yet to take it out; pop it now, place it nowhere.
        return True
    if pairs and not any(decode.can_ever_take(ticket.kv_tokens) for _, decode in pairs):
        # Nothing to wait for, and overdue it would keep everybody else waiting.
        ticket.assigned.set_exception(
            Unavailable(
                f"no connected decode worker holds {ticket.kv_tokens} tokens of KV",
                retry_after_s=RETRY_WITHOUT_WORKERS_S,
            )
        )
        return True
    pair = _choose(pairs, ticket)
    if pair is not None:
        _place(ticket, *pair)
    return pair is not None


def _choose(pairs: list[Pair], ticket: Ticket) -> Pair | None:
    """The pair that takes the attempt now: the best prefill worker, and the best decode worker for that."""

    def merit(pair: Pair) -> tuple[bool, int, int, bool, int, int]:
        prefill, decode = pair
        return (
            *(_is_other(prefill, ticket), prefill.credit, -prefill.num_attempts),
            *(_is_other(decode, ticket), decode.num_free_blocks, -decode.num_attempts),
        )

    able = [
        (prefill, decode)
        for prefill, decode in _trusted(pairs)
        if prefill.can_take(ticket.num_tokens) and decode.can_take(ticket.reserve_tokens)
    ]
    return max(able, key=merit, default=None)


def _trusted(pairs: list[Pair]) -> list[Pair]:
    """The pairs with the most workers whose breaker allows an attempt: both, or one, or, if need be, none."""
    now = asyncio.get_running_loop().time()
    counts = [prefill.breaker.allows(now) + decode.breaker.allows(now) for prefill, decode in pairs]
    most = max(counts, default=0)
    return [pair for pair, count in zip(pairs, counts, strict=True) if count == most]


def _place(ticket: Ticket, prefill: PrefillLink, decode: DecodeLink) -> None:
    decode.hold(ticket.attempt_id, ticket.reserve_tokens)
    cost = prefill.take(ticket.attempt_id, ticket.num_tokens)
    prefill.breaker.placed()
    decode.breaker.placed()
    ticket.assigned.set_result(
        Assignment(attempt_id=ticket.attempt_id, prefill=prefill, cost=cost, decode=decode)
    )


def _is_other(link: PrefillLink | DecodeLink, ticket: Ticket) -> bool:
    return link.info.incarnation not in ticket.avoid


def _has_result(future: asyncio.Future[Assignment]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
