"""A router leaves: what runs has time to end, and what is left goes on at another router."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from baton import AsyncClient
from baton.errors import Draining, Overloaded
from baton.rpc import is_from_baton, open_channel, translate
from baton.rpc_server import Registration, RpcServer
from baton.v1.inference_service_pb2 import GenerateRequest, ListModelsRequest
from baton.v1.inference_service_pb2_grpc import (
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from router.grammars import GrammarCheck
from router.handover import Handover
from router.inference import Inference
from router.service import InferenceServicer
from router.text import Text
from tests.fakes import GUARD_S, expected_answer, until
from tests.router.test_service import KV, PROMPT, Door, door
from tests.router.tiny_text import model_dir

LONG_S = 60.0


class Server:
    """What a server does to the calls that a test runs: it stops once none is left, or after the time."""

    def __init__(self, *calls: asyncio.Task[None]) -> None:
        self.calls = calls
        self.graces: list[float] = []

    async def stop(self, grace_s: float) -> None:
        self.graces.append(grace_s)
        if self.calls:
            await asyncio.wait(self.calls, timeout=grace_s)


async def covered(handover: Handover, doing: asyncio.Future[None]) -> None:
    async with handover.covering():
        await doing


async def test_calls_that_end_in_time_are_waited_for_and_others_handed_over() -> None:
    handover, loop = Handover(), asyncio.get_running_loop()
    quick, slow = loop.create_future(), loop.create_future()
    calls = [asyncio.create_task(covered(handover, doing)) for doing in (quick, slow)]
    await asyncio.sleep(0)
    server = Server(*calls)
    draining = asyncio.create_task(handover.drain(server.stop, 0.1))
    await asyncio.sleep(0)
    quick.set_result(None)
    async with asyncio.timeout(GUARD_S):
        await draining
    assert calls[0].exception() is None
    assert isinstance(calls[1].exception(), Draining)
    assert slow.cancelled()
    # The server's own end of calls must come after the words that end them.
    assert server.graces[0] > 0.1


async def test_the_drain_is_over_as_soon_as_nothing_runs() -> None:
    handover = Handover()
    async with asyncio.timeout(GUARD_S):
        await handover.drain(Server().stop, LONG_S)
    late = asyncio.get_running_loop().create_future()
    with pytest.raises(Draining):
        await covered(handover, late)
    assert not late.cancelled()


async def test_a_drain_that_is_broken_off_hands_over_at_once() -> None:
    handover = Handover()
    doing = asyncio.get_running_loop().create_future()
    call = asyncio.create_task(covered(handover, doing))
    await asyncio.sleep(0)
    server = Server(call)
    draining = asyncio.create_task(handover.drain(server.stop, LONG_S))
    await until(lambda: bool(server.graces))
    # As happens where a service of the router fails meanwhile.
    draining.cancel()
    async with asyncio.timeout(GUARD_S):
        with pytest.raises(Draining):
            await call


async def test_an_error_of_a_calls_own_is_kept() -> None:
    handover = Handover()
    late = asyncio.get_running_loop().create_future()
    late.set_exception(TimeoutError())
    with pytest.raises(TimeoutError):
        await covered(handover, late)
    doing = asyncio.get_running_loop().create_future()
    doing.set_exception(Overloaded("full"))
    call = asyncio.create_task(covered(handover, doing))
    asyncio.get_running_loop().call_soon(handover.begin)
    with pytest.raises(Overloaded):
        await call


@asynccontextmanager
async def serving(d: Door, folder: Path) -> AsyncIterator[tuple[Inference, RpcServer]]:
    """Another router's door to the same cluster."""
    model = model_dir(folder / "again")
    inference = Inference(
        core=d.cluster.stage.core,
        model=model,
        text=Text(model, asyncio.to_thread),
        grammars=GrammarCheck(None, asyncio.to_thread),
        rng=random.Random(2),
    )
    add = partial(add_InferenceServiceServicer_to_server, InferenceServicer(inference))
    async with await RpcServer.start([Registration(name="baton.v1.InferenceService", add=add)]) as server:
        yield inference, server


