"""One worker as the router knows it: dialling, Hello, heartbeats, and the end of it all.

Owns the session and the attempts in flight on it. Subclasses know the messages
of their role; this class knows that a session ends in exactly one way: every
attempt on it hears LinkLost. A worker that drains is left once no attempt is there,
so that nobody hears of that end.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from baton.errors import BatonError, Draining, IncompatiblePeer, PeerLost
from baton.identity import Identity
from baton.logs import get_logger
from baton.ports import Dialer, Session, WorkerInfo
from baton.sessions import converse, first_message
from baton.v1 import admin_service_pb2, common_pb2, decode_service_pb2, prefill_service_pb2
from router.breaker import Breaker
from router.events import Event, Inbox, LinkLost

SendT = TypeVar("SendT")
RecvT = TypeVar("RecvT")

log = get_logger(__name__)


class LinkListener(Protocol):
    """Who hears when links come, go and change."""

    def changed(self) -> None:
        """Capacity or state may have changed."""

    def met(self) -> None:
        """A session has begun or ended; heard before changed()."""


class LinkObserver(Protocol):
    """Learns from what workers say."""

    def joined(self, link: WorkerLink[Any, Any]) -> None:
        """A session has begun."""

    def cached(self, link: WorkerLink[Any, Any], changes: common_pb2.CacheChanges) -> None:
        """A worker's prefix cache has changed; raises PeerLost if it cannot have."""

    def stepped(self, link: WorkerLink[Any, Any], load: decode_service_pb2.StepLoad) -> None:
        """A decode worker has computed a step."""

    def lost(self, link: WorkerLink[Any, Any]) -> None:
        """A session has ended: what was known of that worker's cache is void."""

    def forgotten(self, incarnation: int) -> None:
        """That process will not come back."""


