"""Every architecture disaggregated: prefill worker, transfer, decode worker; tokens == transformers' tokens.

The shells of all three roles in one process, with real engines whose caches differ in block size and layout.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from baton.models import ModelDir
from engine.config import EngineConfig
from engine.engine import Engine
from tests.cluster import cluster
from tests.engine.families import ARCHITECTURES, FAMILIES
from tests.engine.tiny_models import greedy_reference

NUM_TOKENS = 32
# Within a block, over several, and one that finds a prefix of another in both caches.
LENGTHS = (5, 37, 64)


@asynccontextmanager
async def running(folder: Path, *, block_size: int, layout: str) -> AsyncIterator[Engine]:
    """An engine as a worker starts it, its cache full of NaN."""
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        threads=1,
        block_size=block_size,
        layout=layout,
        kv_cache_bytes=1 << 20,
        chunk_tokens=16,
        max_batch_tokens=64,
        max_running=8,
    )
    engine = await Engine.start(config, ModelDir.open(folder))
    engine.cache.data.fill_(torch.nan)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.mark.parametrize("name", ARCHITECTURES.values(), ids=ARCHITECTURES)
async def test_disaggregated_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = FAMILIES[name].save(tmp_path)
    async with (
        running(tmp_path, block_size=4, layout="HND") as prefill,
        running(tmp_path, block_size=6, layout="NHD") as decode,
        cluster(num_prefill=0, num_decode=0) as c,
    ):
        await c.prefill(engine=prefill)
        await c.decode(engine=decode)
        together = [c.stage.generate(length, max_tokens=NUM_TOKENS) for length in LENGTHS[:-1]]
        answers = [await run.answer() for run in together]
        answers.append(await c.stage.generate(LENGTHS[-1], max_tokens=NUM_TOKENS).answer())
        await c.idle()
        num_bytes = c.workers["decode-0"].receiver.counters["bytes"]

    # All KV that the decode worker's prefix cache did not have, in whole blocks at most.
    assert 5 + 37 + 64 - 36 <= num_bytes / kv_bytes_per_token(reference) < sum(LENGTHS) + 3 * 6
    for length, answer in zip(LENGTHS, answers, strict=True):
        prompt = list(range(length))
        assert prompt + answer == greedy_reference(reference, prompt, NUM_TOKENS)


def kv_bytes_per_token(reference: PreTrainedModel) -> int:
    """Keys and values of all layers in fp32, from transformers' own numbers."""
    keys = reference.model.layers[0].self_attn.k_proj.out_features
    return 2 * 4 * int(keys) * int(reference.config.num_hidden_layers)
