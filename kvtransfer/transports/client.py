"""The sender's ways to all receivers: pairing, and opening writes.

Owns one connection per receiver, known by its incarnation, and how bytes get there: into shared
memory on the same host, by one-sided writes where both have NIXL, else inside a gRPC stream.
Must not know caches, frames' contents, or what a write is for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from baton.errors import BatonError, ConfigError, IncompatiblePeer, PeerLost, Unavailable
from baton.identity import Identity
from baton.logs import get_logger
from baton.rpc import OpenChannel, open_channel
from baton.v1.kv_transfer_service_pb2 import PairRequest, PairResponse, WriteResponse
from baton.versions import Versions
from kvtransfer.contract import KvFormat, Offload, Pairing, Peer, Ticket, TransferTarget
from kvtransfer.slots import Sender
from kvtransfer.transports import nixl
from kvtransfer.transports.grpc_codec import write_format
from kvtransfer.transports.nixl import NixlCarrier, NixlSource
from kvtransfer.transports.service import SERVICE_NAME
from kvtransfer.transports.shm import ShmCarrier
from kvtransfer.transports.writer import Carrier, GrpcKvWriter, end_of, is_cancelled
from kvtransfer.version import TRANSFER_VERSIONS, agree

TRANSPORTS = ("auto", "shm", "nixl", "grpc")
PAIR_TIMEOUT_S = 10.0

log = get_logger(__name__)


class _ClosableCarrier(Carrier, Protocol):
    async def close(self) -> None:
        """Drops the receiver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """How a sender reaches receivers.

    transport: "shm", "nixl" or "grpc": that one or gRPC; "auto": the first of them that works.
    shm_folder: where segments lie.
    is_private: KV must not leave the host in plain text, so "auto" leaves NIXL out, which encrypts nothing.
    max_frame_bytes: largest payload; one that fits into no slot goes inside a stream.
    """

    transport: str = "auto"
    shm_folder: Path = Path("/dev/shm")
    max_frame_bytes: int = 1 << 20
    has_digests: bool = True
    is_private: bool = False

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"kv_transport is {self.transport!r}; it must be one of {', '.join(TRANSPORTS)}",
                field="kv_transport",
            )


