"""What both ends of a KV transfer agree on: peers, tickets, formats, answers, and the
port behind which the bytes travel.

Owns plain values and Protocols only. Must not know gRPC, protobuf, torch or
asyncio; transports translate these values at their own edge.

Two workers are paired once, when they meet. Then a transfer is, seen from the sender:

    async with transport.open(ticket, target) as writer:
        await writer.post(await writer.prepare(frames))     any number of times
        await writer.commit(n, first_token) --> Committed | Gone | Resend
                                                after Resend: frames, then commit again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol, TypeVar

from baton.errors import ConfigError

T = TypeVar("T")

Layout = Literal["HND", "NHD"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

CHECKSUMS = ("xxh3", "none")

# Every receiver takes payloads up to this, whatever the sender prefers, so that two settings
# cannot disagree. Half of what a gRPC message may carry (baton.rpc.MAX_MESSAGE_BYTES).
MAX_PAYLOAD_BYTES = 8 << 20


def check_checksum(name: str) -> None:
    """Raises ConfigError unless it is one of CHECKSUMS."""
    if name not in CHECKSUMS:
        raise ConfigError(
            f"kv_checksum is {name!r}; it must be one of {', '.join(CHECKSUMS)}", field="kv_checksum"
        )


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
    """The KV is complete and verified; the request decodes.

    verify_s, convert_s: time the receiver spent on verifying the frames, and on converting and
        storing them.
    """

    verify_s: float = field(default=0.0, compare=False)
    convert_s: float = field(default=0.0, compare=False)


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
class Peer:
    """A receiver that KV may go to.

    worker: its name, for messages to people.
    incarnation: of its process.
    address: host:port of its transfer endpoint, as its own capacity told the router.
    """

    worker: str
    incarnation: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """What two workers agreed on. transport: its name. note: why it is not a faster one, or empty."""

    transport: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTarget:
    """Where the KV of one attempt goes.

    lease_id: the ticket; random 128 bits.
    worker: name of the receiver, for messages to people.
    incarnation: of the receiver that granted the lease; it is paired.
    num_held_tokens: leading tokens the receiver already holds; they do not travel.
    """

    lease_id: bytes = field(repr=False)
    worker: str
    incarnation: int
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


class OutgoingFrame(Protocol):
    """A frame that is ready to be read from the sender's cache (kvtransfer/outgoing.py)."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""

    def runs(self) -> Sequence[memoryview]:
        """The payload in pieces, in order; each contiguous bytes, borrowed until the write has ended."""

    def header(self) -> bytes:
        """The header, with the digest of the payload; reads the whole payload."""


Offload = Callable[[Callable[[], T]], Awaitable[T]]


class KvWriter(Protocol):
    """One open write. Calls of prepare() follow one another, and so do those of post(); one may overlap
    the other, and commit() nothing.

    All raise AnsweredEarly if the receiver has answered, PeerLost if it is gone.
    """

    @property
    def max_batch(self) -> int:
        """Most frames that one prepare() takes; at least 1."""

    @property
    def wait_s(self) -> float:
        """Time spent waiting for room at the receiver."""

    async def prepare(self, frames: Sequence[OutgoingFrame]) -> Any:
        """Reads frames from the cache; waits while the receiver is behind."""

    async def post(self, prepared: Any) -> None:
        """Sends what prepare() returned."""

    async def commit(self, num_frames: int, first_token: FirstToken) -> Answer:
        """Says that all frames are out and waits for the answer."""


class KvTransport(Protocol):
    """The ways to bytes in other workers.

    on_changed: called with (incarnation, pairing) when a pair goes over to another transport.
    counters: what it has counted since the start, by kind.
    """

    on_changed: Callable[[int, Pairing], None]
    counters: Counter[str]

    async def pair(self, peer: Peer) -> Pairing:
        """Connects to a receiver, compares what must agree, and chooses how bytes travel. Idempotent.

        Raises PeerLost if it cannot be reached, IncompatiblePeer, naming the field, if it must not be used.
        """

    async def part(self, incarnation: int) -> None:
        """Drops everything kept for a receiver, once its writes have ended. Idempotent."""

    def open(self, ticket: Ticket, target: TransferTarget) -> AbstractAsyncContextManager[KvWriter]:
        """Opens a write. Leaving the context before an outcome ends the write at both sides.

        When it is left, nothing reads the sender's cache any more. Entering raises AnsweredEarly if the
        ticket is refused, PeerLost if nobody is there or the receiver is not paired.
        """

    async def close(self) -> None:
        """Ends all writes and drops all connections; idempotent."""
