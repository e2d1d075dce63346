"""A prefill worker as the router knows it: its credit, the attempts it computes, and where its KV can go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from baton.errors import PeerLost
from baton.identity import Identity
from baton.limits import blocks_needed
from baton.ports import Dialer, WorkerInfo
from baton.v1 import admin_service_pb2, common_pb2, prefill_service_pb2
from baton.v1.prefill_service_pb2 import PrefillServiceSessionRequest, PrefillServiceSessionResponse
from router.link import LinkListener, LinkObserver, WorkerLink
from router.placing.credit import credit_cost, kept_credit
from router.placing.prefill_backlog import PrefillBacklog

_EMPTY = prefill_service_pb2.PrefillCapacity()

PrefillDialer = Dialer[PrefillServiceSessionRequest, PrefillServiceSessionResponse]


class PrefillLink(WorkerLink[PrefillServiceSessionRequest, PrefillServiceSessionResponse]):
    """The router's end of one prefill worker's session.

    Credit is counted in tokens: `credit` is what may be spent now, `spent` what
    attempts hold from take() until the worker has sampled their token or ended
    them. A part of it is kept for shorter prompts. What the worker then grants, and to
    whom, is its own decision. KV can go only to decode workers that the worker was
    introduced to and has reached since. All of this dies with the session, because the
    link does.
    """

    role = common_pb2.ROLE_PREFILL
    credit = 0
    _share = 0
    _capacity: prefill_service_pb2.PrefillCapacity = _EMPTY
    _load = prefill_service_pb2.PrefillWorkerHeartbeat()

    def __init__(
        self,
        info: WorkerInfo,
        identity: Identity,
        dialer: PrefillDialer,
        listener: LinkListener,
        observer: LinkObserver,
    ) -> None:
        super().__init__(info, identity, dialer, listener, observer)
        self._backlog = PrefillBacklog()
        self._num_foreign_blocks = 0
        self.num_foreign_tokens = 0
        self._costs: dict[bytes, int] = {}
        self._untold: set[int] = set()
        self._pairs: dict[int, admin_service_pb2.PairState] = {}

    @property
    def _is_idle(self) -> bool:
        return not self._inboxes and not self._backlog.num_blocks

    @property
    def spent(self) -> int:
        """Credit that attempts hold, in tokens."""
        return sum(self._costs.values())

    def can_ever_take(self, num_tokens: int) -> bool:
        """Whether a prompt of that length fits the worker's cache when it is empty."""
        return blocks_needed(num_tokens, self._capacity.block_size) <= self._capacity.num_blocks

    def objection(self, num_tokens: int, num_uncached_tokens: int, seniority: float) -> str:
        """Why it cannot take a prompt now; empty if it can.

        num_tokens: in all, which need blocks; num_uncached_tokens: to compute, which cost credit.
        seniority: 0 for the shortest length bucket, 1 for the longest.
        """
        if not self.is_ready:
            return "takes no requests"
        cost = credit_cost(num_uncached_tokens, self._share, seniority)
        credit = self.credit - kept_credit(self._share, seniority)
        if not 0 < cost <= credit:
            return f"has credit for {max(0, credit)} tokens, {cost} are needed"
        blocks = blocks_needed(num_tokens, self._capacity.block_size)
        free = self._capacity.num_blocks - self._backlog.num_blocks - self._num_foreign_blocks
        if blocks > free:
            return f"has {max(0, free)} free blocks, {blocks} are needed"
        return ""

    def work_ahead_ms(self, num_tokens: int, now: float) -> float:
        """Predicted computing of this router's prompts that goes before one of num_tokens."""
        return self._backlog.work_ahead_ms(num_tokens, self.chunk_tokens, now)

    def take(
        self,
        attempt_id: bytes,
        *,
        num_tokens: int,
        num_uncached_tokens: int,
        seniority: float,
        predicted_ms: float,
    ) -> int:
        """Spends credit for an attempt's prompt, and counts its blocks; returns the cost."""
        cost = self._costs[attempt_id] = credit_cost(num_uncached_tokens, self._share, seniority)
        self.credit -= cost
        self._backlog.place(
            attempt_id,
            num_tokens=num_uncached_tokens,
            num_blocks=blocks_needed(num_tokens, self._capacity.block_size),
            predicted_ms=predicted_ms,
            now=_now(),
        )
        return cost

    def give_back(self, attempt_id: bytes) -> None:
        """Undoes take() for a prompt that was never sent. Idempotent."""
        self.credit += self._costs.pop(attempt_id, 0)
        self._backlog.ended(attempt_id)
        self._listener.changed()
        self._leave_if_idle()

    def detach(self, attempt_id: bytes) -> None:
        """Ends the attempt here and at the worker. Idempotent."""
        self._backlog.ended(attempt_id)
        super().detach(attempt_id)

    def introduce(self, present: Mapping[int, prefill_service_pb2.PairCommand]) -> None:
        """Tells the worker which decode workers have come, and which have gone, since it was last told.

        present: those that are connected, by incarnation.
        Raises PeerLost if there is no session.
        """
        for incarnation in [known for known in self._pairs if known not in present]:
            del self._pairs[incarnation]
            self._untold.discard(incarnation)
            part = prefill_service_pb2.PartCommand(incarnation=incarnation)
            self.send(PrefillServiceSessionRequest(part=part))
        for incarnation, command in present.items():
            if incarnation not in self._pairs:
                self._untold.add(incarnation)
                self._pairs[incarnation] = admin_service_pb2.PairState(
                    worker=command.worker, reason=f"{self.name} has not tried yet to reach {command.worker}"
                )
                self.send(PrefillServiceSessionRequest(pair=command))

    def can_reach(self, incarnation: int) -> bool:
        """Whether KV can go to that decode worker."""
        pair = self._pairs.get(incarnation)
        return pair is not None and pair.transport != ""

    def is_trying(self, incarnation: int) -> bool:
        """Whether the worker has not said yet whether it can reach that decode worker."""
        return incarnation in self._untold

    def why_not(self, incarnation: int) -> str:
        """Why KV cannot go to that decode worker, which this one was introduced to."""
        return self._pairs[incarnation].reason

    def status(self) -> admin_service_pb2.WorkerStatus:
        """The worker as `baton status` shows it."""
        return admin_service_pb2.WorkerStatus(
            name=self.name,
            role=self.role,
            address=self.info.address,
            state=self.state,
            reason=self.reason,
            num_free_blocks=self._load.num_free_blocks,
            num_blocks=self._capacity.num_blocks,
            block_size=self._capacity.block_size,
            num_running=self._load.num_running,
            num_waiting=self._load.num_waiting,
            credit_tokens=self.credit,
            num_attempts=self.num_attempts,
            kv_dtype=self._capacity.kv_dtype,
            pid=self._capacity.pid,
            release=self.release,
            pairs=sorted(self._pairs.values(), key=lambda pair: pair.worker),
        )

    def _hello_message(self) -> PrefillServiceSessionRequest:
        return PrefillServiceSessionRequest(hello=self._identity.hello())

    def _read_hello(self, message: PrefillServiceSessionResponse) -> common_pb2.Hello:
        if message.WhichOneof("message") != "hello":
            raise PeerLost(f"{self.name} did not begin with Hello")
        return message.hello

    def _read_capacity(self, message: PrefillServiceSessionResponse) -> None:
        if message.WhichOneof("message") != "capacity":
            raise PeerLost(f"{self.name} did not state its capacity")
        self._capacity = message.capacity
        self._load = prefill_service_pb2.PrefillWorkerHeartbeat(num_free_blocks=message.capacity.num_blocks)

    def _heartbeat_message(self) -> PrefillServiceSessionRequest:
        return PrefillServiceSessionRequest(heartbeat=prefill_service_pb2.PrefillRouterHeartbeat())

    def _cancel_message(self, attempt_id: bytes) -> PrefillServiceSessionRequest:
        return PrefillServiceSessionRequest(cancel=prefill_service_pb2.CancelCommand(attempt_id=attempt_id))

    def _receive(self, message: PrefillServiceSessionResponse) -> None:
        match message.WhichOneof("message"):
            case "token":
                self._deliver(message.token.attempt_id, message.token)
                self._backlog.computed(message.token.attempt_id, _now())
                self._settle(message.token.attempt_id)
            case "ended":
                self._deliver(message.ended.attempt_id, message.ended)
                self._inboxes.pop(message.ended.attempt_id, None)
                self._backlog.ended(message.ended.attempt_id)
                self._costs.pop(message.ended.attempt_id, None)
                self._check_draining(message.ended.failure)
                # Its blocks are free; what it cost may have been the worker's again since its token.
                self._listener.changed()
            case "credit_grant":
                self.credit += message.credit_grant.tokens
                self._share = message.credit_grant.share_tokens
                self._listener.changed()
            case "credit_reclaim":
                self._share = message.credit_reclaim.share_tokens
                self._return_credit(message.credit_reclaim.tokens)
            case "pair_status":
                self._note(message.pair_status)
            case "prompt_logprobs":
                self._deliver(message.prompt_logprobs.attempt_id, message.prompt_logprobs)
            case "alone_step":
                self._deliver(message.alone_step.attempt_id, message.alone_step)
            case "heartbeat":
                self._report(message.heartbeat)
            case "cache_changes":
                self._observer.cached(self, message.cache_changes)
            case other:
                raise PeerLost(f"{self.name} sent {other or 'an unknown message'} in mid-session")

    def _report(self, load: prefill_service_pb2.PrefillWorkerHeartbeat) -> None:
        self._load = load
        self._check_progress(load.is_wedged)
        if load.is_draining:
            self.drain()
        used, before = self._capacity.num_blocks - load.num_free_blocks, self._num_foreign_blocks
        self._num_foreign_blocks = max(0, used - self._backlog.num_blocks)
        if self._num_foreign_blocks < before:
            self._listener.changed()
        self.num_foreign_tokens = max(0, load.num_backlog_tokens - self._backlog.num_tokens)

    def _lose(self) -> None:
        self.credit = 0
        self._backlog = PrefillBacklog()
        self._costs.clear()
        self._pairs.clear()
        self._untold.clear()
        super()._lose()

    def _note(self, status: prefill_service_pb2.PairStatus) -> None:
        pair = self._pairs.get(status.incarnation)
        if pair is None:
            # On its way while the decode worker went.
            return
        self._untold.discard(status.incarnation)
        pair.transport, pair.reason = status.transport, status.failure.message or status.note
        pair.code = status.failure.code
        self._listener.changed()

    def _settle(self, attempt_id: bytes) -> None:
        """The attempt's cost is the worker's again; fewer tokens in all may make a long prompt fit."""
        if self._costs.pop(attempt_id, 0):
            self._listener.changed()

    def _return_credit(self, tokens: int) -> None:
        returned = min(tokens, self.credit)
        self.credit -= returned
        self.send(
            PrefillServiceSessionRequest(credit_return=prefill_service_pb2.CreditReturn(tokens=returned))
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
