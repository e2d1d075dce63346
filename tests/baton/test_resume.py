"""A router is lost in the middle of an answer: the SDK goes on at the next one, without a seam."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from baton import AsyncClient
from baton.bind import LOOPBACK
from baton.errors import (
    BatonError,
    Cancelled,
    ConfigError,
    Draining,
    InternalError,
    Overloaded,
    Unavailable,
)
from baton.rpc_server import RpcServer
from baton.v1 import common_pb2, inference_service_pb2
from tests.baton.scripted_router import GUARD_S, SUMMARY, Response, Scripted, chunk, serving
from tests.fakes import until


async def started(context: Any, seed: int) -> None:
    message = inference_service_pb2.Started(request_id="req-1", seed=seed)
    await context.write(Response(started=message))


async def rest(context: Any) -> None:
    """An incomplete character, shown once no more tokens come: the last chunk."""
    message = inference_service_pb2.Chunk(
        start_index=2, text="\N{REPLACEMENT CHARACTER}", finish_reason=common_pb2.FINISH_REASON_LENGTH
    )
    await context.write(Response(chunk=message))


class Dying:
    """Answers with two tokens, and perhaps the rest of the text, then its process is gone."""

    def __init__(self, *, with_rest: bool = False) -> None:
        self._with_rest = with_rest
        self.server: RpcServer | None = None
        self.stopping: asyncio.Task[None] | None = None

    async def __call__(self, scripted: Scripted, context: Any) -> None:
        await started(context, 2**63)
        await chunk(context, 0, "one")
        await chunk(context, 1, " two")
        if self._with_rest:
            await rest(context)
        assert self.server is not None
        # A task of its own: stopping the server cancels this call.
        self.stopping = asyncio.create_task(self.server.stop())
        await asyncio.Event().wait()


async def the_rest(scripted: Scripted, context: Any) -> None:
    await started(context, 2**63)
    await chunk(context, 2, " three")
    await context.write(Response(summary=SUMMARY))


async def test_a_cancel_between_two_routers_is_heard() -> None:
    dying = Dying()
    async with serving(dying) as (_, server):
        dying.server = server
        client = await AsyncClient.connect([server.address, f"{LOOPBACK}:9"])
        async with client, asyncio.timeout(GUARD_S):
            generation = client.generate("x")
            tokens = aiter(generation)
            assert [(await anext(tokens)).text for _ in range(2)] == ["one", " two"]
            # It now looks for a router, and there is none.
            going_on = asyncio.create_task(anext(tokens))
            await until(lambda: generation._tries.is_searching)
            generation.cancel()
            with pytest.raises(Cancelled):
                await going_on


async def test_an_answer_goes_on_at_the_next_router() -> None:
    dying = Dying()
    async with serving(dying) as (first, server), serving(the_rest) as (second, other):
        dying.server = server
        async with await AsyncClient.connect([server.address, other.address]) as client:
            generation = client.generate("hello", max_tokens=9, temperature=0.5)
            chunks = [part async for part in generation]
        assert [(part.start_index, part.text) for part in chunks] == [(0, "one"), (1, " two"), (2, " three")]
        assert generation.summary.num_output_tokens == 3
        again = second.requests[0]
        assert (again.text, again.max_tokens, again.temperature) == ("hello", 9, 0.5)
        assert (again.seed, again.request_id) == (2**63, "req-1")
        (known,) = again.partial_answers
        assert (known.index, list(known.token_ids), known.num_chars) == (0, [10, 11], len("one two"))
        assert not first.requests[0].HasField("seed")


async def test_an_answer_that_had_ended_ends_once() -> None:
    async def end(scripted: Scripted, context: Any) -> None:
        await started(context, 2**63)
        known = scripted.requests[0].partial_answers[0]
        last = inference_service_pb2.Chunk(start_index=2, finish_reason=known.finish_reason)
        await context.write(Response(chunk=last))
        await context.write(Response(summary=SUMMARY))

    dying = Dying(with_rest=True)
    async with serving(dying) as (_, server), serving(end) as (second, other):
        dying.server = server
        async with await AsyncClient.connect([server.address, other.address]) as client:
            chunks = [part async for part in client.generate("hello")]
        assert "".join(part.text for part in chunks) == "one two\N{REPLACEMENT CHARACTER}"
        assert [part.finish_reason for part in chunks] == ["", "", "length"]
        (known,) = second.requests[0].partial_answers
        assert known.num_chars == len("one two") + 1


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_a_router_that_is_lost_after_its_last_message_has_answered(code: grpc.StatusCode) -> None:
    async def all_but_the_status(scripted: Scripted, context: Any) -> None:
        await started(context, 2**63)
        await chunk(context, 0, "one")
        await context.write(Response(summary=SUMMARY))
        await context.abort(code, "gone")

    async with serving(all_but_the_status) as (first, server), serving() as (second, other):
        async with await AsyncClient.connect([server.address, other.address]) as client:
            generation = client.generate("hello")
            assert await generation.text() == "one"
            assert not generation._tries.is_searching
            assert client._routers.target == server.address
        assert generation.summary.request_id == "req-1"
        assert (len(first.requests), len(second.requests)) == (1, 0)


async def test_a_cancel_after_the_last_message_takes_nothing_away() -> None:
    async def all_but_the_status(scripted: Scripted, context: Any) -> None:
        await chunk(context, 0, "one")
        await context.write(Response(summary=SUMMARY))
        await asyncio.Event().wait()

    async with (
        serving(all_but_the_status) as (_, server),
        await AsyncClient.connect(server.address) as client,
    ):
        generation = client.generate("hello")
        answer = asyncio.create_task(generation.text())
        await until(lambda: generation._summary is not None)
        generation.cancel()
        async with asyncio.timeout(GUARD_S):
            assert await answer == "one"


async def test_every_answer_goes_on_after_its_own_tokens() -> None:
    async def break_off(scripted: Scripted, context: Any) -> None:
        for index, start, text in [(0, 0, "a"), (1, 0, "b"), (1, 1, "cc")]:
            part = inference_service_pb2.Chunk(index=index, start_index=start, token_ids=[5], text=text)
            await context.write(Response(chunk=part))
        await stop(context)

    async def stop(context: Any) -> None:
        assert dying.server is not None
        dying.stopping = asyncio.create_task(dying.server.stop())
        await asyncio.Event().wait()

    async def go_on(scripted: Scripted, context: Any) -> None:
        for index, start, text in [(1, 2, "d"), (0, 1, "e")]:
            part = inference_service_pb2.Chunk(index=index, start_index=start, token_ids=[6], text=text)
            await context.write(Response(chunk=part))
        choices = [inference_service_pb2.Choice(index=index) for index in range(2)]
        await context.write(Response(summary=inference_service_pb2.Summary(choices=choices)))

    dying = Dying()
    async with serving(break_off) as (_, server), serving(go_on) as (second, other):
        dying.server = server
        async with await AsyncClient.connect([server.address, other.address]) as client:
            answers = await client.generate("hello", n=2).answers()
        assert [answer.text for answer in answers] == ["ae", "bccd"]
        known = {part.index: part for part in second.requests[0].partial_answers}
        assert {index: (list(p.token_ids), p.num_chars) for index, p in known.items()} == {
            0: ([5], 1),
            1: ([5, 5], 3),
        }


@pytest.mark.parametrize(
    ("logprobs", "asked"), [((-0.5,), True), ((-0.5, -1.5), False)], ids=["some-missing", "complete"]
)
async def test_the_prompts_logprobs_are_asked_for_again_only_if_some_are_missing(
    logprobs: tuple[float, ...], asked: bool
) -> None:
    async def break_off(scripted: Scripted, context: Any) -> None:
        message = inference_service_pb2.Started(request_id="req-1", seed=1, num_prompt_tokens=3)
        await context.write(Response(started=message))
        await prompt(context, 1, *logprobs)
        assert dying.server is not None
        dying.stopping = asyncio.create_task(dying.server.stop())
        await asyncio.Event().wait()

    async def prompt(context: Any, start: int, *values: float) -> None:
        part = inference_service_pb2.PromptLogprobsChunk(
            start_index=start, token_ids=[9] * len(values), logprobs=values
        )
        await context.write(Response(prompt_logprobs=part))

    async def go_on(scripted: Scripted, context: Any) -> None:
        if scripted.requests[0].HasField("prompt_logprobs"):
            await prompt(context, 1, -0.5, -1.5)
        await context.write(Response(summary=SUMMARY))

    dying = Dying()
    async with serving(break_off) as (_, server), serving(go_on) as (second, other):
        dying.server = server
        async with await AsyncClient.connect([server.address, other.address]) as client:
            generation = client.generate("hello", prompt_logprobs=0)
            await generation.text()
        assert second.requests[0].HasField("prompt_logprobs") == asked
    assert [token and token.logprob for token in generation.prompt_logprobs] == [None, -0.5, -1.5]


async def test_the_deadline_is_that_of_the_whole_answer() -> None:
    dying = Dying()
    async with serving(dying) as (first, server), serving(the_rest) as (second, other):
        dying.server = server
        async with await AsyncClient.connect([server.address, other.address]) as client:
            await client.generate("hello", timeout_s=30.0).text()
        assert second.remaining_s[0] is not None
        assert first.remaining_s[0] is not None
        assert second.remaining_s[0] < first.remaining_s[0]


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("the worker died")], ids=["full", "died"])
async def test_what_a_router_itself_reports_in_the_middle_is_its_answer(error: BatonError) -> None:
    async def break_off(scripted: Scripted, context: Any) -> None:
        await started(context, 2**63)
        await chunk(context, 0, "one")
        raise error

    async with serving(break_off) as (first, server), serving(the_rest) as (second, other):
        async with await AsyncClient.connect([server.address, other.address]) as client:
            with pytest.raises(type(error), match=error.message) as caught:
                await client.generate("hello").text()
        assert caught.value.request_id == "req-1"
        assert (len(first.requests), len(second.requests)) == (1, 0)


async def test_the_first_router_that_answers_is_used() -> None:
    async with serving() as (second, other):
        dead = "127.0.0.1:1"
        async with await AsyncClient.connect([dead, other.address], timeout_s=10.0) as client:
            assert await client.generate("hello").text() == "one two"
        assert len(second.requests) == 1


async def test_an_answer_that_does_not_go_on_where_it_was_is_refused() -> None:
    async with serving(the_rest) as (_, server), await AsyncClient.connect(server.address) as client:
        with pytest.raises(InternalError, match="token 0 was due"):
            await client.generate("hello").text()


async def test_nobody_answers() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1, 127\.0\.0\.1:2"):
        await AsyncClient.connect(["127.0.0.1:1", "127.0.0.1:2"], timeout_s=0.5)
    with pytest.raises(ConfigError, match="name at least one router"):
        await AsyncClient.connect([])


async def test_a_full_queue_at_the_next_router_is_waited_for() -> None:
    dying, asked = Dying(), []

    async def full_at_first(scripted: Scripted, context: Any) -> None:
        asked.append(1)
        if len(asked) == 1:
            raise Overloaded("the queue is full", retry_after_s=0.05)
        await the_rest(scripted, context)

    async with serving(dying) as (_, server), serving(full_at_first) as (_, other):
        dying.server = server
        async with await AsyncClient.connect([server.address, other.address]) as client:
            assert await client.generate("hello").text() == "one two three"
    assert len(asked) == 2


async def test_a_wait_longer_than_the_search_for_a_router_is_not_begun() -> None:
    async def full(scripted: Scripted, context: Any) -> None:
        raise Overloaded("the queue is full", retry_after_s=3600.0)

    dying = Dying()
    async with serving(dying) as (_, server), serving(full) as (second, other):
        dying.server = server
        async with await AsyncClient.connect([server.address, other.address]) as client:
            async with asyncio.timeout(GUARD_S):
                with pytest.raises(Overloaded, match="the queue is full"):
                    await client.generate("hello").text()
        assert len(second.requests) == 1


async def test_hearing_once_more_of_an_end_is_no_progress() -> None:
    """Otherwise the router's next refusal would count as its answer, not as a step of the search."""

    async def end_again(scripted: Scripted, context: Any) -> None:
        known = scripted.requests[0].partial_answers[0]
        last = inference_service_pb2.Chunk(start_index=2, finish_reason=known.finish_reason)
        await context.write(Response(chunk=last))
        if len(scripted.requests) == 1:
            raise Unavailable("no worker yet")
        await context.write(Response(summary=SUMMARY))

    dying = Dying(with_rest=True)
    async with serving(dying) as (_, server), serving(end_again) as (second, other):
        dying.server = server
        async with await AsyncClient.connect([server.address, other.address]) as client:
            chunks = [part async for part in client.generate("hello")]
        assert [part.finish_reason for part in chunks] == ["", "", "length"]
        assert len(second.requests) == 2


