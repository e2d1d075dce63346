"""A simulated step writes its layers one after another, over the time that it costs."""

from __future__ import annotations

import asyncio

import torch

from engine.batch_builder import Chunk, build_batch
from engine.kv_cache import CacheShape, KVCache
from tests.engine.tiny_models import make_request
from tests.fakes import kv_rows
from tests.simulation.steps import SimStepRunner
from tests.simulation.virtual_loop import VirtualLoop

SHAPE = (4, 2, 1, 3)
PROMPT = [4, 5, 6]


async def watched_step(cache: KVCache) -> list[tuple[float, int, list[bool]]]:
    """When the step told of how many layers, and which of them were there by then."""
    loop, news = asyncio.get_running_loop(), list[tuple[float, int, list[bool]]]()
    expected = torch.from_numpy(kv_rows(PROMPT, SHAPE)).float()

    def on_layers(num_layers: int, _stored: object) -> None:
        found = cache.logical[2, :, :, :, : len(PROMPT)].permute(3, 0, 1, 2, 4)
        is_there = [torch.equal(found[:, layer], expected[:, layer]) for layer in range(SHAPE[0])]
        news.append((loop.time(), num_layers, is_there))

    batch = build_batch(1, [Chunk.of(make_request(PROMPT, block_ids=[2]), 3)], 4)
    await SimStepRunner(cache, lambda batch: 2.0, lambda: None).execute(batch, on_layers)
    news.append((loop.time(), 0, []))
    return news


def test_layer_i_of_n_is_there_after_i_nths_of_the_cost() -> None:
    layers, _, heads, dim = SHAPE
    cache = KVCache(
        CacheShape(
            num_blocks=4,
            num_layers=layers,
            num_kv_heads=heads,
            block_size=4,
            head_dim=dim,
            dtype=torch.float32,
        )
    )
    loop = VirtualLoop()
    try:
        news = loop.run_until_complete(watched_step(cache))
    finally:
        loop.close()
    assert news == [
        (0.5, 1, [True, False, False, False]),
        (1.0, 2, [True, True, False, False]),
        (1.5, 3, [True, True, True, False]),
        (2.0, 4, [True, True, True, True]),
        (2.0, 0, []),
    ]
