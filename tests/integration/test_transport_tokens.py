"""Tokens == transformers' tokens over every transport, between blocks of other sizes and layouts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from kvtransfer.transports.nixl import is_installed
from tests.integration.conftest import ANY_PORTS
from tests.integration.oracle import assert_greedy
from tests.integration.test_status import run_cli

NUM_TOKENS = 24
# One, around the borders of blocks of 16 and of 32, more than one chunk of 128, and three chunks.
LENGTHS = (1, 16, 33, 100, 129, 300)
NEEDS_NIXL = pytest.mark.skipif(not is_installed(), reason="nixl is not installed")


def prompt_of(length: int) -> list[int]:
    return [3 + (7 * length + position * position) % 250 for position in range(length)]


async def answer(client: AsyncClient, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens, and the bytes of KV that went to the decode worker."""
    generation = client.generate(token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    tokens = [token_id async for chunk in generation for token_id in chunk.token_ids]
    return tokens, generation.summary.timings.transfer_bytes


@pytest.mark.parametrize(
    ("transport", "prefill_block", "decode_block"),
    [
        ("grpc", 16, 32),
        ("shm", 32, 16),
        pytest.param("nixl", 16, 32, marks=NEEDS_NIXL),
    ],
)
async def test_tokens_are_transformers_over_every_transport(
    transport: str,
    prefill_block: int,
    decode_block: int,
    tiny_model: tuple[Path, LlamaForCausalLM],
    tmp_path: Path,
) -> None:
    folder, reference = tiny_model
    settings = tmp_path / "baton.toml"
    settings.write_text(
        f"[prefill]\nblock_size = {prefill_block}\n[decode]\nblock_size = {decode_block}\nlayout = 'NHD'\n"
    )
    config = ClusterConfig(
        model=str(folder),
        dtype="float32",
        kv_cache_bytes=16 << 20,
        placement="disaggregated",
        kv_transport=transport,
        threads=1,
        ray=False,
        **ANY_PORTS,
    )
    torch.set_num_threads(1)
    async with (
        await LocalCluster.start(config, config_file=str(settings)) as cluster,
        await AsyncClient.connect(cluster.address) as client,
    ):
        prompts = [prompt_of(length) for length in LENGTHS]
        found = await asyncio.gather(*(answer(client, prompt) for prompt in prompts))
        again, again_bytes = await answer(client, prompts[-1])
        status: dict[str, Any] = json.loads(
            await run_cli("status", "--address", cluster.admin_address, "--json")
        )
    for prompt, (tokens, num_bytes) in zip(prompts, found, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert_greedy(reference, prompt, tokens)
        assert num_bytes >= 2 * 2 * 16 * 4 * len(prompt)  # 2 layers, keys and values, 16 numbers of 4 bytes
    assert again == found[-1][0]
    # The decode worker holds the prompt's full blocks; what is left fits into one block of either side.
    assert 0 < again_bytes <= 2 * 2 * 16 * 4 * 2 * max(prefill_block, decode_block)
    workers = {worker["name"]: worker for worker in status["workers"]}
    assert workers["prefill-0"]["block_size"] == prefill_block
    assert workers["decode-0"]["block_size"] == decode_block
    assert [pair["transport"] for pair in workers["prefill-0"]["pairs"]] == [transport]