async def test_a_router_that_hands_an_answer_over_is_lost() -> None:
    async def leaving(scripted: Scripted, context: Any) -> None:
        await started(context, 2**63)
        await chunk(context, 0, "one")
        await chunk(context, 1, " two")
        raise Draining("this router is about to leave")

    async with serving(leaving) as (first, server), serving(the_rest) as (second, other):
        async with await AsyncClient.connect([server.address, other.address]) as client:
            assert await client.generate("hello").text() == "one two three"
        (known,) = second.requests[0].partial_answers
        assert list(known.token_ids) == [10, 11]
        assert len(first.requests) == 1


async def test_a_call_that_begins_while_its_only_router_restarts_waits_for_it() -> None:
    async with serving() as (_, server):
        client = await AsyncClient.connect(server.address)
    async with client:
        generation = client.generate("hello")
        answer = asyncio.create_task(generation.text())
        # The first try has failed.
        await until(lambda: generation._tries.is_searching)
        async with serving(port=server.port), asyncio.timeout(GUARD_S):
            assert await answer == "one two"


class Wire:
    """Between a client and its router; cut off, it takes what comes and passes nothing on."""

    def __init__(self, port: int) -> None:
        self.is_cut_off = False
        self._port = port
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(LOOPBACK, self._port)
        self._writers += [writer, back]
        self._tasks += [asyncio.create_task(self._pass_on(*way)) for way in ((reader, back), (there, writer))]

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.is_cut_off:
                writer.write(data)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()


async def test_a_router_that_is_silent_on_a_connection_that_stands_is_lost_within_seconds() -> None:
    async def breaks_off(scripted: Scripted, context: Any) -> None:
        await started(context, 2**63)
        await chunk(context, 0, "one")
        await chunk(context, 1, " two")
        await asyncio.Event().wait()

    async with serving(breaks_off) as (_, server), serving(the_rest) as (_, other):
        wire = Wire(server.port)
        between = await asyncio.start_server(wire.connected, LOOPBACK)
        port = between.sockets[0].getsockname()[1]
        async with await AsyncClient.connect([f"{LOOPBACK}:{port}", other.address]) as client:
            texts = []
            # Without pings it would take minutes.
            async with asyncio.timeout(GUARD_S):
                async for part in client.generate("hello"):
                    texts.append(part.text)
                    wire.is_cut_off = len(texts) == 2
            assert texts == ["one", " two", " three"]
        await wire.close()
        between.close()
