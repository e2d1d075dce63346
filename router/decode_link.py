"""A decode worker as the router knows it: its free blocks and the attempts it holds."""

from __future__ import annotations

from collections.abc import Callable

from baton.errors import PeerLost
from baton.identity import Identity
from baton.limits import blocks_needed
from baton.ports import Dialer, WorkerInfo
from baton.v1 import admin_service_pb2, common_pb2, decode_service_pb2, prefill_service_pb2
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest, DecodeServiceSessionResponse
from router.link import WorkerLink

DecodeDialer = Dialer[DecodeServiceSessionRequest, DecodeServiceSessionResponse]


class DecodeLink(WorkerLink[DecodeServiceSessionRequest, DecodeServiceSessionResponse]):
    """The router's end of one decode worker's session.

    `num_free_blocks` is the worker's last word less what reservations under way
    will take, so that a burst does not pile up on a worker whose report is old.
    """

    role = common_pb2.ROLE_DECODE
    _capacity = decode_service_pb2.DecodeCapacity()
    _load = decode_service_pb2.DecodeWorkerHeartbeat()
    _reported_free_blocks = 0

    def __init__(
        self,
        info: WorkerInfo,
        identity: Identity,
        dialer: DecodeDialer,
        on_change: Callable[[], None],
        on_session: Callable[[], None],
    ) -> None:
        super().__init__(info, identity, dialer, on_change, on_session)
        self._asked: dict[bytes, int] = {}

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

    def can_take(self, kv_tokens: int) -> bool:
        """Whether a request of that size fits now."""
        return self.is_ready and self.blocks_for(kv_tokens) <= self.num_free_blocks

    def hold(self, attempt_id: bytes, kv_tokens: int) -> None:
        """Counts a reservation as under way until the worker answers or the attempt ends."""
        self._asked[attempt_id] = self.blocks_for(kv_tokens)

    def detach(self, attempt_id: bytes) -> None:
        """Ends the attempt here and at the worker. Idempotent."""
        was_asked = self._asked.pop(attempt_id, 0)
        super().detach(attempt_id)
        if was_asked:
            self._on_change()

    def status(self) -> admin_service_pb2.WorkerStatus:
        """The worker as `baton status` shows it."""
        return admin_service_pb2.WorkerStatus(
            name=self.name,
            role=self.role,
            address=self.info.address,
            state=self.state,
            reason=self.reason,
            num_free_blocks=self._reported_free_blocks,
            num_blocks=self._capacity.num_blocks,
            block_size=self._capacity.block_size,
            num_running=self._load.num_running,
            num_waiting=self._load.num_leases,
            num_attempts=self.num_attempts,
            kv_dtype=self._capacity.kv_dtype,
            pid=self._capacity.pid,
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
                for event in message.step.tokens:
                    self._deliver(event.attempt_id, event)
                    if event.finish_reason:
                        self._inboxes.pop(event.attempt_id, None)
                self._report(message.step.num_free_blocks)
            case "reserve_result":
                self._asked.pop(message.reserve_result.attempt_id, None)
                self._report(message.reserve_result.num_free_blocks)
                self._deliver(message.reserve_result.attempt_id, message.reserve_result)
            case "lease_outcome":
                self._deliver(message.lease_outcome.attempt_id, message.lease_outcome)
            case "failed":
                self._deliver(message.failed.attempt_id, message.failed)
                self._inboxes.pop(message.failed.attempt_id, None)
            case "preempted":
                self._deliver(message.preempted.attempt_id, message.preempted)
                self._inboxes.pop(message.preempted.attempt_id, None)
            case "alone_step":
                self._deliver(message.alone_step.attempt_id, message.alone_step)
            case "heartbeat":
                self._load = message.heartbeat
                self._check_progress(message.heartbeat.is_wedged)
                self._report(message.heartbeat.num_free_blocks)
            case other:
                raise PeerLost(f"{self.name} sent {other or 'an unknown message'} in mid-session")

    def _report(self, num_free_blocks: int) -> None:
        grew = num_free_blocks > self._reported_free_blocks
        self._reported_free_blocks = num_free_blocks
        if grew:
            self._on_change()
