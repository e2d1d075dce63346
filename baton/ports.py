"""The ports between Baton's plain cores and the outside world.

    port               is                         in production                   moves
    Dialer, Session    here                       router/dial.py,                 commands and events
                                                  baton/sessions.py
    Registry           here                       baton/registry.py               who could be talked to
    StepRunner         engine/step_runner.py      engine/thread.py                one step of the model
    KvTransport        kvtransfer/contract.py     kvtransfer/transports/client.py KV blocks

Two stand beside the types they carry, because imports point down. A simulation puts
virtual time and queues behind all of them. Nothing in this module does any work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

SendT = TypeVar("SendT", contravariant=True)
RecvT = TypeVar("RecvT", covariant=True)


class Session(Protocol[SendT, RecvT]):
    """One ordered, bidirectional conversation with one incarnation of a peer.

    Iterating yields the peer's messages until the session ends; it then raises
    PeerLost (IncompatiblePeer if the peer refused this process), or stops quietly
    if close() was called on this side.
    """

    @property
    def peer(self) -> str:
        """Name of the peer, for messages to people."""

    @property
    def last_received(self) -> float:
        """Loop time, in seconds, at which the last message came."""

    def send(self, message: SendT) -> None:
        """Queues a message. Never blocks; raises PeerLost if the session ended or its queue is full."""

    def __aiter__(self) -> AsyncIterator[RecvT]:
        """The peer's messages, in order."""

    async def close(self) -> None:
        """Ends the session; idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker tells the registry about itself.

    name: unique among living workers of the cluster, for example "prefill-0".
    role: "prefill" or "decode".
    incarnation: random 64-bit number per process start.
    address: host:port of its session endpoint.
    draining: it takes no new requests.
    """

    name: str
    role: str
    incarnation: int
    address: str
    draining: bool = False


class Dialer(Protocol[SendT, RecvT]):
    """Opens sessions with the workers of one role."""

    def open(self, info: WorkerInfo) -> AbstractAsyncContextManager[Session[SendT, RecvT]]:
        """A session with a worker, ended when the block is left.

        Entering raises PeerLost if the worker cannot be reached, or returns a session that
        raises it on its first use.
        """


class Registry(Protocol):
    """Who could be talked to. It only ever adds candidates; losing it removes nobody."""

    async def register(self, info: WorkerInfo, ttl_s: float) -> None:
        """Announces a worker for ttl_s seconds; call again before they are over."""

    async def deregister(self, info: WorkerInfo) -> None:
        """Withdraws the announcement."""

    def watch(self) -> AsyncIterator[Sequence[WorkerInfo]]:
        """Yields the announced workers, now and whenever they change."""
