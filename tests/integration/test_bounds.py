"""What clients can make a cluster hold: slow and deaf readers, huge prompts, storms of cancels.

The router of this cluster cuts off who reads nothing for WRITE_TIMEOUT_S, and its model takes long answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc.aio
import psutil
import pytest
import pytest_asyncio
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.errors import BatonError, InvalidRequest, Unavailable
from baton.redis_server import EmbeddedRedis
from baton.rpc import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, translate
from baton.v1.inference_service_pb2 import GenerateRequest, GenerateResponse, TokenIds
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub
from benchmarks.tiny_llama import write_tiny_model
from tests.integration.oracle import assert_greedy
from tests.integration.plain_cluster import PlainCluster, plain_cluster

MAX_MODEL_LEN = 8192
WRITE_TIMEOUT_S = 4
WORKERS = ("prefill-0", "decode-0")
NUM_CLIENTS = 20
# Case B49: what all of them together may add to the router's memory.
MAX_GROWTH_BYTES = 100 << 20
# A client that buffers as little as gRPC lets it: what it does not read stays with the router.
WINDOW_BYTES = 16_384
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES))
NUM_SLOW_TOKENS = 600
# What gRPC holds of one such call, at both ends together.
MAX_UNDER_WAY_BYTES = 2 * WINDOW_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="session")
Call = grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("long") / "tiny"
    return folder, write_tiny_model(folder, max_model_len=MAX_MODEL_LEN)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bounded(
    long_model: tuple[Path, LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[PlainCluster]:
    logs = tmp_path_factory.mktemp("bounded")
    async with EmbeddedRedis() as redis, plain_cluster(long_model[0], logs, redis.url) as cluster:
        await cluster.start("router-0", f"--write-timeout-s={WRITE_TIMEOUT_S}")
        for name in WORKERS:
            await cluster.start(name)
        await cluster.wait_ready(*WORKERS)
        async with await AsyncClient.connect(cluster.address) as client:
            # The first answer touches whatever is made on first use.
            assert len(await answer(client, [5, 6], 4)) == 4
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def client(bounded: PlainCluster) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(bounded.address) as client:
        yield client


async def answer(client: AsyncClient, prompt: list[int], max_tokens: int) -> list[int]:
    generation = client.generate(
        token_ids=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, timeout_s=60
    )
    return [token async for chunk in generation for token in chunk.token_ids]


def router_bytes(cluster: PlainCluster) -> int:
    """Memory of the router; the tether has become it, so the child that was started is the router."""
    rss: int = psutil.Process(cluster.processes["router-0"].pid).memory_info().rss
    return rss


@asynccontextmanager
async def calls(cluster: PlainCluster, num_calls: int, max_tokens: int) -> AsyncIterator[list[Call]]:
    """Requests whose every token is some hundred bytes, by clients that buffer little, each on its own."""
    options = [*CHANNEL_OPTIONS, *SMALL_WINDOW]
    channels = [grpc.aio.insecure_channel(cluster.address, options=options) for _ in range(num_calls)]
    requests = [
        GenerateRequest(
            token_ids=TokenIds(ids=prompt_of(index)),
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=20,
        )
        for index in range(num_calls)
    ]
    try:
        yield [
            InferenceServiceStub(channel).Generate(request)
            for channel, request in zip(channels, requests, strict=True)
        ]
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


def prompt_of(index: int) -> list[int]:
    """A few different ones: each is checked with a forward pass."""
    return [5, 6, 7 + index % 4]


async def read(call: Call, pause_s: float = 0.0) -> tuple[list[int], int, BatonError | None]:
    """All tokens of a call, their bytes, and its error, if any. Pauses whenever a window's worth was read."""
    tokens: list[int] = []
    num_bytes, pause_at = 0, WINDOW_BYTES
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            assert isinstance(response, GenerateResponse)
            if response.HasField("chunk"):
                assert response.chunk.start_index == len(tokens)
                tokens += response.chunk.token_ids
            num_bytes += response.ByteSize()
            if pause_s and num_bytes >= pause_at:
                pause_at += WINDOW_BYTES
                await asyncio.sleep(pause_s)
    except grpc.aio.AioRpcError as error:
        return tokens, num_bytes, translate(error)
    return tokens, num_bytes, None


def assert_prefixes(model: LlamaForCausalLM, found: Sequence[list[int]]) -> None:
    """Every answer is transformers' own, or the beginning of it."""
    longest = {index % 4: max(found[index % 4 :: 4], key=len) for index in range(len(found))}
    for index, tokens in enumerate(found):
        assert tokens == longest[index % 4][: len(tokens)]
    for index, tokens in longest.items():
        assert_greedy(model, prompt_of(index), tokens)


