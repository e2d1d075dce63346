"""The proxy itself: a fault that it does not make proves nothing elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from benchmarks.chaos.tcp_proxy import LOOPBACK, Direction, TcpProxy

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


async def test_latency_is_a_delay_and_not_a_brake() -> None:
    async with echo_behind_proxy() as (proxy, _):
        streams = await connect(proxy)
        loop = asyncio.get_running_loop()
        proxy.latency(0.3, directions=["up"])
        asked_at = loop.time()
        for index in range(10):
            streams[1].write(bytes([index]))
            await asyncio.sleep(0.01)
        assert await streams[0].readexactly(10) == bytes(range(10))
        # One after the other they would take 3 s.
        assert 0.3 <= loop.time() - asked_at < 1.5


async def test_jitter_keeps_the_order() -> None:
    async with echo_behind_proxy() as (proxy, _):
        streams = await connect(proxy)
        proxy.latency(0, jitter_s=0.1)
        for index in range(50):
            streams[1].write(bytes([index]))
            await asyncio.sleep(0.001)
        assert await streams[0].readexactly(50) == bytes(range(50))


async def test_jitter_varies_the_delay() -> None:
    async with echo_behind_proxy() as (proxy, _):
        streams = await connect(proxy)
        loop = asyncio.get_running_loop()
        proxy.latency(0, jitter_s=0.1, directions=["down"])
        delays_s = []
        for _ in range(10):
            asked_at = loop.time()
            await ask(streams, b"1")
            delays_s.append(loop.time() - asked_at)
        assert max(delays_s) - min(delays_s) > 0.01


async def test_a_narrow_link_drips_and_a_healed_one_flows() -> None:
    async with echo_behind_proxy() as (proxy, echoed):
        streams = await connect(proxy)
        loop = asyncio.get_running_loop()
        proxy.bandwidth(1000, "client", ["up"])
        asked_at = loop.time()
        answer = asyncio.create_task(ask(streams, b"x" * 300))
        assert await answer == b"x" * 300
        assert loop.time() - asked_at >= 0.25
        # In one piece it would be echoed by three reads of 100.
        assert len(echoed) > 4
        answer = asyncio.create_task(ask(streams, b"y" * 10_000))
        await asyncio.wait([answer], timeout=0.1)
        assert not answer.done()
        proxy.heal("client")
        assert await asyncio.wait_for(answer, 2.0) == b"y" * 10_000


async def test_one_way_only_the_held_direction_fills_up() -> None:
    """The sender into a hole is slowed down like one whose peer reads nothing; the other way still flows."""
    greeting = b"more to come"

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while True:
                writer.write(greeting)
                await asyncio.sleep(0.01)

    async with await asyncio.start_server(greet, LOOPBACK, 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with TcpProxy(port, lambda _port: "client") as proxy:
            reader, writer = await connect(proxy)
            await reader.readexactly(len(greeting))
            proxy.timeout("client", ["up"])
            writer.write(bytes(64 << 20))
            drained = asyncio.create_task(writer.drain())
            await asyncio.wait([drained], timeout=0.2)
            assert not drained.done()
            assert await reader.readexactly(5 * len(greeting)) == 5 * greeting
            assert [c.num_bytes["up"] for c in proxy.of("client")] == [0]
            proxy.reset_peer()
            with pytest.raises(ConnectionResetError):
                await drained


async def test_an_end_goes_into_a_black_hole_too() -> None:
    async with echo_behind_proxy() as (proxy, _):
        streams = await connect(proxy)
        await ask(streams, b"1")
        proxy.timeout("client", ["up"])
        streams[1].write_eof()
        end = asyncio.create_task(streams[0].read(1))
        await asyncio.wait([end], timeout=0.1)
        assert not end.done()
        proxy.heal("client")
        assert await end == b""


async def test_a_reset_ends_what_is_still_under_way() -> None:
    async with echo_behind_proxy() as (proxy, echoed):
        streams = await connect(proxy)
        await ask(streams, b"1")
        proxy.latency(60)
        streams[1].write(b"2")
        await asyncio.sleep(0)
        proxy.reset_peer()
        with pytest.raises(ConnectionResetError):
            await streams[0].readexactly(1)
        async with asyncio.timeout(1.0):
            while proxy.of("client"):
                await asyncio.sleep(0.01)
        assert echoed == [b"1"]
