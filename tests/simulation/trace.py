"""What happened, in order: a hash to compare two runs by, and a timeline for people."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

LAST_EVENTS = 200


class Event:
    """One line: at (virtual s), node, and either a message it read or a note."""

    __slots__ = ("at", "message", "node", "peer", "what")

    def __init__(self, at: float, node: str, what: str, peer: str = "", message: Any = None) -> None:
        self.at = at
        self.node = node
        self.what = what
        self.peer = peer
        self.message = message


class Trace:
    """All events of one run. now: the virtual clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._hash = hashlib.blake2b(digest_size=16)
        self._events: deque[Event] = deque(maxlen=40 * LAST_EVENTS)
        self.num_events = 0

    @property
    def digest(self) -> str:
        """Equal for equal runs."""
        return self._hash.hexdigest()

    def note(self, node: str, what: str) -> None:
        """Something that is not a message."""
        self._add(Event(self._now(), node, what), what.encode())

    def message(self, node: str, peer: str, kind: str, data: bytes, message: Any) -> None:
        """A process read a message."""
        self._add(Event(self._now(), node, kind, peer, message), data)

    def timeline(self) -> str:
        """The last events, one per line, without heartbeats."""
        requests: dict[bytes, str] = {}
        lines = [line for event in self._events for line in _lines(event, requests)]
        head = f"{'time':>9} {'node':<10} {'event':<46} {'request':<8} attempt"
        return "\n".join([head, *lines[-LAST_EVENTS:]])

    def _add(self, event: Event, data: bytes) -> None:
        self.num_events += 1
        self._hash.update(struct.pack("<d", event.at) + event.node.encode() + b"<" + event.peer.encode())
        self._hash.update(data)
        self._events.append(event)


def _lines(event: Event, requests: dict[bytes, str]) -> Iterator[str]:
    if event.message is None:
        yield f"{event.at:9.3f} {event.node:<10} {event.what}"
        return
    for what, attempt_id, request_id in _describe(event.message):
        if request_id and attempt_id:
            requests[attempt_id] = request_id
        request = request_id or requests.get(attempt_id, "")
        text = f"{what} < {event.peer}"
        yield f"{event.at:9.3f} {event.node:<10} {text:<46} {request:<8} {attempt_id.hex()[:6]}"


def _describe(message: Any) -> Iterator[tuple[str, bytes, str]]:
    """(event, attempt, request) of a message; nothing for heartbeats."""
    if isinstance(message, memoryview):
        yield f"frame {message.nbytes} B", b"", ""
        return
    if isinstance(message, bytes):
        return
    oneofs = [oneof.name for oneof in message.DESCRIPTOR.oneofs]
    kind = message.WhichOneof("message") if "message" in oneofs else None
    if kind is None:
        yield " ".join(str(message).split())[:44], b"", getattr(message, "request_id", "")
        return
    inner = getattr(message, kind)
    if kind == "step":
        for token in inner.tokens:
            yield f"token {token.start_index}+{len(token.token_ids)}", token.attempt_id, ""
    elif kind not in ("heartbeat", "hello", "capacity"):
        yield _named(kind, inner), getattr(inner, "attempt_id", b""), _request(inner)


def _named(kind: str, inner: Any) -> str:
    match kind:
        case "committed" | "gone" | "resend" | "granted" | "quiet":
            detail = " ".join(str(inner).split())
        case "placed":
            detail = str(list(inner.slots))
        case "pair_status":
            detail = inner.transport or inner.failure.code
        case "token":
            return f"first token {inner.start_index}"
        case "reserve" | "prefill":
            detail = f"{len(inner.sequence.token_ids)} tokens"
        case _:
            oneofs = [oneof.name for oneof in inner.DESCRIPTOR.oneofs]
            told = next((name for name in ("outcome", "result") if name in oneofs), None)
            detail = inner.WhichOneof(told) if told else ""
    return f"{kind} {detail}".rstrip()


def _request(inner: Any) -> str:
    sequence = getattr(inner, "sequence", None)
    return sequence.request_id if sequence is not None else ""
