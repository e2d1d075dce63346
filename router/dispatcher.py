"""Binds waiting requests to workers, late: only when there is a place that takes one now.

Runs synchronously whenever something changed; it owns no task. While nobody can serve, waiting requests
are kept for a short grace and then fail. Which place is best is router/placing/placement.py's, who goes first
router/queueing/buckets.py's; this class asks them, and takes what they choose.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from operator import ge

from baton.errors import Overloaded, Unavailable
from baton.v1 import common_pb2
from router.assignment import Assignment, Placed, Ticket, Wanted
from router.decode_link import DecodeLink
from router.fit import RETRY_WITHOUT_WORKERS_S, Away, Fit
from router.fleet import Fleet
from router.outlook import ANY_WORKER, Outlook
from router.placing.placement import Placement
from router.placing.places import Ask, Candidate
from router.prefill_link import PrefillLink
from router.queueing.buckets import BucketQueue, Waiting
from router.retry_budget import RetryBudget

# How long what workers have cached of a waiting prompt is not looked up again.
MATCH_S = 0.05

# What must find room, in tokens: to compute at a prefill worker, or at a decode worker; reserved; as is
# expected in the end; at most.
_Size = tuple[int, int, int, int, int]


class Dispatcher:
    """Gives waiting attempts their workers.

    queue: the waiting attempts.
    placement: chooses places.
    outlook: what is expected; hears what is placed.
    retries: the further attempts left to this router.
    grace_s: how long they are kept while nobody can serve, in seconds.
    """

    def __init__(
        self,
        queue: BucketQueue[Ticket],
        placement: Placement[PrefillLink, DecodeLink],
        outlook: Outlook,
        *,
        grace_s: float,
    ) -> None:
        self.retries = RetryBudget()
        self._queue = queue
        self._placement = placement
        self._outlook = outlook
        self._grace_s = grace_s
        self._fleet: Fleet | None = None
        self._fit: Fit | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._is_down = False
        self._was_staffed = False
        # What found no place in the kick under way.
        self._failed: list[_Size] = []

    def attach(self, fleet: Fleet) -> None:
        """Names the workers to assign to; kick() does nothing before."""
        self._fleet, self._fit = fleet, Fit(fleet, self._grace_s)

    async def assign(self, wanted: Wanted) -> Assignment:
        """Waits in the queue for workers.

        Raises Overloaded when the queue is full or a strict objective cannot be met, Unavailable when nobody
        could serve for the grace time, or nobody is left who is large enough.
        """
        while True:
            await self._return_of_the_large(wanted)
            with suppress(Away):
                return await self._assign(wanted)

    async def _return_of_the_large(self, wanted: Wanted) -> None:
        """Returns once it is no use to wait for workers that have gone and were larger than those here.

        Outside of the queue: there it would keep everybody else waiting once it is overdue.
        """
        fleet = self._fleet
        while fleet is not None and isinstance(away := self.fit.objection(wanted), Away):
            await fleet.meets(away.wait_s)

    async def _assign(self, wanted: Wanted) -> Assignment:
        ticket = Ticket(wanted=wanted, assigned=asyncio.get_running_loop().create_future())
        item = self._push(ticket)
        self.kick()
        try:
            return await ticket.assigned
        except asyncio.CancelledError:
            if self._queue.remove(item):
                # It may have been what kept others waiting.
                self.kick()
            elif _has_result(ticket.assigned):
                ticket.assigned.result().undo()
            raise

    def assign_to(self, decode: DecodeLink, wanted: Wanted) -> Assignment | None:
        """A decode worker that is to compute the prompt itself; None if it has no room now."""
        if decode.objection(wanted.reserve_tokens, wanted.expected_tokens):
            return None
        held = self._match(wanted)[0].get(decode.incarnation, 0)
        self._place_at(decode, wanted, max(1, wanted.num_tokens - held))
        return Assignment(attempt_id=wanted.attempt_id, prefill=None, decode=decode)

    @property
    def fit(self) -> Fit:
        """Whether anybody is large enough; not to be asked before attach()."""
        assert self._fit is not None
        return self._fit

    def kick(self) -> None:
        """Assigns whatever fits now. To be called whenever capacity may have changed."""
        fleet = self._fleet
        if fleet is None:
            return
        self._watch(is_complete=fleet.is_complete, is_staffed=fleet.is_staffed)
        if not len(self._queue):
            return
        now = asyncio.get_running_loop().time()
        edges = self._outlook.review(fleet.prefill_links(), fleet.decode_links())
        if edges is not None:
            self._queue.set_edges(edges)
        self._failed.clear()
        while self._queue.pop(self._try_place, now) is not None:
            pass

    def shed(self, item: Waiting[Ticket]) -> None:
        """A request has lost its place in a full queue to one that goes first."""
        self._outlook.metrics.shed("displaced")
        if not item.value.assigned.done():
            item.value.assigned.set_exception(
                Overloaded(
                    "the queue is full, and others came that go first: of higher priority, or of a tenant "
                    "with fewer requests in it; try again later",
                    retry_after_s=1.0,
                )
            )

    def close(self) -> None:
        """Cancels the timer."""
        if self._give_up is not None:
            self._give_up.cancel()

    def _push(self, ticket: Ticket) -> Waiting[Ticket]:
        wanted = ticket.wanted
        self._look_up(ticket)
        cached = self._most_cached(ticket)
        ticket.num_uncached_tokens = uncached = wanted.num_tokens - cached
        work_ms = self._outlook.costs.prefill_ms(ANY_WORKER, uncached, cached)
        if wanted.is_new and wanted.is_strict:
            self._check_objective(ticket)
        try:
            item = self._queue.push(
                ticket,
                uncached,
                # The bound on waiting is for waiting: what comes back keeps its deadline, and waits anew.
                enqueued_at=wanted.arrived_at if wanted.is_new else asyncio.get_running_loop().time(),
                deadline_at=wanted.due_at,
                cost_ms=work_ms,
                tenant=wanted.tenant,
                weight=wanted.weight,
                priority=wanted.priority,
                is_new=wanted.is_new,
            )
        except Overloaded:
            self._outlook.metrics.shed("queue")
            raise
        if wanted.is_new:
            self._outlook.queued(self._queue.bucket(uncached), uncached, work_ms)
        return item

    def _check_objective(self, ticket: Ticket) -> None:
        """Raises Overloaded if the first token is predicted to come too late."""
        wanted, fleet = ticket.wanted, self._fleet
        if fleet is None or not fleet.is_complete:
            return
        prefills, decodes = fleet.prefill_links(), fleet.decode_links()
        now = asyncio.get_running_loop().time()
        num_computing = len(decodes if self._placement.mode == "colocated" or not prefills else prefills)
        queued_ms = self._queue.work_ahead_ms(
            wanted.due_at, wanted.priority, wanted.tenant, weight=wanted.weight
        )
        ahead_ms = queued_ms / num_computing
        soonest_ms = ahead_ms + self._placement.soonest_ms(self._ask(ticket), prefills, decodes, now)
        left_ms = 1000 * (wanted.due_at - now)
        if soonest_ms > left_ms:
            wanted_ms = 1000 * (wanted.due_at - wanted.arrived_at)
            self._outlook.metrics.shed("objective")
            raise Overloaded(
                f"the first token is wanted within {wanted_ms:.0f} ms and would come after about "
                f"{wanted_ms - left_ms + soonest_ms:.0f} ms; come back later, or raise ttft_objective_ms",
                field="ttft_objective_ms",
                retry_after_s=max(0.1, (soonest_ms - left_ms) / 1000),
            )

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

    def _try_place(self, item: Waiting[Ticket]) -> bool:
        """Whether the attempt need not wait any longer: it has its workers, is cancelled, or fits nowhere."""
        assert self._fleet is not None
        ticket = item.value
        if ticket.assigned.cancelled():
            # Its owner has not had its turn yet to take it out; pop it now, place it nowhere.
            return True
        now = asyncio.get_running_loop().time()
        if error := self._hopeless(ticket.wanted, now):
            # Nothing to wait for, and overdue it would keep everybody else waiting.
            ticket.assigned.set_exception(error)
            return True
        self._look_up(ticket)
        least = _least(ticket)
        if not ticket.wanted.may_be_local and any(all(map(ge, least, failed)) for failed in self._failed):
            # One that needs no more anywhere, and may go where this one may, has just found no place.
            return False
        fleet, asked = self._fleet, self._ask(ticket)
        decodes = self.fit.decode_links(ticket.wanted.kv_tokens)
        decision = self._placement.choose(asked, fleet.prefill_links(), decodes, now)
        if decision is None:
            self._failed.append(_most(ticket))
            return False
        self._placement.taken(decision.chosen)
        ticket.assigned.set_result(self._take(ticket, asked, decision))
        return True

    def _hopeless(self, wanted: Wanted, now: float) -> Overloaded | Unavailable | Away | None:
        """Why an attempt need not be in the queue: too late, or too large for every connected worker."""
        if wanted.is_strict and wanted.is_new and now > wanted.due_at:
            self._outlook.metrics.shed("objective")
            return Overloaded(
                "the first token was wanted sooner than there was a place for the prompt; come back later, "
                "or raise ttft_objective_ms",
                field="ttft_objective_ms",
                retry_after_s=1.0,
            )
        return self.fit.objection(wanted)

    def _take(self, ticket: Ticket, asked: Ask, decision: Placed) -> Assignment:
        wanted, chosen = ticket.wanted, decision.chosen
        rest = wanted.num_tokens - chosen.num_cached_tokens
        cost = 0
        if chosen.prefill is not None:
            cost = chosen.prefill.take(
                wanted.attempt_id,
                num_tokens=wanted.num_tokens,
                num_uncached_tokens=rest,
                seniority=asked.seniority,
                predicted_ms=chosen.prefill_ms,
            )
            chosen.prefill.breaker.placed()
        self._place_at(chosen.decode, wanted, 0 if chosen.prefill else rest)
        self._count(chosen, wanted)
        return Assignment(
            attempt_id=wanted.attempt_id,
            prefill=chosen.prefill,
            decode=chosen.decode,
            cost=cost,
            bucket=self._queue.labels[asked.bucket],
            num_uncached_tokens=ticket.num_uncached_tokens,
            decision=decision,
        )

    def _place_at(self, decode: DecodeLink, wanted: Wanted, num_local_tokens: int) -> None:
        decode.place(
            wanted.attempt_id,
            num_tokens=wanted.num_tokens,
            reserve_tokens=wanted.reserve_tokens,
            expected_tokens=wanted.expected_tokens,
            num_local_tokens=num_local_tokens,
        )
        decode.breaker.placed()

    def _count(self, chosen: Candidate[PrefillLink, DecodeLink], wanted: Wanted) -> None:
        waited_s = asyncio.get_running_loop().time() - wanted.arrived_at
        self._outlook.metrics.placed(
            "local" if chosen.prefill is None else "remote",
            common_pb2.Priority.Name(wanted.priority).removeprefix("PRIORITY_").lower(),
            waited_s if wanted.is_new else None,
        )

    def _ask(self, ticket: Ticket) -> Ask:
        wanted = ticket.wanted
        return Ask(
            num_tokens=wanted.num_tokens,
            reserve_tokens=wanted.reserve_tokens,
            expected_tokens=wanted.expected_tokens,
            bucket=self._queue.bucket(ticket.num_uncached_tokens),
            num_buckets=len(self._queue.labels),
            may_be_local=wanted.may_be_local,
            cached=ticket.cached,
            held=ticket.held,
            avoid=wanted.avoid,
        )

    def _look_up(self, ticket: Ticket) -> None:
        """What workers have of the prompt; not again for a moment, however often places are looked for."""
        now = asyncio.get_running_loop().time()
        if now - ticket.matched_at >= MATCH_S:
            ticket.matched_at = now
            ticket.cached, ticket.held = self._match(ticket.wanted)

    def _most_cached(self, ticket: Ticket) -> int:
        """Leading tokens that the worker has that has most of them, of those that may compute the prompt."""
        if self._fleet is None or not ticket.cached:
            return 0
        is_colocated = self._placement.mode == "colocated"
        links = self._fleet.decode_links() if is_colocated else self._fleet.prefill_links()
        return max((ticket.cached.get(link.incarnation, 0) for link in links), default=0)

    def _match(self, wanted: Wanted) -> tuple[dict[int, int], dict[int, int]]:
        """Leading tokens that workers have: those of use for computing the prompt, and all."""
        if wanted.keys is None:
            return {}, {}
        held = self._outlook.prefixes.match(wanted.keys)
        return self._outlook.prefixes.leaving_last(held, wanted.num_tokens), held


def _least(ticket: Ticket) -> _Size:
    """What it needs where most of it is cached."""
    wanted = ticket.wanted
    rest = wanted.num_tokens - max(ticket.held.values(), default=0)
    return ticket.num_uncached_tokens, rest, wanted.reserve_tokens, wanted.expected_tokens, wanted.kv_tokens


def _most(ticket: Ticket) -> _Size:
    """What it needs where nothing of it is cached."""
    wanted = ticket.wanted
    num_tokens = wanted.num_tokens
    return num_tokens, num_tokens, wanted.reserve_tokens, wanted.expected_tokens, wanted.kv_tokens


def _has_result(future: asyncio.Future[Assignment]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