@dataclass(slots=True, eq=False)
class _Link:
    """One receiver: its channel and its carrier."""

    peer: Peer
    channel: grpc.aio.Channel
    # Attempts of which something may still write into the receiver's slots, over this link or one before it.
    writing: set[bytes]
    pairing: Pairing | None = None
    carrier: _ClosableCarrier | None = None
    num_writes: int = 0
    is_parted: bool = False
    _dropped: list[_ClosableCarrier] = field(default_factory=list)
    pairing_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def ready(self) -> None:
        """Waits for the connection; raises PeerLost as soon as an attempt to connect fails."""
        while (state := self.channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise PeerLost(f"cannot connect to {self.peer.worker}")
            await self.channel.wait_for_state_change(state)

    def dropped(self) -> PeerLost:
        """What a receiver is to those who wait for it to be paired, when it is parted."""
        return PeerLost(f"{self.peer.worker} was dropped while it was being paired")

    async def part(self) -> None:
        """Drops the receiver, once the last write has ended."""
        self.is_parted = True
        await self.tidy()

    async def tidy(self) -> None:
        """Closes what nobody uses any more; called when a write has ended."""
        if self.num_writes:
            return
        if self.is_parted and self.carrier is not None:
            self.drop_carrier()
        dropped, self._dropped = self._dropped, []
        for carrier in dropped:
            await carrier.close()
        if self.is_parted:
            await self.channel.close()

    def drop_carrier(self) -> None:
        """Uses the carrier for no further write; those that are open may still be using it."""
        if self.carrier is not None:
            self._dropped.append(self.carrier)
            self.carrier = None


class KvClient:
    """A KvTransport over KvTransferService and what it offers.

    identity: this worker. fmt: how its cache stores KV.
    memory: the cache's bytes, where frames are read in place; NIXL needs them.
    offload: where the cache is read. dial: opens a channel to an address.
    """

    def __init__(
        self,
        identity: Identity,
        fmt: KvFormat,
        *,
        offload: Offload[Any],
        memory: NDArray[np.uint8] | None = None,
        config: ClientConfig | None = None,
        dial: OpenChannel = open_channel,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.on_changed: Callable[[int, Pairing], None] = lambda _incarnation, _pairing: None
        self._identity = identity
        self._format = fmt
        self._offload = offload
        self._memory = memory
        self._config = config or ClientConfig()
        self._dial = dial
        self._links: dict[int, _Link] = {}
        # By receiver, because they outlive a link that breaks; a failed carrier's stay for good.
        self._writing: dict[int, set[bytes]] = {}
        self._nixl: NixlSource | None = None
        self._nixl_lock = asyncio.Lock()

    @property
    def num_connections(self) -> int:
        """Receivers that a connection is kept to."""
        return len(self._links)

    def transport_to(self, incarnation: int) -> str | None:
        """Name of the transport to a receiver; None if it is not paired."""
        link = self._links.get(incarnation)
        return None if link is None or link.pairing is None else link.pairing.transport

    async def pair(self, peer: Peer) -> Pairing:
        """Connects and chooses the transport; raises PeerLost or IncompatiblePeer."""
        link = self._links.get(peer.incarnation)
        if link is None:
            writing = self._writing.setdefault(peer.incarnation, set())
            link = self._links[peer.incarnation] = _Link(peer, self._dial(peer.address), writing)
        async with link.pairing_lock:
            if link.pairing is None and not link.is_parted:
                try:
                    async with asyncio.timeout(PAIR_TIMEOUT_S):
                        link.pairing = await self._choose(link)
                except TimeoutError:
                    await self._drop(link)
                    raise PeerLost(f"{peer.worker} does not answer") from None
                except BaseException:
                    await self._drop(link)
                    raise
        if link.pairing is None or link.is_parted:
            await self._drop(link)
            raise link.dropped()
        return link.pairing

    async def part(self, incarnation: int) -> None:
        """Drops a receiver."""
        link = self._links.get(incarnation)
        if link is not None:
            await self._drop(link)

    @asynccontextmanager
    async def open(self, ticket: Ticket, target: TransferTarget) -> AsyncIterator[GrpcKvWriter]:
        """Opens a write; leaving the context cancels the stream if it has not ended."""
        link = self._links.get(target.incarnation)
        if link is None or link.pairing is None:
            raise PeerLost(f"this worker is not paired with {target.worker}")
        link.num_writes += 1
        # Requests are serialized where their buffers are at hand; gRPC gets bytes.
        method: grpc.aio.StreamStreamMultiCallable[bytes, WriteResponse] = link.channel.stream_stream(
            f"/{SERVICE_NAME}/Write", response_deserializer=WriteResponse.FromString
        )
        writer = GrpcKvWriter(
            method(),
            ticket.attempt_id,
            target.worker,
            sender=Sender(self._identity.name, self._identity.incarnation),
            offload=self._offload,
            carrier=link.carrier,
            open_attempts=link.writing,
        )
        if link.carrier is not None:
            link.writing.add(ticket.attempt_id)
        try:
            await writer.begin(ticket)
            if link.carrier is not None and not writer.is_placed:
                self.counters["writes_without_slots"] += 1
            yield writer
        finally:
            try:
                await writer.close()
            finally:
                link.num_writes -= 1
                if not writer.carrier_failure:
                    link.writing.discard(ticket.attempt_id)
                if writer.carrier_failure and link.carrier is not None and not link.is_parted:
                    self._fall_back(link, writer.carrier_failure)
                self._forget(link)
                await link.tidy()

    async def close(self) -> None:
        """Ends all writes and closes all channels; idempotent."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.is_parted = True
            await link.channel.close()
            await link.tidy()
        if self._nixl is not None:
            self._nixl.close()
            await self._nixl.ended()
            self._nixl = None

    def _fall_back(self, link: _Link, reason: str) -> None:
        """A transport that fails in use is not used again for this pair."""
        link.drop_carrier()
        link.pairing = Pairing(transport="grpc", note=reason)
        self.counters["transport_fallbacks"] += 1
        log.warning("KV goes over gRPC", worker=link.peer.worker, reason=reason)
        self.on_changed(link.peer.incarnation, link.pairing)

    async def _drop(self, link: _Link) -> None:
        if self._links.get(link.peer.incarnation) is link:
            del self._links[link.peer.incarnation]
            self._forget(link)
        await link.part()

    def _forget(self, link: _Link) -> None:
        """Once a link is dropped and nothing is under way, nobody needs to know who wrote."""
        if link.peer.incarnation not in self._links and not link.writing:
            self._writing.pop(link.peer.incarnation, None)

    async def _choose(self, link: _Link) -> Pairing:
        """Tries the fast transports in order; what does not work is told in one line, and gRPC is taken."""
        await link.ready()
        notes: list[str] = []
        for name in self._candidates():
            try:
                link.carrier = await self._carrier(link, name)
                return Pairing(transport=name, note="; ".join(notes))
            except (PeerLost, Unavailable) as error:
                notes.append(f"no {name}: {error.message}")
        await self._introduce(link, "")
        if notes:
            self.counters["transport_fallbacks"] += 1
            log.warning("KV goes over gRPC", worker=link.peer.worker, reason="; ".join(notes))
        return Pairing(transport="grpc", note="; ".join(notes))

    def _candidates(self) -> Sequence[str]:
        if self._config.transport == "auto":
            has_nixl = nixl.is_installed() and self._memory is not None and not self._config.is_private
            return ("shm", "nixl") if has_nixl else ("shm",)
        return () if self._config.transport == "grpc" else (self._config.transport,)

    async def _carrier(self, link: _Link, name: str) -> _ClosableCarrier:
        """Raises PeerLost or Unavailable, with the reason, where a transport cannot be used."""
        offer = await self._introduce(link, name)
        if not offer.HasField(name):  # type: ignore[arg-type]
            raise Unavailable(offer.note or "the receiver does not offer it")
        largest = max(self._config.max_frame_bytes, self._format.layer_block_bytes)
        if largest > offer.slot_bytes:
            raise Unavailable(
                f"frames may have {largest} bytes, the receiver's slots have {offer.slot_bytes}"
            )
        if name == "shm":
            carrier: _ClosableCarrier = await self._offload(lambda: self._attach(offer))
            return carrier
        return await self._meet(offer)

    def _attach(self, offer: PairResponse) -> ShmCarrier:
        return ShmCarrier.attach(
            offer.shm.path,
            offer.shm.nonce,
            offer.slot_bytes,
            folder=self._config.shm_folder,
            offset_bytes=offer.shm.offset_bytes,
        )

    async def _meet(self, offer: PairResponse) -> NixlCarrier:
        if self._memory is None:
            raise Unavailable("NIXL writes from a cache on the host whose blocks are contiguous only")
        async with self._nixl_lock:
            if self._nixl is None:
                name = f"{self._identity.name}-{self._identity.incarnation:016x}"
                self._nixl = await NixlSource.start(name, self._memory)
        expected = f"{offer.hello.name}-{offer.hello.incarnation:016x}"
        peer = await self._nixl.meet(offer.nixl.agent_metadata, offer.nixl.base_address, expected)
        return NixlCarrier(self._nixl, peer, offer.nixl.base_address, offer.slot_bytes)

    async def _introduce(self, link: _Link, wants: str) -> PairResponse:
        if link.is_parted:
            raise link.dropped()
        call: grpc.aio.UnaryUnaryMultiCallable[PairRequest, PairResponse] = link.channel.unary_unary(
            f"/{SERVICE_NAME}/Pair",
            request_serializer=PairRequest.SerializeToString,
            response_deserializer=PairResponse.FromString,
        )
        request = PairRequest(
            hello=self._identity.hello(),
            oldest_version=TRANSFER_VERSIONS.oldest,
            newest_version=TRANSFER_VERSIONS.newest,
            format=write_format(self._format),
            wants=wants,
            has_digests=self._config.has_digests,
        )
        try:
            response = await call(request)
        except grpc.aio.AioRpcError as error:
            raise _pairing_failed(error, link.peer.worker) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise link.dropped() from None
        if response.hello.incarnation != link.peer.incarnation:
            raise PeerLost(f"{link.peer.worker} has restarted since it was announced")
        self._identity.check(response.hello)
        agree(TRANSFER_VERSIONS, Versions(response.version, response.version), response.hello.name)
        return response


def _pairing_failed(error: grpc.aio.AioRpcError, worker: str) -> BatonError:
    failure = end_of(error, worker)
    return failure if isinstance(failure, PeerLost | IncompatiblePeer) else PeerLost(failure.message)
