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

from baton import AsyncClient
from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.rpc import open_channel
from baton.rpc_server import Registration, RpcServer
from baton.v1 import admin_service_pb2, common_pb2, inference_service_pb2
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from router.admin import RouterAdminServicer
from router.service import InferenceServicer, within
from router.text import Text
from tests.cluster import Cluster, cluster
from tests.fakes import GUARD_S, expected_answer, until
from tests.router.tiny_text import BOS, byte_tokenizer, ids_of, model_dir

KV = (2, 2, 3, 5)


@dataclass
class Door:
    cluster: Cluster
    inference: InferenceServicer
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
        inference = InferenceServicer(
            config=stage.config,
            model=model,
            text=Text(model, asyncio.to_thread),
            queue=stage.queue,
            dispatcher=stage.dispatcher,
            fleet=stage.fleet,
            rng=random.Random(1),
        )
        admin = RouterAdminServicer(
            config=stage.config, model="tiny", queue=stage.queue, fleet=stage.fleet, inference=inference
        )
        add = partial(add_InferenceServiceServicer_to_server, inference)
        registration = Registration(name="baton.v1.InferenceService", add=add)
        async with (
            await RpcServer.start([registration]) as server,
            await AsyncClient.connect(server.address) as client,
        ):
            yield Door(c, inference, admin, client, server.address)


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


async def test_an_incomplete_character_comes_last_and_counts_no_token(tmp_path: Path) -> None:
    # Token 96 is byte 0xA1, which no character begins with.
    prompt = next(
        [m, n] for m in range(9, 99) for n in range(9, 99) if expected_answer([m, n], 2, KV)[1] == 96
    )
    async with door(tmp_path) as d:
        chunks = [c async for c in d.client.generate(token_ids=prompt, max_tokens=2, temperature=0.0)]
        assert (chunks[-1].start_index, chunks[-1].token_ids, chunks[-1].text) == (
            2,
            (),
            "\N{REPLACEMENT CHARACTER}",
        )
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
            else:
                reason = response.summary.finish_reason
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
