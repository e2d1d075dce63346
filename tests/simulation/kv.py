"""The KV transport over the simulated network: the real writer and the real bytes.

Owns what happens to frames on the way: lost, doubled, cut short or altered.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from baton.errors import PeerLost
from kvtransfer.contract import Ticket, TransferTarget
from kvtransfer.transports.grpc import GrpcKvWriter
from kvtransfer.transports.grpc_codec import WriteResponse
from kvtransfer.wire import HEADER_BYTES
from tests.simulation.calls import Caller, ClientCall


class FrameFaults:
    """What links do to frames. share: of the frames, by (sender, receiver)."""

    def __init__(self, rng: random.Random) -> None:
        self.share: dict[tuple[str, str], float] = {}
        self._rng = rng

    def apply(self, link: tuple[str, str], header: bytes, payload: memoryview) -> list[tuple[bytes, bytes]]:
        """What arrives instead of one frame."""
        share = self.share.get(link, 0.0)
        if not share or self._rng.random() >= share:
            return [(header, payload)]  # type: ignore[list-item]
        frame = header + payload
        kind = self._rng.choice(("drop", "duplicate", "truncate", "flip", "flip"))
        if kind == "drop":
            return []
        if kind == "duplicate":
            return [_split(frame), _split(frame)]
        if kind == "truncate":
            return [_split(frame[: self._rng.randrange(1, len(frame))])]
        bit = self._rng.randrange(8 * len(frame))
        altered = bytearray(frame)
        altered[bit // 8] ^= 1 << bit % 8
        return [_split(bytes(altered))]


def _split(frame: bytes) -> tuple[bytes, bytes]:
    return frame[:HEADER_BYTES], frame[HEADER_BYTES:]


class SimKvWriter(GrpcKvWriter):
    """A GrpcKvWriter on a link that may damage frames."""

    def __init__(self, call: ClientCall, ticket: Ticket, target: TransferTarget, faults: FrameFaults) -> None:
        super().__init__(call, ticket.attempt_id, target.worker)  # type: ignore[arg-type]
        self._faults = faults
        self._link = call.names

    async def send_frame(self, header: bytes, payload: memoryview) -> None:
        for head, body in self._faults.apply(self._link, header, payload):
            await super().send_frame(head, memoryview(body))


class SimKvTransport:
    """A KvTransport of one process."""

    def __init__(self, caller: Caller, faults: FrameFaults, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._caller = caller
        self._faults = faults

    async def connect(self, target: TransferTarget) -> None:
        """Asks whether anybody is there."""
        call = self._caller.open("connect", _node(target), bytes)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            raise PeerLost(f"cannot connect to {target.worker}") from None
        finally:
            call.cancel()

    @asynccontextmanager
    async def open(self, ticket: Ticket, target: TransferTarget) -> AsyncIterator[SimKvWriter]:
        """Opens a write."""
        call = self._caller.open("kv", _node(target), WriteResponse.FromString)
        call.limit_sending(self._window_bytes)
        writer = SimKvWriter(call, ticket, target, self._faults)
        try:
            await writer.begin(ticket)
            yield writer
        finally:
            await writer.close()

    async def close(self) -> None:
        pass


def _node(target: TransferTarget) -> str:
    return target.address.partition(":")[0]
