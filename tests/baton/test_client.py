"""The client SDK against a real loopback server whose answers a test writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest

from baton import AsyncClient, Client
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from baton.rpc_server import Registration, RpcServer
from baton.v1 import common_pb2, inference_service_pb2
from baton.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

GUARD_S = 10
Response = inference_service_pb2.GenerateResponse
Answer = Callable[["Scripted", Any], Awaitable[None]]

SUMMARY = inference_service_pb2.Summary(
    request_id="req-1",
    model="tiny",
    finish_reason=common_pb2.FINISH_REASON_LENGTH,
    num_prompt_tokens=5,
    num_output_tokens=3,
    seed=2**63,
    timings=inference_service_pb2.Timings(bucket="<128", prefill_worker="p", ttft_ms=1.5, num_attempts=2),
)


class Scripted(InferenceServiceServicer):
    """Answers as a test says, and remembers what it was asked and how its calls ended."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.requests: list[Any] = []
        self.remaining_s: list[float | None] = []
        self.cancelled = threading.Event()

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.requests.append(request)
        self.remaining_s.append(context.time_remaining())
        try:
            await self._answer(self, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        model = inference_service_pb2.Model(name="tiny", max_model_len=64, weights_id="abc")
        return inference_service_pb2.ListModelsResponse(models=[model])


async def chunk(context: Any, start: int, text: str, *logprobs: float) -> None:
    ids = [start + 10]
    part = inference_service_pb2.Chunk(start_index=start, token_ids=ids, text=text, logprobs=logprobs)
    await context.write(Response(chunk=part))


async def three_chunks(server: Scripted, context: Any) -> None:
    await chunk(context, 0, "one", -0.5)
    await chunk(context, 1, "")
    await chunk(context, 2, " two")
    await context.write(Response(summary=SUMMARY))


async def one_chunk_and_no_end(server: Scripted, context: Any) -> None:
    await chunk(context, 0, "one")
    await asyncio.Event().wait()


@asynccontextmanager
async def serving(answer: Answer = three_chunks) -> AsyncIterator[tuple[Scripted, RpcServer]]:
    scripted = Scripted(answer)
    registration = Registration(
        name="baton.v1.InferenceService", add=partial(add_InferenceServiceServicer_to_server, scripted)
    )
    async with await RpcServer.start([registration]) as server:
        yield scripted, server


@asynccontextmanager
async def connected(answer: Answer = three_chunks) -> AsyncIterator[tuple[Scripted, AsyncClient]]:
    async with serving(answer) as (scripted, server), await AsyncClient.connect(server.address) as client:
        yield scripted, client


async def ended(scripted: Scripted) -> bool:
    return await asyncio.to_thread(scripted.cancelled.wait, GUARD_S)


async def test_chunks_and_summary_arrive_as_plain_values() -> None:
    async with connected() as (_, client):
        generation = client.generate("hello")
        chunks = [part async for part in generation]
        assert [(part.start_index, part.token_ids, part.text) for part in chunks] == [
            (0, (10,), "one"),
            (1, (11,), ""),
            (2, (12,), " two"),
        ]
        assert [part.logprobs for part in chunks] == [(-0.5,), (), ()]
        summary = generation.summary
        assert (summary.request_id, summary.model, summary.finish_reason) == ("req-1", "tiny", "length")
        assert (summary.num_prompt_tokens, summary.num_output_tokens, summary.seed) == (5, 3, 2**63)
        assert (summary.timings.bucket, summary.timings.ttft_ms, summary.timings.num_attempts) == (
            "<128",
            1.5,
            2,
        )
        assert summary.timings.decode_worker == ""


async def test_text_is_the_whole_answer() -> None:
    async with connected() as (_, client):
        assert await client.generate("hello").text() == "one two"


async def test_options_reach_the_server() -> None:
    async with connected() as (scripted, client):
        options: dict[str, Any] = {
            "model": "tiny", "max_tokens": 3, "temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.25,
            "seed": 0, "stop_token_ids": [4, 5], "ignore_eos": True, "logprobs": True, "request_id": "r",
            "priority": -2,
        }  # fmt: skip
        await client.generate("hello", timeout_s=5, **options).text()
        (request,) = scripted.requests
        assert request.text == "hello"
        assert {name: getattr(request, name) for name in options} == options
        # Zero is said, not left out.
        assert request.HasField("temperature")
        assert request.HasField("seed")
        assert 4 < scripted.remaining_s[0] < 5.5  # type: ignore[operator]


async def test_what_is_not_said_stays_unset() -> None:
    async with connected() as (scripted, client):
        await client.generate("hello", seed=None).text()
        (request,) = scripted.requests
        fields = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "chat", "token_ids")
        assert not any(request.HasField(field) for field in fields)


async def test_messages_and_token_ids_reach_the_server() -> None:
    async with connected() as (scripted, client):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        await client.generate(messages=messages).text()
        await client.generate(token_ids=range(3)).text()
        await client.generate(token_ids=[]).text()
        chat, tokens, empty = scripted.requests
        assert [(m.role, m.content) for m in chat.chat.messages] == [("system", "be brief"), ("user", "hi")]
        assert list(tokens.token_ids.ids) == [0, 1, 2]
        # An empty prompt is the router's to refuse; it must not look like none.
        assert empty.HasField("token_ids")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "a", "max_token": 3}, "max_token"),
        ({"prompt": "a", "text": "b"}, "text"),
        ({"prompt": "a", "max_tokens": 2**31}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"token_ids": [2**32]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"prompt": "\ud800"}, "text"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
    ],
)
async def test_what_cannot_be_sent_is_refused_by_field(arguments: dict[str, Any], field: str) -> None:
    async with connected() as (scripted, client):
        with pytest.raises(InvalidRequest) as error:
            client.generate(**arguments)
        assert error.value.field == field
        assert scripted.requests == []


