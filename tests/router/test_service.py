"""The public door over real gRPC, with real shells behind it: text, errors, cancels, slow clients."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton import AsyncClient, Retry
from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.rpc import open_channel, translate
from baton.rpc_server import Registration, RpcServer
from baton.v1 import admin_service_pb2, common_pb2, inference_service_pb2
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from router.admin import RouterAdminServicer
from router.grammars import GrammarCheck
from router.inference import Inference, within
from router.service import InferenceServicer
from router.text import Text
from tests.cluster import Cluster, cluster
from tests.fakes import GUARD_S, expected_answer, until
from tests.router.tiny_text import BOS, byte_tokenizer, ids_of, model_dir

KV = (2, 2, 3, 5)


@dataclass
class Door:
    cluster: Cluster
    inference: Inference
    admin: RouterAdminServicer
    client: AsyncClient
    address: str

    async def ledger(self) -> dict[str, int]:
        response = await self.admin.GetLedger(admin_service_pb2.GetLedgerRequest(), None)
        return dict(response.counts)

    async def idle(self) -> None:
        await until(lambda: self.inference.num_requests == 0)
        await self.cluster.idle()
        assert not any((await self.ledger()).values())


@asynccontextmanager
async def door(folder: Path, **settings: Any) -> AsyncIterator[Door]:
    model = model_dir(folder / "tiny")
    async with cluster(**settings) as c:
        stage = c.stage
        inference = Inference(
            core=stage.core,
            model=model,
            text=Text(model, asyncio.to_thread),
            grammars=GrammarCheck(None, asyncio.to_thread),
            rng=random.Random(1),
        )
        admin = RouterAdminServicer(core=stage.core, model="tiny", inference=inference)
        add = partial(add_InferenceServiceServicer_to_server, InferenceServicer(inference))
        registration = Registration(name="baton.v1.InferenceService", add=add)
        async with (
            await RpcServer.start([registration]) as server,
            await AsyncClient.connect(server.address, retry=Retry(max_attempts=1)) as client,
        ):
            yield Door(c, inference, admin, client, server.address)


# As encoded by a later release: field 1023 of the request, and field 500 of a message inside of it.
LATER = [
    (b"\xf8\x3f\x05", "GenerateRequest.1023", "GenerateRequest has field 1023"),
    (b"\x22\x03\xa0\x1f\x05", "GenerateRequest", "a message inside of GenerateRequest has a field"),
]


@pytest.mark.parametrize(("raw", "field", "words"), LATER)
async def test_what_a_later_client_adds_is_refused_and_not_skipped(
    tmp_path: Path, raw: bytes, field: str, words: str
) -> None:
    request = inference_service_pb2.GenerateRequest(max_tokens=2)
    request.token_ids.ids.extend([BOS, 70])
    async with door(tmp_path) as d, open_channel(d.address) as channel:
        stub = InferenceServiceStub(channel)
        assert [response async for response in stub.Generate(request)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(type(request).FromString(request.SerializeToString() + raw)):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        failure = translate(caught.value)
        assert (failure.code, failure.field) == ("INVALID_REQUEST", field)
        assert words in failure.message
        assert "upgrade the routers" in failure.message
        await d.idle()


async def test_an_answer_with_its_text_and_summary(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        prompt = [BOS, *ids_of("hello")]
        expected = expected_answer(prompt, 12, KV)
        generation = d.client.generate("hello", max_tokens=12, temperature=0.0, seed=3, request_id="r-7")
        chunks = [chunk async for chunk in generation]
        assert [token for chunk in chunks for token in chunk.token_ids] == expected
        assert "".join(chunk.text for chunk in chunks) == byte_tokenizer().decode(expected)
        starts = [chunk.start_index for chunk in chunks]
        lengths = [len(chunk.token_ids) for chunk in chunks]
        assert starts == [sum(lengths[:index]) for index in range(len(chunks))]
        summary = generation.summary
        assert (summary.request_id, summary.model, summary.seed) == ("r-7", "tiny", 3)
        assert (summary.num_prompt_tokens, summary.num_output_tokens) == (6, 12)
        assert summary.finish_reason == "length"
        timings = summary.timings
        assert (timings.bucket, timings.prefill_worker, timings.decode_worker) == (
            "<128",
            "prefill-0",
            "decode-0",
        )
        # Whole blocks travel: two of four tokens, 2 layers, K and V, 3 heads, 5 elements of 4 bytes.
        assert (timings.num_attempts, timings.transfer_bytes) == (1, 8 * 2 * 2 * 3 * 5 * 4)
        assert 0 < timings.ttft_ms <= timings.total_ms
        await d.idle()


async def test_an_incomplete_character_comes_with_the_last_token(tmp_path: Path) -> None:
    # Token 96 is byte 0xA1, which no character begins with.
    prompt = next(
        [m, n] for m in range(9, 99) for n in range(9, 99) if expected_answer([m, n], 2, KV)[1] == 96
    )
    async with door(tmp_path) as d:
        chunks = [c async for c in d.client.generate(token_ids=prompt, max_tokens=2, temperature=0.0)]
        last = chunks[-1]
        assert (last.start_index + len(last.token_ids), last.finish_reason) == (2, "length")
        assert last.text.endswith("\N{REPLACEMENT CHARACTER}")
        await d.idle()


def stop_of(text: str, token_ids: list[int]) -> tuple[str, str, int]:
    """A stop that the text comes to, the text before it, and how many tokens that takes."""
    stop = text[6:9]
    end = text.index(stop) + len(stop)
    decode = byte_tokenizer().decode
    num_tokens = next(n for n in range(len(token_ids)) if len(decode(token_ids[:n]).rstrip("�")) >= end)
    return stop, text[: end - len(stop)], num_tokens


# The text of this prompt's answer has no character that is incomplete.
PROMPT = [BOS, *ids_of("hello")]


async def test_a_stop_ends_the_answer_everywhere(tmp_path: Path) -> None:
    expected = expected_answer(PROMPT, 50, KV)
    stop, text, num_tokens = stop_of(byte_tokenizer().decode(expected), expected)
    async with door(tmp_path) as d:
        options: dict[str, Any] = {"max_tokens": 50, "temperature": 0.0, "stop": ["never", stop]}
        generation = d.client.generate("hello", **options)
        (answer,) = await generation.answers()
        assert (answer.text, answer.token_ids) == (text, tuple(expected[:num_tokens]))
        assert (answer.finish_reason, answer.matched_stop) == ("stop", stop)
        assert generation.summary.num_output_tokens == num_tokens
        await d.idle()
        shown = await d.client.generate("hello", **options, include_stop_in_text=True).text()
        assert shown == text + stop
        await d.idle()


async def test_a_stop_in_the_first_token_needs_no_transfer(tmp_path: Path) -> None:
    expected = expected_answer(PROMPT, 1, KV)
    stop = byte_tokenizer().decode(expected)
    async with door(tmp_path) as d:
        d.cluster.network.may_commit.clear()
        generation = d.client.generate("hello", max_tokens=50, temperature=0.0, stop=stop)
        assert await generation.text() == ""
        assert generation.summary.choices[0].matched_stop == stop
        await d.idle()


async def test_several_answers_count_their_prompt_once(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        generation = d.client.generate("hello", max_tokens=9, temperature=0.0, n=3)
        answers = await generation.answers()
        # Greedy: the same three times.
        assert [list(answer.token_ids) for answer in answers] == [expected_answer(PROMPT, 9, KV)] * 3
        assert [answer.index for answer in answers] == [0, 1, 2]
        summary = generation.summary
        assert (summary.num_prompt_tokens, summary.num_output_tokens) == (6, 27)
        assert [choice.num_output_tokens for choice in summary.choices] == [9] * 3
        await d.idle()


async def test_a_client_that_leaves_ends_all_its_answers(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        seen: set[int] = set()
        async with d.client.generate("hello", max_tokens=50, temperature=0.0, n=3) as generation:
            async for chunk in generation:
                seen.add(chunk.index)
                if len(seen) == 3:
                    break
        assert seen == {0, 1, 2}
        await d.idle()


@pytest.mark.parametrize("known", [1, 4, 5, 6, 8])
async def test_at_another_router_an_answer_goes_on_where_its_text_was(tmp_path: Path, known: int) -> None:
    expected = expected_answer(PROMPT, 50, KV)
    stop, text, num_tokens = stop_of(byte_tokenizer().decode(expected), expected)
    known = min(known, num_tokens)
    delivered = text[: known // 2]
    async with door(tmp_path) as d, open_channel(d.address) as channel:
        part = inference_service_pb2.PartialAnswer(token_ids=expected[:known], num_chars=len(delivered))
        request = inference_service_pb2.GenerateRequest(
            text="hello", max_tokens=50, temperature=0.0, seed=3, stop=[stop], partial_answers=[part]
        )
        responses = [r async for r in InferenceServiceStub(channel).Generate(request)]
        chunks = [response.chunk for response in responses if response.HasField("chunk")]
        assert delivered + "".join(chunk.text for chunk in chunks) == text
        assert [t for chunk in chunks for t in chunk.token_ids] == expected[known:num_tokens]
        (choice,) = responses[-1].summary.choices
        assert (choice.matched_stop, choice.num_output_tokens) == (stop, num_tokens)
        assert choice.finish_reason == common_pb2.FINISH_REASON_STOP
        await d.idle()


async def test_one_token_needs_no_decode_worker(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        generation = d.client.generate("hello", max_tokens=1, temperature=0.0)
        await generation.text()
        assert generation.summary.timings.decode_worker == ""
        await d.idle()


async def test_a_bad_request_is_refused_by_field(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        for options, field in [({"top_p": 0.0}, "top_p"), ({"max_tokens": 900}, "max_tokens")]:
            with pytest.raises(InvalidRequest) as error:
                await d.client.generate("hello", **options).text()
            assert error.value.field == field
        await d.idle()


async def test_without_workers_the_answer_is_unavailable_with_a_hint(tmp_path: Path) -> None:
    async with door(tmp_path, num_decode=0) as d:
        with pytest.raises(Unavailable) as error:
            await d.client.generate("hello").text()
        assert error.value.retry_after_s == 5.0
        await d.idle()


async def test_a_client_that_leaves_ends_its_request_everywhere(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        d.cluster.network.may_commit.clear()
        generations = [d.client.generate("hello", max_tokens=50) for _ in range(4)]
        reading = [aiter(generation) for generation in generations]
        for chunks in reading:
            assert len((await anext(chunks)).token_ids) == 1
        await until(lambda: d.cluster.network.num_commits_waiting == 4)
        assert (await d.ledger())["requests"] == 4
        for generation in generations:
            generation.cancel()
        await d.idle()


async def test_the_clients_deadline_ends_its_request_everywhere(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        d.cluster.network.may_commit.clear()
        with pytest.raises(Exception, match=r"(?i)deadline"):
            await d.client.generate("hello", max_tokens=50, timeout_s=0.15).text()
        await d.idle()


async def test_a_full_queue_is_told_with_a_time_to_come_back(tmp_path: Path) -> None:
    async with door(tmp_path, max_queue=1) as d:
        (link,) = d.cluster.stage.fleet.prefill_links()
        credit, link.credit = link.credit, 0
        waiting = asyncio.create_task(d.client.generate("hello", max_tokens=2).text())
        await until(lambda: len(d.cluster.stage.queue) == 1)
        with pytest.raises(Overloaded) as error:
            await d.client.generate("hello").text()
        assert error.value.retry_after_s is not None
        link.credit = credit
        d.cluster.stage.dispatcher.kick()
        await waiting
        await d.idle()


async def test_a_client_that_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Unavailable, match="the client has read nothing"):
        await within(0.02, never, "the client has read nothing for 0.02 s")


async def test_a_slow_client_gets_merged_chunks_and_every_token(tmp_path: Path) -> None:
    async with door(tmp_path) as d, open_channel(d.address) as channel:
        request = inference_service_pb2.GenerateRequest(
            token_ids=inference_service_pb2.TokenIds(ids=[5, 6]), max_tokens=60, temperature=0.0
        )
        call = InferenceServiceStub(channel).Generate(request)
        await until(lambda: d.inference.num_requests == 1)
        got: list[int] = []
        reason = 0
        async for response in call:
            await asyncio.sleep(0.002)  # the client is slower than the cluster
            if response.HasField("chunk"):
                assert response.chunk.start_index == len(got)
                got += response.chunk.token_ids
            elif response.HasField("summary"):
                (choice,) = response.summary.choices
                reason = choice.finish_reason
        assert (got, reason) == (expected_answer([5, 6], 60, KV), common_pb2.FINISH_REASON_LENGTH)
        assert await call.code() == grpc.StatusCode.OK
        await d.idle()


async def test_a_decode_worker_that_dies_is_a_pause_to_the_client(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        generation = d.client.generate(token_ids=[5, 6], max_tokens=60, temperature=0.0)
        got: list[int] = []
        async with asyncio.timeout(GUARD_S):
            async for chunk in generation:
                before, got = len(got), [*got, *chunk.token_ids]
                if before < 3 <= len(got):
                    await d.cluster.kill("decode-0")
                    await d.cluster.decode("decode-1")
        assert got == expected_answer([5, 6], 60, KV)
        assert generation.summary.timings.decode_worker in ("decode-0", "decode-1")
        await d.idle()


async def test_the_models_and_the_cluster_are_described(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        (model,) = await d.client.list_models()
        assert (model.name, model.max_model_len) == ("tiny", 64)
        await d.client.generate("hello", max_tokens=2).text()
        await d.idle()
        status = await d.admin.GetClusterStatus(admin_service_pb2.GetClusterStatusRequest(), None)
        assert [(w.name, w.state, w.num_blocks, w.num_attempts) for w in status.workers] == [
            ("decode-0", "ready", 64, 0),
            ("prefill-0", "ready", 64, 0),
        ]
        assert [(b.label, b.num_waiting, b.num_dispatched) for b in status.buckets] == [
            ("<128", 0, 1), ("128-255", 0, 0), ("256-511", 0, 0), (">=512", 0, 0),
        ]  # fmt: skip
        assert status.workers[1].credit_tokens == 400
        assert [pair.worker for pair in status.workers[1].pairs] == ["decode-0"]