class WorkerLink(ABC, Generic[SendT, RecvT]):
    """The router's end of one worker's session.

    info: the worker, from the registry.
    identity: this router.
    dialer: opens a session with the worker.
    listener: hears when it changes.  observer: hears what the worker says of itself.
    """

    role: ClassVar[common_pb2.Role.ValueType]
    _capacity: prefill_service_pb2.PrefillCapacity | decode_service_pb2.DecodeCapacity

    def __init__(
        self,
        info: WorkerInfo,
        identity: Identity,
        dialer: Dialer[SendT, RecvT],
        listener: LinkListener,
        observer: LinkObserver,
    ) -> None:
        self.info = info
        # The process it is, for as long as the link lives; placement asks for it again and again.
        self.incarnation = info.incarnation
        self.is_draining = info.draining
        self.state = "draining" if info.draining else "connecting"
        self.reason = ""
        self.release = ""
        self.was_ready = False
        self.turn = 0.0
        self.breaker = Breaker()
        self._identity = identity
        self._dialer = dialer
        self._listener = listener
        self._observer = observer
        self._session: Session[SendT, RecvT] | None = None
        self._inboxes: dict[bytes, Inbox] = {}
        self._leaving = asyncio.Event()

    @property
    def name(self) -> str:
        """Name of the worker."""
        return self.info.name

    def is_trusted(self, now: float) -> bool:
        """Whether its breaker lets an attempt pass."""
        return self.breaker.allows(now)

    @property
    def is_connected(self) -> bool:
        """Whether there is a session with the worker, which may be draining."""
        return self._session is not None and self.state in ("ready", "draining")

    @property
    def is_ready(self) -> bool:
        """Whether the worker takes new requests."""
        return self.state == "ready"

    @property
    def is_alive(self) -> bool:
        """Whether there is a session with that very process, or it has left as it said."""
        return self.state in ("ready", "draining")

    @property
    def num_attempts(self) -> int:
        """Attempts of this router in flight at the worker."""
        return len(self._inboxes)

    def send(self, message: SendT) -> None:
        """Sends a command; raises PeerLost if there is no session."""
        if self._session is None:
            raise self._not_connected()
        try:
            self._session.send(message)
        except PeerLost:
            # Known here before the reader knows it; nothing more may be placed on this worker.
            self.state = "lost"
            self._listener.met()
            raise

    def attach(self, inbox: Inbox) -> None:
        """Lets an attempt hear this worker's events.

        Raises PeerLost if there is no session, Draining if that is so because the worker has left.
        """
        if self._session is None:
            raise Draining(f"{self.name} has left") if self.is_draining else self._not_connected()
        self._inboxes[inbox.attempt_id] = inbox

    def detach(self, attempt_id: bytes) -> None:
        """Ends the attempt here and tells the worker, if it is still there. Idempotent."""
        if self._inboxes.pop(attempt_id, None) is not None and self._session is not None:
            # A session that ended has ended its attempts at the worker as well.
            with suppress(PeerLost):
                self._session.send(self._cancel_message(attempt_id))
        self._leave_if_idle()

    def announced(self, info: WorkerInfo) -> None:
        """The registry says something new of the worker."""
        self.info = info
        if info.draining:
            self.drain()

    def drain(self) -> None:
        """The worker leaves: it gets nothing new, and is left with its last attempt. Idempotent."""
        if self.is_draining:
            return
        self.is_draining = True
        if self.state in ("connecting", "ready"):
            self.state = "draining"
        log.info("worker drains", worker=self.name, attempts=self.num_attempts)
        self._listener.met()
        self._listener.changed()
        self._leave_if_idle()

    async def run(self, *, is_known_lost: bool = False) -> None:
        """Holds one session from dial to its end. Returns when it is over; raises only on defects.

        is_known_lost: whether it was told already that the worker does not answer.
        """
        try:
            await self._hold_session()
            log.info("worker left", worker=self.name)
        except IncompatiblePeer as error:
            self.state, self.reason = "refused", error.message
            log.warning("worker refused", worker=self.name, field=error.field, reason=error.message)
        except BatonError as error:
            self._ended(error, is_known_lost=is_known_lost)
        finally:
            self._lose()

    def _ended(self, error: BatonError, *, is_known_lost: bool) -> None:
        """The worker has ended the session, or takes none, or does not answer."""
        if isinstance(error, Draining):
            self.drain()
        if self.is_draining and not self._inboxes:
            # An attempt that is on its way hears Draining when it comes.
            self.state = "draining"
            log.info("worker left", worker=self.name)
            return
        self.state, self.reason = "lost", error.message
        tell = log.debug if is_known_lost and not self.was_ready else log.warning
        tell("worker lost", worker=self.name, reason=self.reason)

    async def _hold_session(self) -> None:
        async with self._dialer.open(self.info) as session:
            session.send(self._hello_message())
            incoming = aiter(session)
            self._check(self._read_hello(await first_message(incoming, self.name)))
            self._read_capacity(await first_message(incoming, self.name))
            self._session, self.reason, self.was_ready = session, "", True
            self.state = "draining" if self.is_draining else "ready"
            log.info("worker ready", worker=self.name, incarnation=f"{self.info.incarnation:016x}")
            self._observer.joined(self)
            self._listener.met()
            self._listener.changed()
            self._leave_if_idle()
            await self._converse(session, incoming)

    async def _converse(self, session: Session[SendT, RecvT], incoming: AsyncIterator[RecvT]) -> None:
        """Until the session ends, or is left from this side."""
        talking = asyncio.ensure_future(converse(session, incoming, self._hear, self._heartbeat_message))
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait((talking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if talking.done():
                talking.result()
        finally:
            talking.cancel()
            leaving.cancel()
            # One that is left may break at the same moment, which says nothing new.
            await asyncio.gather(talking, leaving, return_exceptions=True)

    def _hear(self, message: RecvT) -> None:
        self._receive(message)
        self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        """Ends the session with a worker that drains once no attempt is there and none is on its way."""
        if self.is_draining and self._session is not None and self._is_idle:
            self._session = None
            self._leaving.set()

    def _check_draining(self, failure: common_pb2.Failure) -> None:
        """A worker that hands an attempt over, or refuses one, because it leaves, gets no other."""
        if failure.code == Draining.code:
            self.drain()

    def _not_connected(self) -> PeerLost:
        return PeerLost(f"{self.name} is not connected")

    def _check(self, hello: common_pb2.Hello) -> None:
        if hello.incarnation != self.info.incarnation:
            raise PeerLost(f"{self.name} has restarted since it registered")
        self.release = hello.release
        if hello.role != self.role:
            raise IncompatiblePeer(f"{self.name} is registered in another role than it has", field="role")
        self._identity.check(hello)

    def _check_progress(self, is_wedged: bool) -> None:
        """A worker whose device is stuck is as good as dead, and stays so until it takes sessions again."""
        if is_wedged:
            raise PeerLost(f"{self.name} is wedged: its step makes no progress")

    def _lose(self) -> None:
        self._session = None
        if self.state in ("connecting", "ready"):
            self.state = "lost"
        inboxes, self._inboxes = self._inboxes, {}
        error = PeerLost(f"{self.name} was lost: {self.reason or 'the router is stopping'}")
        for inbox in inboxes.values():
            inbox.put(LinkLost(self.role, error))
        self._observer.lost(self)
        self._listener.met()
        self._listener.changed()

    def _deliver(self, attempt_id: bytes, event: Event) -> None:
        inbox = self._inboxes.get(attempt_id)
        if inbox is not None:
            inbox.put(event)

    @property
    def num_blocks(self) -> int:
        """Blocks of the worker's cache."""
        return self._capacity.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._capacity.block_size

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that its cache holds."""
        return self.num_blocks * self.block_size

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens of one request in one step."""
        return self._capacity.chunk_tokens

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one step."""
        return self._capacity.max_batch_tokens

    @property
    @abstractmethod
    def _is_idle(self) -> bool:
        """Whether no attempt is at the worker or on its way to it."""

    @abstractmethod
    def status(self) -> admin_service_pb2.WorkerStatus:
        """The worker as `baton status` shows it."""

    @abstractmethod
    def _hello_message(self) -> SendT: ...

    @abstractmethod
    def _read_hello(self, message: RecvT) -> common_pb2.Hello: ...

    @abstractmethod
    def _read_capacity(self, message: RecvT) -> None: ...

    @abstractmethod
    def _heartbeat_message(self) -> SendT: ...

    @abstractmethod
    def _cancel_message(self, attempt_id: bytes) -> SendT: ...

    @abstractmethod
    def _receive(self, message: RecvT) -> None: ...