async def test_an_error_arrives_with_its_type_field_and_hint() -> None:
    async def refuse(server: Scripted, context: Any) -> None:
        raise Overloaded("256 requests are waiting", field="queue", retry_after_s=1.5)

    async with connected(refuse) as (_, client):
        with pytest.raises(Overloaded, match="256 requests are waiting") as error:
            await client.generate("hello").text()
        assert (error.value.field, error.value.retry_after_s, error.value.retryable) == ("queue", 1.5, True)


async def test_an_error_after_some_chunks_keeps_them() -> None:
    async def break_off(server: Scripted, context: Any) -> None:
        await chunk(context, 0, "one")
        raise Unavailable("the decode worker died")

    async with connected(break_off) as (_, client):
        chunks = aiter(client.generate("hello"))
        assert (await anext(chunks)).text == "one"
        with pytest.raises(Unavailable, match="the decode worker died"):
            await anext(chunks)


async def test_an_answer_without_its_summary_is_not_an_answer() -> None:
    async def stop_early(server: Scripted, context: Any) -> None:
        await chunk(context, 0, "one")

    async with connected(stop_early) as (_, client):
        generation = client.generate("hello")
        with pytest.raises(Unavailable, match="in the middle"):
            await generation.text()
        with pytest.raises(InternalError):
            _ = generation.summary


async def test_leaving_the_block_cancels_at_the_server() -> None:
    async with connected(one_chunk_and_no_end) as (scripted, client):
        async with client.generate("hello") as generation:
            async for part in generation:
                assert part.text == "one"
                break
        assert await ended(scripted)


async def test_a_cancel_from_another_task_is_a_typed_end() -> None:
    async with connected(one_chunk_and_no_end) as (scripted, client):
        generation = client.generate("hello")
        reading = asyncio.create_task(generation.text())
        while not scripted.requests:
            await asyncio.sleep(0.001)
        generation.cancel()
        generation.cancel()
        with pytest.raises(Cancelled, match="on this side"):
            async with asyncio.timeout(GUARD_S):
                await reading
        assert await ended(scripted)


async def test_a_cancelled_reader_is_cancelled_and_so_is_the_call() -> None:
    async with connected(one_chunk_and_no_end) as (scripted, client):
        reading = asyncio.create_task(client.generate("hello").text())
        while not scripted.requests:
            await asyncio.sleep(0.001)
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        assert await ended(scripted)


async def test_a_deadline_is_a_typed_error() -> None:
    async with connected(one_chunk_and_no_end) as (_, client):
        with pytest.raises(DeadlineExceeded):
            await client.generate("hello", timeout_s=0.1).text()


async def test_nobody_there_says_what_to_do() -> None:
    with pytest.raises(Unavailable, match="`baton up` starts a local cluster"):
        await AsyncClient.connect("127.0.0.1:1", timeout_s=0.2)


async def test_models_are_listed() -> None:
    async with connected() as (_, client):
        (model,) = await client.list_models()
        assert (model.name, model.max_model_len, model.weights_id) == ("tiny", 64, "abc")


@contextmanager
def background(answer: Answer = three_chunks) -> Iterator[tuple[Scripted, str]]:
    """The same server on another thread, for callers that have no loop."""
    ready: Any = threading.Event()
    made: list[Any] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        stop = asyncio.Event()
        async with serving(answer) as (scripted, server):
            made.extend((scripted, server.address, stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(GUARD_S)
    scripted, address, stop = made
    try:
        yield scripted, address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(GUARD_S)
        loop.close()


def test_the_synchronous_face_does_the_same() -> None:
    with background() as (scripted, address), Client.connect(address) as client:
        generation = client.generate("hello", max_tokens=3)
        assert [part.text for part in generation] == ["one", "", " two"]
        assert generation.summary.finish_reason == "length"
        assert client.generate(messages=[{"role": "user", "content": "hi"}]).text() == "one two"
        assert client.list_models()[0].name == "tiny"
        assert scripted.requests[0].max_tokens == 3


def test_the_synchronous_face_raises_the_same_errors() -> None:
    async def refuse(server: Scripted, context: Any) -> None:
        raise InvalidRequest("top_p is 7", field="top_p")

    with background(refuse) as (_, address), Client.connect(address) as client:
        with pytest.raises(InvalidRequest, match="max_token is not an option"):
            client.generate("hello", max_token=3)
        with pytest.raises(InvalidRequest) as error:
            client.generate("hello").text()
        assert error.value.field == "top_p"


def test_leaving_a_synchronous_loop_early_cancels_at_the_server() -> None:
    with background(one_chunk_and_no_end) as (scripted, address), Client.connect(address) as client:
        for part in client.generate("hello"):
            assert part.text == "one"
            break
        assert scripted.cancelled.wait(GUARD_S)


def test_a_synchronous_client_closes_once_and_leaves_no_thread() -> None:
    with background() as (_, address):
        client = Client.connect(address)
        client.close()
        client.close()
        with pytest.raises(Unavailable):
            Client.connect("127.0.0.1:1", timeout_s=0.2)
    assert not any(thread.name == "baton-client" for thread in threading.enumerate())


def test_every_error_of_the_sdk_has_one_base() -> None:
    assert all(issubclass(cls, BatonError) for cls in (Cancelled, DeadlineExceeded, Overloaded, Unavailable))
