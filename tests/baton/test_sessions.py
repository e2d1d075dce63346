"""Sessions over a real loopback gRPC server: how they end, and how silence is told from a slow self."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from baton import sessions
from baton.errors import BatonError, Draining, IncompatiblePeer, PeerLost
from baton.rpc import open_channel
from baton.rpc_server import Registration, RpcServer
from baton.sessions import StreamSession, converse, first_message, keep_alive, serving_session
from baton.v1 import prefill_service_pb2
from baton.v1.prefill_service_pb2_grpc import (
    PrefillServiceServicer,
    PrefillServiceStub,
    add_PrefillServiceServicer_to_server,
)
from tests.fakes import GUARD_S, MemorySession, until

Down = prefill_service_pb2.PrefillServiceSessionRequest
Up = prefill_service_pb2.PrefillServiceSessionResponse
BEAT_DOWN = Down(heartbeat=prefill_service_pb2.PrefillRouterHeartbeat())
BEAT_UP = Up(heartbeat=prefill_service_pb2.PrefillWorkerHeartbeat(num_running=3))

Serve = Callable[[StreamSession[Any, Any]], Awaitable[None]]


class Servicer(PrefillServiceServicer):
    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.error: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        try:
            async with serving_session(request_iterator, context) as session:
                await self._serve(session)
        except BaseException as error:
            self.error.set_result(error)
            raise
        self.error.set_result(None)


class Loopback:
    def __init__(self, server: RpcServer, servicer: Servicer) -> None:
        self.server = server
        self.servicer = servicer

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[StreamSession[Down, Up]]:
        async with open_channel(self.server.address) as channel:
            call = PrefillServiceStub(channel).Session()
            async with StreamSession("worker", aiter(call), call.write, call.cancel) as session:
                yield session

    async def served(self) -> BaseException | None:
        async with asyncio.timeout(GUARD_S):
            return await self.servicer.error


@asynccontextmanager
async def loopback(serve: Serve) -> AsyncIterator[Loopback]:
    servicer = Servicer(serve)
    registration = Registration(
        name="baton.v1.PrefillService", add=partial(add_PrefillServiceServicer_to_server, servicer)
    )
    async with await RpcServer.start([registration]) as server:
        yield Loopback(server, servicer)


async def echo_credit(session: StreamSession[Any, Any]) -> None:
    """Grants every token that comes back, one message for one."""
    async for message in session:
        session.send(Up(credit_grant=prefill_service_pb2.CreditGrant(tokens=message.credit_return.tokens)))


async def forever(session: StreamSession[Any, Any]) -> None:
    await asyncio.Event().wait()


async def receive(session: StreamSession[Down, Up]) -> list[Up]:
    async with asyncio.timeout(GUARD_S):
        return [message async for message in session]


async def send_on(session: StreamSession[Any, Any], message: Any) -> None:
    """Sends until the session refuses."""
    async with asyncio.timeout(GUARD_S):
        while True:
            session.send(message)
            await asyncio.sleep(0)


async def test_messages_arrive_in_order_in_both_directions() -> None:
    async with loopback(echo_credit) as net, net.dial() as session:
        for tokens in range(1, 201):
            session.send(Down(credit_return=prefill_service_pb2.CreditReturn(tokens=tokens)))
        got = []
        async with asyncio.timeout(GUARD_S):
            async for message in session:
                got.append(message.credit_grant.tokens)
                if len(got) == 200:
                    break
        assert got == list(range(1, 201))


async def test_heartbeats_flow_and_silence_is_a_lost_peer() -> None:
    beats: list[Any] = []

    async def beat_twice_then_hang(session: StreamSession[Any, Any]) -> None:
        for _ in range(2):
            session.send(BEAT_UP)
            await asyncio.sleep(0.05)
        await asyncio.Event().wait()

    async with loopback(beat_twice_then_hang) as net, net.dial() as session:
        reader = asyncio.create_task(collect(session, beats))
        started = asyncio.get_running_loop().time()
        with pytest.raises(PeerLost, match=r"silent for 0\.3 s"):
            async with asyncio.timeout(GUARD_S):
                await keep_alive(session, lambda: BEAT_DOWN, interval_s=0.05, silence_s=0.3)
        assert asyncio.get_running_loop().time() - started >= 0.3
        assert [message.heartbeat.num_running for message in beats] == [3, 3]
        reader.cancel()


async def collect(session: StreamSession[Down, Up], into: list[Any]) -> None:
    async for message in session:
        into.append(message)  # noqa: PERF401 - each is to be seen as soon as it comes


async def test_a_peer_that_beats_is_not_called_dead() -> None:
    async def beat(session: StreamSession[Any, Any]) -> None:
        await keep_alive(session, lambda: BEAT_UP, interval_s=0.02, silence_s=1000)

    async with loopback(beat) as net, net.dial() as session:
        reader = asyncio.create_task(collect(session, []))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await keep_alive(session, lambda: BEAT_DOWN, interval_s=0.02, silence_s=0.2)
        reader.cancel()


async def test_a_process_that_was_itself_stopped_reads_first_and_judges_then() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = MemorySession.pair("peer", "us")
    watching = asyncio.create_task(keep_alive(ours, lambda: BEAT_DOWN, interval_s=0.02, silence_s=0.2))
    reader = asyncio.create_task(collect(ours, []))  # type: ignore[arg-type]
    await asyncio.sleep(0.03)
    # Many silences long this loop runs nothing; what the peer sent meanwhile is waiting.
    until_s = loop.time() + 0.6
    while loop.time() < until_s:
        pass
    theirs.send(BEAT_UP)
    await asyncio.sleep(0.05)
    assert not watching.done()
    with pytest.raises(PeerLost, match="silent"):
        async with asyncio.timeout(GUARD_S):
            await watching
    reader.cancel()


async def test_a_peer_that_ends_the_stream_is_lost() -> None:
    async def end(session: StreamSession[Any, Any]) -> None:
        session.send(BEAT_UP)
        await anext(aiter(session))

    async with loopback(end) as net, net.dial() as session:
        session.send(BEAT_DOWN)
        with pytest.raises(PeerLost, match="ended the session"):
            await receive(session)
        with pytest.raises(PeerLost):
            await send_on(session, BEAT_DOWN)


async def test_a_peer_that_dies_is_lost() -> None:
    async with loopback(forever) as net, net.dial() as session:
        session.send(BEAT_DOWN)
        receiving = asyncio.create_task(receive(session))
        await asyncio.sleep(0.05)
        await net.server.stop(0)
        with pytest.raises(PeerLost, match="the session with worker broke"):
            await receiving


async def test_a_connection_that_cannot_be_made_is_a_lost_peer() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        call = PrefillServiceStub(channel).Session()
        async with StreamSession("worker", aiter(call), call.write, call.cancel) as session:
            session.send(BEAT_DOWN)
            with pytest.raises(PeerLost):
                await receive(session)


async def test_an_error_of_the_peer_is_told() -> None:
    async def refuse(session: StreamSession[Any, Any]) -> None:
        raise PeerLost("the router sent nonsense")

    async with loopback(refuse) as net, net.dial() as session:
        with pytest.raises(PeerLost, match="the router sent nonsense"):
            await receive(session)


async def test_a_peer_that_refuses_us_says_which_field_differs() -> None:
    async def refuse(session: StreamSession[Any, Any]) -> None:
        await first_message(aiter(session), session.peer)
        raise IncompatiblePeer("rope differs: serve the same model from both", field="rope")

    async with loopback(refuse) as net, net.dial() as session:
        session.send(BEAT_DOWN)
        with pytest.raises(IncompatiblePeer, match="rope differs") as error:
            await receive(session)
        assert error.value.field == "rope"


async def test_a_peer_that_is_leaving_is_not_one_that_is_lost() -> None:
    async def refuse(session: StreamSession[Any, Any]) -> None:
        await first_message(aiter(session), session.peer)
        raise Draining("the worker is leaving")

    async with loopback(refuse) as net, net.dial() as session:
        session.send(BEAT_DOWN)
        with pytest.raises(Draining, match="the worker is leaving"):
            await receive(session)


async def test_a_full_outbox_is_a_lost_peer_for_the_sender_and_for_its_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "OUTBOX_MESSAGES", 8)
    async with loopback(forever) as net, net.dial() as session:
        reading = asyncio.create_task(receive(session))
        big = Down(cancel=prefill_service_pb2.CancelCommand(attempt_id=b"x" * 1_000_000))
        with pytest.raises(PeerLost, match="does not read: 8 messages"):
            await send_on(session, big)
        with pytest.raises(PeerLost, match="does not read"):
            await reading
        with pytest.raises(PeerLost, match="has ended"):
            session.send(BEAT_DOWN)


async def test_a_server_whose_client_does_not_read_loses_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "OUTBOX_MESSAGES", 8)
    big = Up(token={"attempt_id": b"x" * 1_000_000})

    async def flood(session: StreamSession[Any, Any]) -> None:
        while True:
            session.send(big)
            await asyncio.sleep(0)

    async with loopback(flood) as net, net.dial() as session:
        session.send(BEAT_DOWN)
        error = await net.served()
        assert isinstance(error, PeerLost)
        assert "does not read" in str(error)


async def test_close_is_quiet_and_idempotent() -> None:
    async with loopback(forever) as net, net.dial() as session:
        receiving = asyncio.create_task(receive(session))
        await asyncio.sleep(0.05)
        await session.close()
        await session.close()
        assert await receiving == []
        with pytest.raises(PeerLost):
            session.send(BEAT_DOWN)
        assert isinstance(await net.served(), asyncio.CancelledError)


async def test_a_cancelled_reader_stays_cancelled() -> None:
    async with loopback(forever) as net, net.dial() as session:
        receiving = asyncio.create_task(receive(session))
        await asyncio.sleep(0.05)
        receiving.cancel()
        await asyncio.wait([receiving])
        assert receiving.cancelled()


async def test_a_session_leaves_no_task_behind() -> None:
    async with loopback(echo_credit) as net:
        before = asyncio.all_tasks()
        async with net.dial() as session:
            session.send(Down(credit_return=prefill_service_pb2.CreditReturn(tokens=1)))
            await anext(aiter(session))
        await net.served()
        names = {task.get_name() for task in asyncio.all_tasks() - before}
        assert not any(name.startswith("session-writer") for name in names)


async def test_a_conversation_ends_with_what_its_handler_raises() -> None:
    ours, theirs = MemorySession.pair("peer", "us")

    def handle(message: Any) -> None:
        raise ValueError("cannot be handled")

    theirs.send(BEAT_UP)
    with pytest.raises(ValueError, match="cannot be handled"):
        async with asyncio.timeout(GUARD_S):
            await converse(ours, aiter(ours), handle, lambda: BEAT_DOWN)
    assert not any(task.get_name().startswith(("heartbeat", "reader")) for task in asyncio.all_tasks())


async def test_a_conversation_ends_when_the_peer_does() -> None:
    ours, theirs = MemorySession.pair("peer", "us")
    got: list[Any] = []
    talking = asyncio.create_task(converse(ours, aiter(ours), got.append, lambda: BEAT_DOWN))
    theirs.send(BEAT_UP)
    await until(lambda: got == [BEAT_UP])
    theirs.cut()
    with pytest.raises(PeerLost, match="peer ended the session"):
        async with asyncio.timeout(GUARD_S):
            await talking


async def test_a_peer_that_does_not_introduce_itself_is_lost() -> None:
    ours, _theirs = MemorySession.pair("peer", "us")
    with pytest.raises(PeerLost, match=r"did not introduce itself within 0\.05 s"):
        await first_message(aiter(ours), "peer", timeout_s=0.05)


async def test_the_first_message_is_taken_once() -> None:
    ours, theirs = MemorySession.pair("peer", "us")
    theirs.send(BEAT_UP)
    theirs.send(Up(credit_grant=prefill_service_pb2.CreditGrant(tokens=5)))
    incoming = aiter(ours)
    assert await first_message(incoming, "peer") == BEAT_UP
    assert (await anext(incoming)).credit_grant.tokens == 5
    with suppress(BatonError):
        await ours.close()
