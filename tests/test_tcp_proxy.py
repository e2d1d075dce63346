"""The proxy itself: a fault that it does not make proves nothing elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.tcp_proxy import LOOPBACK, Direction, TcpProxy

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[tuple[TcpProxy, list[bytes]]]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                echoed.append(data)
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    echoed: list[bytes] = []
    async with await asyncio.start_server(echo, LOOPBACK, 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with TcpProxy(port, lambda _port: "client") as proxy:
            yield proxy, echoed


async def connect(proxy: TcpProxy) -> Streams:
    host, port = proxy.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def ask(streams: Streams, data: bytes) -> bytes:
    streams[1].write(data)
    return await streams[0].readexactly(len(data))


async def test_what_passes_is_what_was_sent() -> None:
    async with echo_behind_proxy() as (proxy, _):
        assert await ask(await connect(proxy), b"abc" * 50_000) == b"abc" * 50_000
        assert [c.num_bytes for c in proxy.of("client")] == [{"up": 150_000, "down": 150_000}]


@pytest.mark.parametrize("peer", ["client", "*"])
async def test_a_cut_resets_old_and_new_connections_until_it_heals(peer: str) -> None:
    async with echo_behind_proxy() as (proxy, _):
        old = await connect(proxy)
        assert await ask(old, b"1") == b"1"
        proxy.cut(peer)
        with pytest.raises(ConnectionResetError):
            await old[0].readexactly(1)
        new = await connect(proxy)
        with pytest.raises(ConnectionResetError):
            await ask(new, b"2")
        proxy.heal(peer)
        assert await ask(await connect(proxy), b"3") == b"3"


async def test_a_reset_lets_the_next_connection_through() -> None:
    async with echo_behind_proxy() as (proxy, _):
        old = await connect(proxy)
        await ask(old, b"1")
        proxy.reset_peer()
        with pytest.raises(ConnectionResetError):
            await old[0].readexactly(1)
        assert await ask(await connect(proxy), b"2") == b"2"


@pytest.mark.parametrize(("direction", "arrives"), [("up", False), ("down", True)])
async def test_a_black_hole_is_silent_in_its_direction_and_keeps_what_was_sent(
    direction: Direction, arrives: bool
) -> None:
    async with echo_behind_proxy() as (proxy, echoed):
        streams = await connect(proxy)
        await ask(streams, b"1")
        proxy.timeout("client", [direction])
        streams[1].write(b"2")
        answer = asyncio.create_task(streams[0].readexactly(1))
        done, _ = await asyncio.wait([answer], timeout=0.1)
        assert not done
        assert (b"2" in echoed) is arrives
        proxy.heal("client")
        assert await answer == b"2"


async def test_another_peers_toxics_are_not_ours() -> None:
    async with echo_behind_proxy() as (proxy, _):
        streams = await connect(proxy)
        proxy.timeout("somebody")
        proxy.cut("somebody")
        proxy.latency(60, "somebody")
        assert await ask(streams, b"1") == b"1"


async def test_latency_delays_what_passes() -> None:
    async with echo_behind_proxy() as (proxy, _):
        streams = await connect(proxy)
        loop = asyncio.get_running_loop()
        proxy.latency(0.1, directions=["down"])
        asked_at = loop.time()
        assert await ask(streams, b"1") == b"1"
        assert loop.time() - asked_at >= 0.1
