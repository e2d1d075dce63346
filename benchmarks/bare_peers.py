"""What the machine can do without Baton: a copy, a TCP connection, a gRPC stream.

The peers that the transfer layer is compared with. Each moves the same bytes between two buffers or two
processes and says how fast that was. Must not know the transfer layer, except for the gRPC options, which
are Baton's so that the two differ in what is done with the bytes only.
"""

from __future__ import annotations

import asyncio
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio
import numpy as np

from baton.rpc import SERVER_OPTIONS, open_channel
from benchmarks.child import Child

MIB = 1 << 20
TOTAL_BYTES = 256 * MIB
LOOPBACK = "127.0.0.1"
DISCARD, TOUCH = "Discard", "Touch"


def gb_per_s(num_bytes: int, duration_s: float) -> float:
    """10^9 bytes a second."""
    return num_bytes / duration_s / 1e9


class MemoryCopy:
    """numpy's copy of 1 MiB pieces from one big buffer to another, on one thread."""

    def __init__(self) -> None:
        self._source = np.ones((TOTAL_BYTES // MIB, MIB), np.uint8)
        self._target = np.zeros_like(self._source)

    async def measure(self) -> float:
        """GB/s, counting each byte once."""
        began = time.perf_counter()
        for source, target in zip(self._source, self._target, strict=True):
            np.copyto(target, source)
        return gb_per_s(TOTAL_BYTES, time.perf_counter() - began)


class TcpConnection:
    """A loopback connection to a process that reads into one buffer."""

    def __init__(self) -> None:
        self._child = Child(_drain)
        self._socket = socket.create_connection((LOOPBACK, self._child.hear()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._piece = bytes(MIB)

    async def measure(self) -> float:
        """GB/s until the other end has read everything."""
        began = time.perf_counter()
        for _ in range(TOTAL_BYTES // MIB):
            self._socket.sendall(self._piece)
        self._socket.recv(1)
        return gb_per_s(TOTAL_BYTES, time.perf_counter() - began)

    def close(self) -> None:
        """Ends the connection and the process."""
        self._socket.close()
        self._child.close()


def _drain(pipe: Connection) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
    buffer, num_read = bytearray(MIB), 0
    while num_bytes := connection.recv_into(buffer):
        num_read += num_bytes
        if num_read == TOTAL_BYTES:
            num_read = 0
            connection.send(b"!")


class GrpcStream:
    """A stream of 1 MiB messages over one channel to a grpc.aio server in another process."""

    def __init__(self) -> None:
        self._child = Child(_serve)
        self._channel = open_channel(f"{LOOPBACK}:{self._child.hear()}")
        self._source = np.ones((TOTAL_BYTES // MIB, MIB), np.uint8)

    async def measure(self, *, touches: bool) -> float:
        """GB/s until the other end has read everything.

        touches: the sender copies every message out of a big buffer, the receiver into another; else
            one and the same message is sent and nobody looks at it.
        """
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            f"/bare/{TOUCH if touches else DISCARD}"
        )
        call, message = method(), bytes(MIB)
        began = time.perf_counter()
        for piece in self._source:
            await call.write(piece.tobytes() if touches else message)
        await call.done_writing()
        await call.read()
        return gb_per_s(TOTAL_BYTES, time.perf_counter() - began)

    async def close(self) -> None:
        """Ends the connection and the process."""
        await self._channel.close()
        self._child.close()


def _serve(pipe: Connection) -> None:
    asyncio.run(_serve_grpc(pipe))


async def _serve_grpc(pipe: Connection) -> None:
    target = np.zeros((TOTAL_BYTES // MIB, MIB), np.uint8)

    async def discard(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while await context.read() is not grpc.aio.EOF:
            pass
        await context.write(b"!")

    async def touch(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        index = 0
        while (message := await context.read()) is not grpc.aio.EOF:
            target[index] = np.frombuffer(message, np.uint8)
            index += 1
        await context.write(b"!")

    server = grpc.aio.server(options=SERVER_OPTIONS)
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        DISCARD: grpc.stream_stream_rpc_method_handler(discard),
        TOUCH: grpc.stream_stream_rpc_method_handler(touch),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    await server.start()
    pipe.send(port)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), ended.set)
    await ended.wait()
    await server.stop(None)
