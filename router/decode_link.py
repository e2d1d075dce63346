"""A decode worker as the router knows it: its free blocks and the attempts it holds."""

from __future__ import annotations

from baton.errors import PeerLost
from baton.identity import Identity
from baton.limits import blocks_needed
from baton.ports import Dialer, WorkerInfo
from baton.v1 import admin_service_pb2, common_pb2, decode_service_pb2, prefill_service_pb2
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest, DecodeServiceSessionResponse
from router.link import LinkListener, LinkObserver, WorkerLink
from router.placing.decode_load import DecodeLoad

DecodeDialer = Dialer[DecodeServiceSessionRequest, DecodeServiceSessionResponse]


class DecodeLink(WorkerLink[DecodeServiceSessionRequest, DecodeServiceSessionResponse]):
    """The router's end of one decode worker's session.

    `num_free_blocks` is the worker's last word less what reservations under way
    will take, so that a burst does not pile up on a worker whose report is old.
    """

    role = common_pb2.ROLE_DECODE
    _capacity: decode_service_pb2.DecodeCapacity = decode_service_pb2.DecodeCapacity()
    _load = decode_service_pb2.DecodeWorkerHeartbeat()
    _reported_free_blocks = 0

    def __init__(
        self,
        info: WorkerInfo,
        identity: Identity,
        dialer: DecodeDialer,
        listener: LinkListener,
        observer: LinkObserver,
    ) -> None:
        super().__init__(info, identity, dialer, listener, observer)
        self._asked: dict[bytes, int] = {}
        self._own = DecodeLoad()
        self._num_foreign = 0
        self._num_foreign_tokens = 0
        self._num_foreign_backlog_tokens = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a new reservation can count on."""
        return self._reported_free_blocks - sum(self._asked.values())

    @property
    def num_asked(self) -> int:
        """Reservations that the worker has not answered yet."""
        return len(self._asked)

    @property
    def introduction(self) -> prefill_service_pb2.PairCommand:
        """What prefill workers are told of this worker."""
        return prefill_service_pb2.PairCommand(
            worker=self.name, incarnation=self.info.incarnation, address=self._capacity.transfer_address
        )

    def blocks_for(self, kv_tokens: int) -> int:
        """Blocks the worker needs for that many tokens."""
        return blocks_needed(kv_tokens, self._capacity.block_size)

    def can_ever_take(self, kv_tokens: int) -> bool:
        """Whether a request of that size fits the worker when it is empty."""
        return self.is_ready and self.blocks_for(kv_tokens) <= self._capacity.num_blocks

    @property
    def _is_idle(self) -> bool:
        return not self._inboxes and not len(self._own)

    @property
    def num_decoding(self) -> int:
        """Requests that decode there, or will once their KV is there."""
        return self._num_foreign + len(self._own)

    @property
    def num_context_tokens(self) -> int:
        """Tokens in their caches."""
        return self._num_foreign_tokens + self._own.num_tokens

    @property
    def num_backlog_tokens(self) -> int:
        """Prompt tokens that the worker is to compute itself and has not yet."""
        return self._num_foreign_backlog_tokens + self._own.num_local_tokens

    @property
    def mixed_tokens(self) -> int:
        """Most prompt tokens of a step that decodes as well."""
        return self._capacity.mixed_tokens

    @property
    def max_running(self) -> int:
        """Most requests in the batch."""
        return self._capacity.max_running

    def objection(self, reserve_tokens: int, expected_tokens: int) -> str:
        """Why it cannot take a request now; empty if it can.

        reserve_tokens: that blocks are reserved for at first; expected_tokens: that it will come to. Where
        others are there, all must find the blocks they are expected to grow by.
        """
        if not self.is_ready:
            return "takes no requests"
        blocks, free = self.blocks_for(reserve_tokens), self.num_free_blocks
        if blocks > free:
            return f"has {max(0, free)} free blocks, {blocks} are needed"
        growth = max(blocks, self.blocks_for(expected_tokens)) + self._num_growth_blocks
        if growth > free and self.num_decoding:
            return f"has {free} free blocks, and with this one the answers there will need {growth:.0f}"
        return ""

    @property
    def _num_growth_blocks(self) -> float:
        """Blocks that the answers there are expected to take yet; others' grow as this router's do."""
        own = self._own.num_growth_blocks
        return own + (self._num_foreign * own / len(self._own) if len(self._own) else 0)

    def place(
        self,
        attempt_id: bytes,
        *,
        num_tokens: int,
        reserve_tokens: int,
        expected_tokens: int,
        num_local_tokens: int = 0,
    ) -> None:
        """Counts a request, and its reservation until the worker answers or the attempt ends.

        num_local_tokens: what the worker is to compute of the prompt itself.
        """
        self._asked[attempt_id] = self.blocks_for(reserve_tokens)
        self._own.place(
            attempt_id,
            num_tokens=num_tokens,
            expected_tokens=expected_tokens,
            num_local_tokens=num_local_tokens,
        )

    def detach(self, attempt_id: bytes) -> None:
        """Ends the attempt here and at the worker. Idempotent."""
        was_asked = self._asked.pop(attempt_id, 0)
        was_held = len(self._own)
        self._own.ended(attempt_id)
        super().detach(attempt_id)
        if was_asked or was_held != len(self._own):
            self._listener.changed()

    def status(self) -> admin_service_pb2.WorkerStatus:
        """The worker as `baton status` shows it."""
        return admin_service_pb2.WorkerStatus(
            name=self.name,
            role=self.role,
            address=self.info.address,
            state=self.state,
            reason=self.reason or self._note(),
            num_free_blocks=self._reported_free_blocks,
            num_blocks=self._capacity.num_blocks,
            block_size=self._capacity.block_size,
            num_running=self._load.num_running,
            num_waiting=self._load.num_leases,
            num_attempts=self.num_attempts,
            kv_dtype=self._capacity.kv_dtype,
            pid=self._capacity.pid,
            release=self.release,
        )

    def _note(self) -> str:
        """What an operator must know of a worker that serves."""
        if not self._load.num_saturated_values:
            return ""
        return (
            f"{self._load.num_saturated_values} values of KV exceeded its float16 cache, and answers may be "
            "wrong; set kv_dtype to bfloat16 or float32 (--decode-kv-dtype of baton up)"
        )

    def _hello_message(self) -> DecodeServiceSessionRequest:
        return DecodeServiceSessionRequest(hello=self._identity.hello())

    def _read_hello(self, message: DecodeServiceSessionResponse) -> common_pb2.Hello:
        if message.WhichOneof("message") != "hello":
            raise PeerLost(f"{self.name} did not begin with Hello")
        return message.hello

    def _read_capacity(self, message: DecodeServiceSessionResponse) -> None:
        if message.WhichOneof("message") != "capacity":
            raise PeerLost(f"{self.name} did not state its capacity")
        self._capacity = message.capacity
        self._own.opened(message.capacity.block_size)
        self._report(message.capacity.num_blocks)

    def _heartbeat_message(self) -> DecodeServiceSessionRequest:
        return DecodeServiceSessionRequest(
            heartbeat=decode_service_pb2.DecodeRouterHeartbeat(attempt_ids=list(self._inboxes))
        )

    def _cancel_message(self, attempt_id: bytes) -> DecodeServiceSessionRequest:
        return DecodeServiceSessionRequest(release=decode_service_pb2.ReleaseCommand(attempt_id=attempt_id))

    def _receive(self, message: DecodeServiceSessionResponse) -> None:
        match message.WhichOneof("message"):
            case "step":
                self._step(message.step)
            case "reserve_result":
                before = self.num_free_blocks
                self._asked.pop(message.reserve_result.attempt_id, None)
                self._report(message.reserve_result.num_free_blocks, before=before)
                self._deliver(message.reserve_result.attempt_id, message.reserve_result)
                self._check_draining(message.reserve_result.refusal.failure)
            case "lease_outcome":
                if message.lease_outcome.HasField("committed"):
                    self._own.committed(message.lease_outcome.attempt_id)
                self._deliver(message.lease_outcome.attempt_id, message.lease_outcome)
            case "failed":
                self._deliver(message.failed.attempt_id, message.failed)
                self._over(message.failed.attempt_id)
                self._check_draining(message.failed.failure)
                self._listener.changed()
            case "preempted":
                self._deliver(message.preempted.attempt_id, message.preempted)
                self._over(message.preempted.attempt_id)
                self._listener.changed()
            case "alone_step":
                self._deliver(message.alone_step.attempt_id, message.alone_step)
            case "heartbeat":
                self._beat(message.heartbeat)
            case "cache_changes":
                self._observer.cached(self, message.cache_changes)
            case "prompt_logprobs":
                self._deliver(message.prompt_logprobs.attempt_id, message.prompt_logprobs)
            case "prompt_computed":
                self._own.prompt_computed(message.prompt_computed.attempt_id)
                self._deliver(message.prompt_computed.attempt_id, message.prompt_computed)
            case other:
                raise PeerLost(f"{self.name} sent {other or 'an unknown message'} in mid-session")

    def _step(self, step: decode_service_pb2.StepEvents) -> None:
        has_ended = False
        for event in step.tokens:
            self._own.grew(event.attempt_id, len(event.token_ids))
            self._deliver(event.attempt_id, event)
            if event.finish_reason:
                has_ended = True
                self._over(event.attempt_id)
        if step.HasField("load"):
            self._observer.stepped(self, step.load)
        # What has ended grows no more: there may be room, be it that others have taken its blocks.
        self._report(step.num_free_blocks, may_have_room=has_ended)

    def _over(self, attempt_id: bytes) -> None:
        """The worker has ended the attempt."""
        self._inboxes.pop(attempt_id, None)
        self._own.ended(attempt_id)

    def _beat(self, load: decode_service_pb2.DecodeWorkerHeartbeat) -> None:
        self._load = load
        self._check_progress(load.is_wedged)
        if load.is_draining:
            self.drain()
        before = self._num_foreign
        self._num_foreign = max(0, load.num_running - self._own.num_decoding)
        self._num_foreign_tokens = max(0, load.num_context_tokens - self._own.num_decoding_tokens)
        self._num_foreign_backlog_tokens = max(0, load.num_backlog_tokens - self._own.num_local_tokens)
        self._report(load.num_free_blocks)
        if self._num_foreign < before:
            self._listener.changed()

    def _lose(self) -> None:
        self._own = DecodeLoad()
        super()._lose()

    def _report(
        self, num_free_blocks: int, *, before: int | None = None, may_have_room: bool = False
    ) -> None:
        """before: free blocks that could be counted on, where a reservation has been answered since."""
        before = self.num_free_blocks if before is None else before
        self._reported_free_blocks = num_free_blocks
        if self.num_free_blocks > before or may_have_room:
            self._listener.changed()
