"""The client SDK against a real loopback server whose answers a test writes."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton import AsyncClient, Grammar, Retry
from baton.errors import (
    BatonError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from baton.v1 import common_pb2, inference_service_pb2
from baton.v1.inference_service_pb2 import Chunk, PromptLogprobsChunk
from tests.baton.scripted_router import (
    GUARD_S,
    Answer,
    Response,
    Scripted,
    chunk,
    one_chunk_and_no_end,
    serving,
    three_chunks,
)


@asynccontextmanager
async def connected(
    answer: Answer = three_chunks, **options: Any
) -> AsyncIterator[tuple[Scripted, AsyncClient]]:
    async with (
        serving(answer) as (scripted, server),
        await AsyncClient.connect(server.address, **options) as client,
    ):
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
        assert (summary.timings.transfer_times.wire_ms, summary.timings.transfer_times.open_ms) == (2.5, 0.0)
        assert summary.timings.transfer_hidden_share == 0.25


async def test_text_is_the_whole_answer() -> None:
    async with connected() as (_, client):
        assert await client.generate("hello").text() == "one two"


async def test_options_reach_the_server() -> None:
    async with connected() as (scripted, client):
        options: dict[str, Any] = {
            "model": "tiny", "max_tokens": 3, "temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.25,
            "seed": 0, "stop_token_ids": [4, 5], "ignore_eos": True, "logprobs": True, "request_id": "r",
            "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "n": 2,
            "logit_bias": {7: -2.5}, "allowed_token_ids": [7, 8], "min_tokens": 1, "top_logprobs": 2,
            "prompt_logprobs": 0, "stop": ["a", "b"], "include_stop_in_text": True,
            "skip_special_tokens": False, "truncate_prompt_tokens": 9,
        }  # fmt: skip
        await client.generate("hello", timeout_s=5, **options).text()
        (request,) = scripted.requests
        assert request.text == "hello"
        assert {name: getattr(request, name) for name in options} == options
        # Zero is said, not left out.
        assert request.HasField("prompt_logprobs")
        assert request.HasField("skip_special_tokens")
        assert request.HasField("temperature")
        assert request.HasField("seed")
        assert 4 < scripted.remaining_s[0] < 5.5  # type: ignore[operator]


async def test_what_is_not_said_stays_unset() -> None:
    async with connected() as (scripted, client):
        await client.generate("hello", seed=None).text()
        (request,) = scripted.requests
        fields = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "chat", "token_ids")
        assert not any(request.HasField(field) for field in fields)


@pytest.mark.parametrize(
    ("grammar", "kind", "text"),
    [
        (Grammar(kind="regex", source="[a-z]"), "regex", "[a-z]"),
        (Grammar(kind="json_schema", source="{}"), "json_schema", "{}"),
        (Grammar(kind="choice", choices=("a", "b")), "choices", None),
    ],
    ids=["regex", "json", "choice"],
)
async def test_a_grammar_reaches_the_server(grammar: Grammar, kind: str, text: str | None) -> None:
    async with connected() as (scripted, client):
        await client.generate("hello", grammar=grammar).text()
        sent = scripted.requests[0].grammar
        assert sent.WhichOneof("kind") == kind
        if text is None:
            assert list(sent.choices.texts) == ["a", "b"]
        else:
            assert getattr(sent, kind) == text


async def test_one_stop_need_not_be_a_list() -> None:
    async with connected() as (scripted, client):
        await client.generate("hello", stop="end").text()
        assert list(scripted.requests[0].stop) == ["end"]


async def two_answers(server: Scripted, context: Any) -> None:
    tops = [common_pb2.TopLogprobs(token_ids=[7, 8], logprobs=[-0.5, -1.5])]
    for part in (
        Chunk(index=0, token_ids=[7], text="a", logprobs=[-0.5], top_logprobs=tops),
        Chunk(index=1, token_ids=[8, 9], text="bc", logprobs=[-1.5, -2.5], top_logprobs=tops * 2),
        Chunk(index=1, start_index=2, finish_reason=common_pb2.FINISH_REASON_LENGTH),
        Chunk(index=0, start_index=1, token_ids=[9], text="d", logprobs=[-0.25], top_logprobs=tops),
        Chunk(index=0, start_index=2, text="e", finish_reason=common_pb2.FINISH_REASON_STOP),
    ):
        await context.write(Response(chunk=part))
    choices = [
        inference_service_pb2.Choice(
            index=0, finish_reason=common_pb2.FINISH_REASON_STOP, num_output_tokens=2, matched_stop="f"
        ),
        inference_service_pb2.Choice(
            index=1, finish_reason=common_pb2.FINISH_REASON_LENGTH, num_output_tokens=2
        ),
    ]
    summary = inference_service_pb2.Summary(choices=choices, num_output_tokens=4, num_cached_tokens=16)
    await context.write(Response(summary=summary))


async def test_several_answers_are_told_apart() -> None:
    async with connected(two_answers) as (_, client):
        generation = client.generate("hello", n=2)
        first, second = await generation.answers()
        assert (first.text, first.token_ids, first.logprobs) == ("ade", (7, 9), (-0.5, -0.25))
        assert (second.text, second.token_ids, second.logprobs) == ("bc", (8, 9), (-1.5, -2.5))
        assert first.top_logprobs == (((7, -0.5), (8, -1.5)),) * 2
        assert (first.finish_reason, first.matched_stop) == ("stop", "f")
        assert (second.finish_reason, second.matched_stop) == ("length", "")
        summary = generation.summary
        assert [choice.num_output_tokens for choice in summary.choices] == [2, 2]
        assert (summary.num_output_tokens, summary.num_cached_tokens) == (4, 16)


async def test_the_prompts_logprobs_are_complete_before_the_first_chunk() -> None:
    async def answer(server: Scripted, context: Any) -> None:
        tops = [common_pb2.TopLogprobs(token_ids=[5], logprobs=[-0.5])]
        for part in (
            PromptLogprobsChunk(start_index=1, token_ids=[5], logprobs=[-0.5], top_logprobs=tops),
            PromptLogprobsChunk(start_index=2, token_ids=[6, 7], logprobs=[-1.5, -2.5]),
        ):
            await context.write(Response(prompt_logprobs=part))
        await three_chunks(server, context)

    async with connected(answer) as (_, client):
        generation = client.generate("hello", prompt_logprobs=1)
        await anext(aiter(generation))
        first, *others = generation.prompt_logprobs
        assert first is None
        assert [(o.token_id, o.logprob, o.top_logprobs) for o in others if o is not None] == [
            (5, -0.5, ((5, -0.5),)),
            (6, -1.5, ()),
            (7, -2.5, ()),
        ]


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
        ({"prompt": "a", "seed": -(2**63) - 1}, "seed"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"token_ids": [2**32]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "stop": [3]}, "stop"),
        ({"prompt": "a", "stop": 3}, "stop"),
        ({"prompt": "a", "logit_bias": {-1: 2.0}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {1: "x"}}, "logit_bias"),
        ({"prompt": "a", "grammar": "[a-z]"}, "grammar"),
        ({"prompt": "a", "partial_answers": []}, "partial_answers"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
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

    async with connected(refuse, retry=Retry(max_attempts=1)) as (_, client):
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
        with pytest.raises(RuntimeError, match="iterate to it first"):
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


def test_every_error_of_the_sdk_has_one_base() -> None:
    assert all(issubclass(cls, BatonError) for cls in (Cancelled, DeadlineExceeded, Overloaded, Unavailable))


@pytest.mark.parametrize("timeout_s", [math.inf, 31_536_000.0], ids=["infinite", "a year"])
async def test_the_longest_deadlines_are_no_deadline_at_once(timeout_s: float) -> None:
    async with connected(timeout_s=timeout_s) as (scripted, client):
        assert await client.generate("hello", timeout_s=timeout_s).text() == "one two"
        assert [model.name for model in await client.list_models(timeout_s=timeout_s)] == ["tiny"]
        (remaining_s,) = scripted.remaining_s
        assert (remaining_s is None) == (timeout_s == math.inf)


@pytest.mark.parametrize("timeout_s", [1e10, math.nan, 0, -1.0, True, "1"])
async def test_what_is_no_timeout_is_refused_by_name(timeout_s: Any) -> None:
    async with connected() as (scripted, client):
        with pytest.raises(InvalidRequest, match=r"timeout_s is .* at most a year") as error:
            client.generate("hello", timeout_s=timeout_s)
        assert error.value.field == "timeout_s"
        with pytest.raises(InvalidRequest, match="timeout_s is "):
            await client.list_models(timeout_s=timeout_s)
        with pytest.raises(ConfigError, match="timeout_s is "):
            await AsyncClient.connect("127.0.0.1:1", timeout_s=timeout_s)
        assert not scripted.requests


async def test_the_timeout_of_a_function_that_gives_the_key_is_its_own() -> None:
    def ask_the_vault() -> str:
        raise TimeoutError("the vault is slow")

    async with connected(api_key=ask_the_vault) as (_, client):
        with pytest.raises(TimeoutError, match="the vault is slow"):
            await client.list_models()


async def test_a_closed_client_asks_nobody() -> None:
    async with serving() as (scripted, server):
        client = await AsyncClient.connect(server.address)
        ended = client.generate("hello")
        assert await ended.text() == "one two"
        await client.close()
        with pytest.raises(Cancelled, match="the client is closed"):
            client.generate("hello")
        with pytest.raises(Cancelled, match="the client is closed"):
            await client.list_models()
        assert len(scripted.requests) == 1
        # What has come stays.
        assert await ended.text() == "one two"


async def test_a_request_that_is_refused_has_a_name_all_the_same() -> None:
    async def refuse(server: Scripted, context: Any) -> None:
        raise InvalidRequest("top_p is 7.0", field="top_p")

    async with connected(refuse) as (scripted, client):
        for given in ("", "mine"):
            generation = client.generate("hello", request_id=given)
            with pytest.raises(InvalidRequest) as error:
                await generation.text()
            assert error.value.request_id == generation.request_id == scripted.requests[-1].request_id
        drawn, own = (request.request_id for request in scripted.requests)
        assert re.fullmatch("req-[0-9a-f]{16}", drawn)
        assert own == "mine"
        assert client.generate("hello").request_id != drawn