async def test_slow_readers_get_every_token_and_hold_up_nobody(
    bounded: PlainCluster, client: AsyncClient, long_model: tuple[Path, LlamaForCausalLM]
) -> None:
    before, bytes_before = await bounded.ledgers(), router_bytes(bounded)
    async with calls(bounded, NUM_CLIENTS, NUM_SLOW_TOKENS) as slow:
        reading = [asyncio.create_task(read(call, pause_s=0.4)) for call in slow]
        fast = [await answer(client, prompt_of(0), 40) for _ in range(5)]
        # The fast ones are through while the slow ones still read.
        assert not any(task.done() for task in reading)
        results = await asyncio.gather(*reading)
        assert router_bytes(bounded) - bytes_before < MAX_GROWTH_BYTES
    assert [error for _, _, error in results] == [None] * NUM_CLIENTS
    found = [tokens for tokens, _, _ in results]
    assert [len(tokens) for tokens in found] == [NUM_SLOW_TOKENS] * NUM_CLIENTS
    assert_prefixes(long_model[1], found)
    assert all(tokens == found[0][:40] for tokens in fast)
    assert await bounded.settled(before, within_s=5.0) == before


async def test_who_reads_nothing_is_cut_off_and_told(
    bounded: PlainCluster, client: AsyncClient, long_model: tuple[Path, LlamaForCausalLM]
) -> None:
    before, bytes_before = await bounded.ledgers(), router_bytes(bounded)
    async with calls(bounded, NUM_CLIENTS, 6000) as deaf:
        await asyncio.gather(*(call.wait_for_connection() for call in deaf))
        assert len(await answer(client, [5, 6, 7], 20)) == 20
        # Nobody has read a word, and nothing is held for them any more.
        assert await bounded.settled(before, within_s=20.0) == before
        assert router_bytes(bounded) - bytes_before < MAX_GROWTH_BYTES
        results = await asyncio.gather(*map(read, deaf))
    for tokens, num_bytes, error in results:
        assert num_bytes < MAX_UNDER_WAY_BYTES
        assert isinstance(error, Unavailable)
        assert error.message.endswith(f"its buffer has been full for {WRITE_TIMEOUT_S} s")
        assert 0 < len(tokens) < 6000
    assert_prefixes(long_model[1], [tokens for tokens, _, _ in results])


async def test_a_prompt_beyond_all_limits_is_refused_with_the_limit(
    bounded: PlainCluster, client: AsyncClient
) -> None:
    before = await bounded.ledgers()
    with pytest.raises(InvalidRequest, match=rf"200000 tokens; this model takes at most {MAX_MODEL_LEN - 1}"):
        await client.generate(token_ids=[7] * 200_000, max_tokens=4).text()
    with pytest.raises(InvalidRequest, match="15728640 characters; this model takes at most"):
        await client.generate("x" * (15 << 20), max_tokens=4).text()
    with pytest.raises(InvalidRequest, match=f"bytes; at most {MAX_MESSAGE_BYTES} can be sent"):
        await client.generate("x" * (17 << 20), max_tokens=4).text()
    assert await bounded.settled(before, within_s=5.0) == before
    assert len(await answer(client, [5, 6], 4)) == 4


async def test_a_message_over_the_limit_is_refused_by_the_server_too(bounded: PlainCluster) -> None:
    # A client of another make, which does not know our limit.
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(bounded.address, options=options) as channel:
        _, _, error = await read(
            InferenceServiceStub(channel).Generate(GenerateRequest(text="x" * (17 << 20)))
        )
    assert isinstance(error, InvalidRequest)
    assert f"larger than max ({17 << 20}" in error.message.replace(str((17 << 20) + 5), str(17 << 20))
    assert str(MAX_MESSAGE_BYTES) in error.message


async def test_two_hundred_cancels_at_once_leave_nothing_behind(
    bounded: PlainCluster, client: AsyncClient
) -> None:
    before = await bounded.ledgers()
    expected = await answer(client, [9, 8, 7], 8)

    async def impatient(index: int) -> None:
        prompt = [3 + index % 250] * (20 + 7 * (index % 60))
        generation = client.generate(token_ids=prompt, max_tokens=6000, ignore_eos=True)
        chunks = aiter(generation)
        if index % 4 == 0:
            # These are decoding when their time begins; of the others many have not begun when it ends.
            await anext(chunks)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                async for _ in chunks:
                    pass
        generation.cancel()

    await asyncio.gather(*map(impatient, range(200)))
    assert await answer(client, [9, 8, 7], 8) == expected
    assert await bounded.settled(before, within_s=5.0) == before
