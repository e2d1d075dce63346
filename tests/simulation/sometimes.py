"""What must happen now and then, or the simulation tests less than it claims.

Counts events that are rare and matter. Reads messages only; it never looks into a process.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from baton.v1 import common_pb2
from tests.simulation.net import Connection

POINTS = (
    "late write refused",
    "write to another incarnation refused",
    "damaged frames resent, then committed",
    "transfer given up as corrupt",
    "resumed before the first token",
    "resumed during transfer",
    "resumed in mid-decode",
    "resumed twice, then finished",
    "cancel came before the commit",
    "cancel came after the commit",
    "AbortIfUncommitted answered Committed",
    "AbortIfUncommitted answered Gone",
    "first token heard from the decode worker first",
    "lease expired",
    "reservation refused, later granted",
    "an answer went on at another router",
    "queue overflow",
    "credit reclaimed",
    "restarted at the same address",
    "a silent session was given up",
    "a stale announcement led to another incarnation",
    "a pause outlived the lease",
    "a slow reader was cut off",
    "deadline passed",
    "client cancelled",
    "first token was the last",
    "a request gave way",
    "an answer outgrew the scale of its positions",
    "a prefix was in a prefill worker's cache",
    "a prefix was in a decode worker's cache",
    "a prefix was pinned where nothing else was left",
    "a pair was refused",
    "a pair was not reached at once, and later",
    "a pair that might share memory does not",
    "a transport that failed in use was left",
    "a write went through slots",
    "a write found no free slot and went inside its stream",
    "slots were quarantined",
    "a new life of a sender freed the slots of the old one",
    "slots were retired",
    "a sender said that it is quiet",
    "layers were sent before their step had ended",
    "a decode worker computed a prompt itself",
    "in auto, a prefill worker computed a prompt",
    "in auto, a decode worker computed a prompt",
    "a strict objective was refused",
    "a strict objective was given up while it waited",
    "a request was displaced",
    "a higher priority overtook a lower one",
    "a place was passed over for the growth of the answers there",
    "buckets moved",
    "a node left as it was told to",
    "a draining worker handed an answer over",
    "a draining worker refused an attempt",
    "a router handed an answer over",
    "a further attempt was taken from the budget",
)
RESUMES = ("resumed before the first token", "resumed during transfer", "resumed in mid-decode")


class Sometimes:
    """Counts of POINTS over one run."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._attempts: dict[str, list[bytes]] = {}
        self._request_of: dict[bytes, str] = {}
        self._first_tokens: dict[bytes, str] = {}
        self._refused: dict[str, None] = {}
        self._aborted: dict[bytes, None] = {}
        self._committed: dict[bytes, None] = {}
        self._resent: dict[int, None] = {}
        self._pairs: dict[tuple[int, int], str] = {}

    def hit(self, point: str) -> None:
        """A point was reached."""
        assert point in POINTS, point
        self.counts[point] += 1

    def read(self, connection: Connection, from_caller: bool, message: Any) -> None:
        """A process read a message."""
        match connection.kind, from_caller:
            case "decode", True:
                self._command(message)
            case "decode", False:
                self._decode_event(message)
            case "prefill", False:
                self._prefill_event(connection, message)
            case "kv", _ if not isinstance(message, memoryview):
                self._kv(connection, message)

    def attempts_of(self, request_id: str) -> list[bytes]:
        """All attempts at a request that a decode worker has heard of."""
        return self._attempts.get(request_id, [])

    @property
    def num_resumes(self) -> int:
        """Attempts at requests that an earlier attempt had left unfinished."""
        return sum(self.counts[point] for point in RESUMES)

    def _command(self, message: Any) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                self._reserve(message.reserve)
            case "release":
                attempt_id = message.release.attempt_id
                if attempt_id in self._committed:
                    self.hit("cancel came after the commit")
                elif attempt_id in self._first_tokens:
                    self.hit("cancel came before the commit")
            case "abort_if_uncommitted":
                self._aborted[message.abort_if_uncommitted.attempt_id] = None

    def _reserve(self, command: Any) -> None:
        sequence = command.sequence
        attempts = self._attempts.setdefault(sequence.request_id, [])
        self._request_of[command.attempt_id] = sequence.request_id
        if attempts and sequence.request_id not in self._refused:
            num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
            stage = {0: "before the first token", 1: "during transfer"}.get(num_output, "in mid-decode")
            self.hit(f"resumed {stage}")
        attempts.append(command.attempt_id)

    def _decode_event(self, message: Any) -> None:
        match message.WhichOneof("message"):
            case "reserve_result":
                self._reserved(message.reserve_result)
            case "lease_outcome":
                self._outcome(message.lease_outcome)
            case "prompt_computed":
                self.hit("a decode worker computed a prompt itself")
            case "preempted":
                outgrown = "an answer outgrew the scale of its positions"
                self.hit(outgrown if message.preempted.outgrown else "a request gave way")
            case "step":
                for token in message.step.tokens:
                    if self._first_tokens.setdefault(token.attempt_id, "decode") == "decode":
                        self._first_tokens[token.attempt_id] = "counted"
                        self.hit("first token heard from the decode worker first")

    def _reserved(self, result: Any) -> None:
        request = self._request_of.get(result.attempt_id, "")
        if result.HasField("lease"):
            if result.lease.num_held_tokens:
                self.hit("a prefix was in a decode worker's cache")
                if not result.num_free_blocks:
                    self.hit("a prefix was pinned where nothing else was left")
            if self._refused.pop(request, 0) is None:
                self.hit("reservation refused, later granted")
            return
        if result.refusal.failure.code == "OVERLOADED":
            self._refused[request] = None

    def _outcome(self, outcome: Any) -> None:
        is_committed = outcome.HasField("committed")
        if is_committed:
            self._committed[outcome.attempt_id] = None
        if outcome.attempt_id in self._aborted:
            self.hit(f"AbortIfUncommitted answered {'Committed' if is_committed else 'Gone'}")
        elif outcome.gone == common_pb2.GONE_REASON_EXPIRED:
            self.hit("lease expired")

    def _prefill_event(self, connection: Connection, message: Any) -> None:
        match message.WhichOneof("message"):
            case "token" if not message.token.finish_reason:
                self._first_tokens.setdefault(message.token.attempt_id, "prefill")
            case "ended":
                if message.ended.HasField("finished"):
                    self.hit("first token was the last")
                if message.ended.prefill.num_cached_tokens:
                    self.hit("a prefix was in a prefill worker's cache")
            case "credit_reclaim":
                self.hit("credit reclaimed")
            case "pair_status":
                self._pair(connection, message.pair_status)

    def _pair(self, connection: Connection, status: Any) -> None:
        key = (connection.number, status.incarnation)
        before = self._pairs.get(key, "")
        self._pairs[key] = state = status.transport or status.failure.code
        if state == "INCOMPATIBLE_PEER":
            self.hit("a pair was refused")
        elif status.transport and before and before.isupper():
            self.hit("a pair was not reached at once, and later")
        elif before == "shm" and state == "grpc":
            self.hit("a transport that failed in use was left")
        elif state == "grpc" and status.note:
            self.hit("a pair that might share memory does not")

    def _kv(self, connection: Connection, message: Any) -> None:
        match message.WhichOneof("message"):
            case "placed":
                self.hit("a write went through slots")
            case "quiet":
                self.hit("a sender said that it is quiet")
            case "granted" if not message.granted.slots:
                self.hit("a write found no free slot and went inside its stream")
            case "resend":
                self._resent[connection.number] = None
            case "committed" if connection.number in self._resent:
                self.hit("damaged frames resent, then committed")
            case "gone" if message.gone == common_pb2.GONE_REASON_CORRUPT:
                self.hit("transfer given up as corrupt")
            case "gone" if message.gone == common_pb2.GONE_REASON_FENCED:
                self.hit("write to another incarnation refused")
            case "gone":
                self.hit("late write refused")
