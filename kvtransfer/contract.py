"""What both ends of a KV transfer agree on: tickets, formats, answers, and the
port behind which the bytes travel.

Owns plain values and Protocols only. Must not know gRPC, protobuf, torch or
asyncio; transports translate these values at their own edge.

One transfer, seen from the sender:

    async with transport.open(ticket, target) as writer:
        await writer.send_frame(...)            any number of times
        await writer.commit(n, first_token) --> Committed | Gone | Resend
                                                after Resend: frames, then commit again
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

Layout = Literal["HND", "NHD"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Every receiver takes payloads up to this, whatever the sender prefers, so that two settings
# cannot disagree. Half of what a gRPC message may carry (baton.rpc.MAX_MESSAGE_BYTES).
MAX_PAYLOAD_BYTES = 8 << 20


class GoneReason(Enum):
    """Why a lease cannot take a write, or can no longer be committed.

    Names and values are those of baton.v1.GoneReason.
    """

    UNKNOWN = 1  # never granted, or forgotten after its tombstone expired
    EXPIRED = 2  # the router stopped renewing
    CANCELLED = 3  # the router gave the attempt up
    FENCED = 4  # another incarnation, another attempt, or a newer stream of the same lease
    CORRUPT = 5  # frames failed verification more often than allowed
    SENDER_LOST = 6  # the sender's stream ended before its commit
    FAILED = 7  # the receiver ran into an error of its own


@dataclass(frozen=True, slots=True)
class Committed:
    """The KV is complete and verified; the request decodes."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The lease is gone; nothing sent for it will ever be used."""

    reason: GoneReason


@dataclass(frozen=True, slots=True)
class Resend:
    """Frames that failed verification or never came: send them, then commit again."""

    frame_indices: tuple[int, ...]


Outcome = Committed | Gone
Answer = Committed | Gone | Resend


class AnsweredEarly(Exception):
    """The receiver answered before the commit, so more frames are pointless.

    Raised by a KvWriter, handled by the sender; never leaves kvtransfer.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """How one side's cache stores KV.

    dtype: "float32", "bfloat16" or "float16".
    layout: order inside a block, heads-tokens-dim or tokens-heads-dim.
    block_size: tokens per block.
    """

    dtype: str
    layout: Layout
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of the keys and values of one block in one layer."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTarget:
    """Where the KV of one attempt goes.

    lease_id: the ticket; random 128 bits.
    worker: name of the receiver, for messages to people.
    incarnation: of the receiver that granted the lease.
    address: host:port of its transfer endpoint, as its own Hello told the router.
    num_held_tokens: leading tokens the receiver already holds; they do not travel.
    """

    lease_id: bytes = field(repr=False)
    worker: str
    incarnation: int
    address: str
    num_held_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a sender presents when it opens a write."""

    lease_id: bytes = field(repr=False)
    attempt_id: bytes
    incarnation: int
    format: KvFormat
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The token sampled at the end of prefill; the receiver repeats it to the router.

    start_index: its index among the generated tokens; above 0 on a resume.
    logprob: natural logarithm, or None if the request does not want it.
    top: (token id, logprob) of the likeliest tokens in its place; empty unless the request wants them.

    There is no finish reason: a token that ends the request ends it at the
    prefill worker, and nothing is transferred.
    """

    token_id: int
    logprob: float | None
    start_index: int
    top: tuple[tuple[int, float], ...] = ()


class KvWriter(Protocol):
    """One open write. Not for use by two tasks at once."""

    async def send_frame(self, header: bytes, payload: memoryview) -> None:
        """Sends one frame of kvtransfer/wire.py; waits while the receiver is behind.

        The payload may change once this returns. Raises AnsweredEarly if the
        receiver has answered, PeerLost if it is gone.
        """

    async def commit(self, num_frames: int, first_token: FirstToken) -> Answer:
        """Says that all frames are out and waits for the answer; raises PeerLost."""


class KvTransport(Protocol):
    """A way to bytes in another worker."""

    async def connect(self, target: TransferTarget) -> None:
        """Prepares the way to a target, so that the first frame does not wait for it; raises PeerLost."""

    def open(self, ticket: Ticket, target: TransferTarget) -> AbstractAsyncContextManager[KvWriter]:
        """Opens a write. Leaving the context before an outcome ends the write at both sides.

        Entering raises AnsweredEarly if the ticket is refused, PeerLost if nobody is there.
        """

    async def close(self) -> None:
        """Ends all writes and drops all connections; idempotent."""