async def closed(channel: grpc.aio.Channel) -> None:
    """Returns once the server takes no new calls."""
    stub, code = InferenceServiceStub(channel), grpc.StatusCode.OK
    async with asyncio.timeout(GUARD_S):
        while code is grpc.StatusCode.OK:
            code = await stub.ListModels(ListModelsRequest()).code()
    # One that is under way as the server stops is cancelled.
    assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_running_answer_ends_and_a_new_one_is_refused(tmp_path: Path) -> None:
    async with (
        door(tmp_path) as d,
        serving(d, tmp_path) as (inference, server),
        await AsyncClient.connect(server.address) as client,
        open_channel(server.address) as channel,
    ):
        d.cluster.network.may_commit.clear()
        running = asyncio.create_task(client.generate("hello", max_tokens=9, temperature=0.0).answers())
        await until(lambda: d.cluster.network.num_commits_waiting == 1)
        draining = asyncio.create_task(inference.handover.drain(server.stop, LONG_S))
        await closed(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await InferenceServiceStub(channel).Generate(GenerateRequest(text="hello")).read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not is_from_baton(refused.value)
        assert not draining.done()
        d.cluster.network.may_commit.set()
        async with asyncio.timeout(GUARD_S):
            (answer,) = await running
            await draining
        assert list(answer.token_ids) == expected_answer(PROMPT, 9, KV)


async def test_what_is_left_is_told_that_the_router_drains(tmp_path: Path) -> None:
    async with (
        door(tmp_path) as d,
        serving(d, tmp_path) as (inference, server),
        open_channel(server.address) as channel,
    ):
        d.cluster.network.may_commit.clear()
        call = InferenceServiceStub(channel).Generate(GenerateRequest(text="hello", max_tokens=9))
        await until(lambda: d.cluster.network.num_commits_waiting == 1)
        async with asyncio.timeout(GUARD_S):
            await inference.handover.drain(server.stop, 0.05)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                [_ async for _ in call]
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance(translate(ended.value), Draining)
        (timeline,) = d.cluster.stage.core.explanations.find("")
        (attempt,) = timeline.explain.attempts
        assert (timeline.explain.outcome, attempt.outcome) == ("DRAINING", "DRAINING")
        await d.idle()


async def test_what_a_client_cancels_is_no_handover(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        d.cluster.network.may_commit.clear()
        generation = d.client.generate("hello", max_tokens=9)
        running = asyncio.create_task(generation.text())
        await until(lambda: d.cluster.network.num_commits_waiting == 1)
        generation.cancel()
        await asyncio.wait([running])
        await until(lambda: bool(d.cluster.stage.core.explanations.find("")))
        (timeline,) = d.cluster.stage.core.explanations.find("")
        (attempt,) = timeline.explain.attempts
        assert (timeline.explain.outcome, attempt.outcome) == ("CANCELLED", "CANCELLED")
        await d.idle()


async def test_an_answer_that_is_handed_over_goes_on_at_the_next_router(tmp_path: Path) -> None:
    async with (
        door(tmp_path) as d,
        serving(d, tmp_path) as (inference, server),
        await AsyncClient.connect([server.address, d.address]) as client,
    ):
        d.cluster.network.may_commit.clear()
        generation = client.generate("hello", max_tokens=9, temperature=0.0)
        running = asyncio.create_task(generation.answers())
        await until(lambda: d.cluster.network.num_commits_waiting == 1)
        await inference.handover.drain(server.stop, 0.05)
        d.cluster.network.may_commit.set()
        async with asyncio.timeout(GUARD_S):
            (answer,) = await running
        assert list(answer.token_ids) == expected_answer(PROMPT, 9, KV)
        assert inference.num_requests == 0
        await d.idle()


async def test_b61_a_status_of_its_own_survives_the_stop(tmp_path: Path) -> None:
    async with (
        door(tmp_path, max_queue=1) as d,
        serving(d, tmp_path) as (inference, server),
        open_channel(server.address) as channel,
    ):
        (link,) = d.cluster.stage.fleet.prefill_links()
        link.credit = 0
        call = InferenceServiceStub(channel).Generate(GenerateRequest(text="hello", max_tokens=9))
        await until(lambda: len(d.cluster.stage.queue) == 1)
        draining = asyncio.create_task(inference.handover.drain(server.stop, LONG_S))
        await closed(channel)
        # One that goes first takes its place.
        first = asyncio.create_task(d.client.generate("hello", max_tokens=2, priority="high").text())
        async with asyncio.timeout(GUARD_S):
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                [_ async for _ in call]
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(translate(ended.value), Overloaded)
        async with asyncio.timeout(GUARD_S):
            await draining
            link.credit = 4096
            d.cluster.stage.dispatcher.kick()
            await first
