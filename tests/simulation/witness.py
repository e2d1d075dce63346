"""An independent account of every lease, kept from messages alone: no write may be accepted late.

Knows the rules of docs/request-lifecycle.md and nothing of the code that follows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.v1 import common_pb2, decode_service_pb2, kv_transfer_service_pb2
from tests.simulation.net import Connection


@dataclass(slots=True)
class _Account:
    renewed_at: float
    ended: str = ""
    is_committed: bool = False


class LeaseWitness:
    """What one life of a decode worker was told, and what it may therefore answer.

    now: the virtual clock. ttl_s: life of a lease that nobody renews.
    """

    def __init__(self, name: str, incarnation: int, ttl_s: float, now: Callable[[], float]) -> None:
        self._name = name
        self._incarnation = incarnation
        self._ttl_s = ttl_s
        self._now = now
        self._accounts: dict[bytes, _Account] = {}
        self._tickets: dict[int, kv_transfer_service_pb2.OpenWrite] = {}

    def command(self, message: Any) -> None:
        """The worker read a router's command."""
        match message.WhichOneof("message"):
            case "reserve":
                self._accounts.setdefault(message.reserve.attempt_id, _Account(self._now()))
            case "release":
                self._end(message.release.attempt_id, "released")
            case "abort_if_uncommitted":
                self._abort(message.abort_if_uncommitted.attempt_id)
            case "heartbeat":
                for attempt_id in message.heartbeat.attempt_ids:
                    self._renew(attempt_id)

    def write(self, connection: Connection, message: Any) -> None:
        """The worker read a message of a KV stream."""
        if not isinstance(message, memoryview) and message.WhichOneof("message") == "open":
            self._tickets[connection.number] = message.open

    def attempt_of(self, connection: Connection) -> bytes:
        """The attempt whose KV a stream carries."""
        return self._tickets[connection.number].attempt_id

    def committed(self, connection: Connection) -> None:
        """The worker answered Committed on a KV stream; raises AssertionError if it must not."""
        ticket = self._tickets[connection.number]
        account = self._accounts.get(ticket.attempt_id)
        attempt = f"{self._name}: attempt {ticket.attempt_id.hex()[:6]}"
        assert ticket.incarnation == self._incarnation, f"{attempt} committed for another incarnation"
        assert account is not None, f"{attempt} committed without a reservation"
        if account.is_committed:
            return
        assert not account.ended, f"{attempt} committed after it was {account.ended}"
        age_s = self._now() - account.renewed_at
        assert age_s <= self._ttl_s + 1e-6, f"{attempt} committed {age_s:.3f} s after its last renewal"
        account.is_committed = True

    def refused(self, connection: Connection, gone: int) -> None:
        """The worker refused a KV stream; what was meant for another life of it is refused as that."""
        ticket = self._tickets[connection.number]
        is_stray = ticket.incarnation != self._incarnation
        assert not is_stray or gone == common_pb2.GONE_REASON_FENCED, (
            f"{self._name}: attempt {ticket.attempt_id.hex()[:6]}, for another incarnation, was looked up"
        )

    def told(self, outcome: decode_service_pb2.LeaseOutcome) -> None:
        """The worker tells a router where a lease ended up: what was committed is not gone."""
        account = self._accounts.get(outcome.attempt_id)
        if account is None or not account.is_committed or account.ended or outcome.HasField("committed"):
            return
        attempt = f"{self._name}: attempt {outcome.attempt_id.hex()[:6]}"
        assert outcome.gone == common_pb2.GONE_REASON_EXPIRED, f"{attempt} was committed, and is called gone"

    def _end(self, attempt_id: bytes, how: str) -> None:
        account = self._accounts.setdefault(attempt_id, _Account(self._now()))
        account.ended = account.ended or how

    def _abort(self, attempt_id: bytes) -> None:
        account = self._accounts.get(attempt_id)
        if account is None or not account.is_committed:
            self._end(attempt_id, "aborted")

    def _renew(self, attempt_id: bytes) -> None:
        account = self._accounts.get(attempt_id)
        # What has expired cannot be revived.
        if account is not None and self._now() < account.renewed_at + self._ttl_s:
            account.renewed_at = self._now()
