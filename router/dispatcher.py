"""Binds waiting requests to workers, late: only when a prefill worker has granted
credit and a decode worker has blocks.

Runs synchronously whenever something changed; it owns no task. While a role has
no worker at all, waiting requests are kept for a short grace and then fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from baton.errors import Unavailable
from router.buckets import BucketQueue, Waiting
from router.decode_link import DecodeLink
from router.fleet import Fleet
from router.prefill_link import PrefillLink
from router.retry_budget import RetryBudget

RETRY_WITHOUT_WORKERS_S = 5.0

LinkT = TypeVar("LinkT", PrefillLink, DecodeLink)


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
    grace_s: how long they are kept while a role has no worker, in seconds.
    """

    def __init__(self, queue: BucketQueue[Ticket], *, grace_s: float) -> None:
        self.retries = RetryBudget()
        self._queue = queue
        self._grace_s = grace_s
        self._fleet: Fleet | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._is_down = False

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
        Raises Overloaded when the queue is full, Unavailable when a role has had
        no worker for the grace time.
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
        self._watch_roles(self._fleet.is_complete)
        now = asyncio.get_running_loop().time()
        while (item := self._queue.pop(self._fits, now)) is not None:
            self._place(item.value)

    def close(self) -> None:
        """Cancels the timer."""
        if self._give_up is not None:
            self._give_up.cancel()

    def _fits(self, item: Waiting[Ticket]) -> bool:
        ticket = item.value
        if ticket.assigned.cancelled():
            # Its owner has not had its turn yet to take it out; pop it now, place it nowhere.
            return True
        if not self._can_ever_take(ticket):
            # Nothing to wait for, and overdue it would keep everybody else waiting.
            return True
        return self._prefill_for(ticket) is not None and self._decode_for(ticket) is not None

    def _place(self, ticket: Ticket) -> None:
        if ticket.assigned.cancelled():
            return
        if not self._can_ever_take(ticket):
            ticket.assigned.set_exception(
                Unavailable(
                    f"no connected decode worker holds {ticket.kv_tokens} tokens of KV",
                    retry_after_s=RETRY_WITHOUT_WORKERS_S,
                )
            )
            return
        prefill, decode = self._prefill_for(ticket), self._decode_for(ticket)
        assert prefill is not None
        assert decode is not None
        decode.hold(ticket.attempt_id, ticket.reserve_tokens)
        cost = prefill.take(ticket.attempt_id, ticket.num_tokens)
        prefill.breaker.placed()
        decode.breaker.placed()
        ticket.assigned.set_result(
            Assignment(attempt_id=ticket.attempt_id, prefill=prefill, cost=cost, decode=decode)
        )

    def _can_ever_take(self, ticket: Ticket) -> bool:
        """True also while there is no decode worker at all: that is what the grace is for."""
        assert self._fleet is not None
        links = list(self._fleet.decode_links())
        return not links or any(link.can_ever_take(ticket.kv_tokens) for link in links)

    def _prefill_for(self, ticket: Ticket) -> PrefillLink | None:
        assert self._fleet is not None
        trusted = _trusted(self._fleet.prefill_links())
        able = [link for link in trusted if link.can_take(ticket.num_tokens)]
        return max(
            able,
            key=lambda link: (_is_other(link, ticket), link.credit, -link.num_attempts),
            default=None,
        )

    def _decode_for(self, ticket: Ticket) -> DecodeLink | None:
        assert self._fleet is not None
        trusted = _trusted(self._fleet.decode_links())
        able = [link for link in trusted if link.can_take(ticket.reserve_tokens)]
        return max(
            able,
            key=lambda link: (_is_other(link, ticket), link.num_free_blocks, -link.num_attempts),
            default=None,
        )

    def _watch_roles(self, is_complete: bool) -> None:
        if is_complete:
            self._is_down = False
            self.close()
            self._give_up = None
        elif self._is_down:
            self._fail_all()
        elif self._give_up is None:
            self._give_up = asyncio.get_running_loop().call_later(self._grace_s, self._declare_down)

    def _declare_down(self) -> None:
        self._give_up = None
        self._is_down = True
        self._fail_all()

    def _fail_all(self) -> None:
        assert self._fleet is not None
        missing = "decode" if any(True for _ in self._fleet.prefill_links()) else "prefill"
        for item in self._queue.drain():
            if not item.value.assigned.done():
                item.value.assigned.set_exception(
                    Unavailable(
                        f"no {missing} worker is connected; one that died is usually back in seconds",
                        retry_after_s=RETRY_WITHOUT_WORKERS_S,
                    )
                )


def first_tokens(num_tokens: int, kv_tokens: int) -> int:
    """Tokens that a decode worker reserves for at first: those there are and the next, if one may come."""
    return min(num_tokens + 1, kv_tokens)


def _trusted(links: Iterator[LinkT]) -> list[LinkT]:
    """The links whose breaker allows an attempt; all of them if none does, for there is no better choice."""
    candidates, now = list(links), asyncio.get_running_loop().time()
    return [link for link in candidates if link.breaker.allows(now)] or candidates


def _is_other(link: PrefillLink | DecodeLink, ticket: Ticket) -> bool:
    return link.info.incarnation not in ticket.avoid


def _has_result(future: asyncio.Future[Assignment]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
