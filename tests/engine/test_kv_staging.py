"""Where a step's KV lies a second time: found only if it is there, until that place is taken again."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from baton.errors import ConfigError
from engine import kv_staging
from engine.batch import ForwardBatch
from engine.batch_builder import Chunk, build_batch
from engine.kv_cache import CacheShape
from engine.kv_staging import KvStaging
from engine.request import Request
from tests.engine.tiny_models import make_request

SHAPE = CacheShape(num_blocks=9, num_layers=3, num_kv_heads=2, block_size=4, head_dim=6, dtype=torch.float16)
MIN_NEW_TOKENS = 5


def staging_of(max_tokens: int, block_size: int = 4) -> KvStaging:
    return KvStaging(dataclasses.replace(SHAPE, block_size=block_size), max_tokens, "cpu")


def request_of(num_tokens: int, num_computed: int, free: list[int], block_size: int = 4) -> Request:
    blocks = [free.pop() for _ in range(-(-num_tokens // block_size))]
    return make_request([1] * num_tokens, block_ids=blocks, num_computed_tokens=num_computed)


def completing(*lengths: tuple[int, int]) -> tuple[list[Request], ForwardBatch]:
    """Requests of so many tokens, of which so many are computed before a batch that has the rest."""
    free = list(range(40))
    requests = [request_of(*length, free) for length in lengths]
    return requests, build_batch(1, [Chunk.of(r, r.num_pending_tokens) for r in requests], 4)


def random_chunks(rng: random.Random, block_size: int) -> list[Chunk]:
    """Whole prompts, chunks from any token to any other, last chunks, decode rows; blocks from anywhere."""
    free = rng.sample(range(1000), 1000)
    chunks = []
    for _ in range(rng.randint(1, 6)):
        num_tokens = rng.randint(1, 60)
        num_computed = rng.choice([0, num_tokens - 1, rng.randrange(num_tokens)])
        request = request_of(num_tokens, num_computed, free, block_size)
        pending = request.num_pending_tokens
        chunks.append(Chunk.of(request, rng.choice([pending, rng.randint(1, pending)])))
    return chunks


def first_whole(chunk: Chunk, block_size: int) -> int:
    """The first block of its request that a chunk fills from the first slot on."""
    return next(
        index
        for index in range(len(chunk.request.block_ids) + 1)
        if index * block_size >= chunk.request.num_computed_tokens
    )


@pytest.mark.parametrize("seed", range(60))
def test_what_is_found_has_a_slot_for_each_token_and_nothing_else_has_one(seed: int) -> None:
    rng = random.Random(seed)
    block_size, max_tokens = rng.choice([1, 4, 16]), rng.choice([20, 200])
    chunks = random_chunks(rng, block_size)
    batch = build_batch(1, chunks, block_size)
    room = max_tokens // block_size + 1
    wanted: list[tuple[Chunk, list[int]]] = []
    for chunk in chunks:
        blocks = chunk.request.block_ids[first_whole(chunk, block_size) :]
        if chunk.samples and chunk.num_tokens >= MIN_NEW_TOKENS and 0 < len(blocks) <= room:
            room -= len(blocks)
            wanted.append((chunk, blocks))

    rows = staging_of(max_tokens, block_size).begin(batch, MIN_NEW_TOKENS)

    if rows is None:
        assert not wanted
        return
    # By slot of the cache, which no two tokens share, the one of the stage.
    slots = dict(zip(batch.slot_mapping.tolist(), rows.slots.tolist(), strict=True))
    for chunk, blocks in wanted:
        at = rows.step.find(blocks)
        assert at is not None
        assert at.stop - at.start == len(blocks)
        num_tokens = chunk.request.num_tokens - first_whole(chunk, block_size) * block_size
        for token in range(num_tokens):
            block, offset = divmod(token, block_size)
            assert slots.pop(blocks[block] * block_size + offset) == (at.start + block) * block_size + offset
    assert set(slots.values()) <= {-1}
    staged = [block for _, blocks in wanted for block in blocks]
    for chunk in chunks:
        found = [rows.step.find([block]) is not None for block in chunk.request.block_ids]
        assert found == [block in staged for block in chunk.request.block_ids]


def test_of_a_chunk_that_begins_within_a_block_the_rest_is_found_and_not_that_block() -> None:
    (request,), batch = completing((22, 9))

    rows = staging_of(64).begin(batch, MIN_NEW_TOKENS)

    assert rows is not None
    # Tokens 9 to 11 are in the third block, which an earlier step began.
    assert rows.slots.tolist() == [-1, -1, -1, *range(10)]
    assert rows.step.find(request.block_ids[3:]) == slice(0, 3)
    assert rows.step.find(request.block_ids[4:5]) == slice(1, 2)
    assert rows.step.find(request.block_ids[2:]) is None
    assert rows.step.find(request.block_ids[:2]) is None


def test_blocks_are_found_in_their_order_and_side_by_side_only() -> None:
    (one, other), batch = completing((12, 0), (8, 0))

    rows = staging_of(64).begin(batch, MIN_NEW_TOKENS)

    assert rows is not None
    find = rows.step.find
    assert find(one.block_ids + other.block_ids) == slice(0, 5)
    assert find(other.block_ids) == slice(3, 5)
    assert find(one.block_ids[::-1]) is None
    assert find(one.block_ids[::2]) is None
    assert find([*one.block_ids, 39]) is None
    assert find([one.block_ids[0]] * 2) is None
    assert find([]) is None


def test_without_room_a_prompt_is_left_out_and_a_shorter_one_behind_it_is_not() -> None:
    # 16 tokens and one block to spare.
    (first, long, short), batch = completing((9, 0), (12, 0), (8, 0))

    rows = staging_of(16).begin(batch, MIN_NEW_TOKENS)

    assert rows is not None
    assert rows.step.find(first.block_ids) == slice(0, 3)
    assert all(rows.step.find([block]) is None for block in long.block_ids)
    assert rows.step.find(short.block_ids) == slice(3, 5)
    assert rows.slots.tolist() == [*range(9), *[-1] * 12, *range(12, 20)]


def test_a_step_is_intact_until_the_next_but_one_begins() -> None:
    staging = staging_of(64)
    _, batch = completing((9, 0))
    _, decoding = completing((9, 8))
    first, second = (staging.begin(batch, MIN_NEW_TOKENS) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.step.layers_Ln2Kbh.data_ptr() != second.step.layers_Ln2Kbh.data_ptr()
    # What stages nothing takes no stage.
    assert staging.begin(decoding, MIN_NEW_TOKENS) is None
    assert (first.step.is_intact, second.step.is_intact) == (True, True)

    third = staging.begin(batch, MIN_NEW_TOKENS)

    assert third is not None
    assert third.step.layers_Ln2Kbh.data_ptr() == first.step.layers_Ln2Kbh.data_ptr()
    assert (first.step.is_intact, second.step.is_intact, third.step.is_intact) == (False, True, True)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_layers_blocks_are_one_run_of_bytes_in_the_caches_layout(layout: str) -> None:
    _, batch = completing((9, 0))

    rows = KvStaging(dataclasses.replace(SHAPE, layout=layout), 24, "cpu").begin(batch, MIN_NEW_TOKENS)

    assert rows is not None
    layers = rows.step.layers_Ln2Kbh
    # 24 tokens are 6 blocks, and one is to spare; 3 layers, keys and values, 2 heads, 4 slots of 6 elements.
    assert layers.shape == (3, 7, 2, 2, 4, 6)
    assert (layers if layout == "HND" else layers.transpose(3, 4)).is_contiguous()
    assert layers.dtype is torch.float16
    assert rows.slots.dtype is torch.int64
    assert not np.isnan(layers.numpy()).any()


def test_a_stage_larger_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two stages of 5 blocks of 3 layers, 2 x 2 x 4 x 6 elements of 2 bytes in each.
    monkeypatch.setattr(kv_staging, "available_bytes", lambda _device: 5759)
    with pytest.raises(ConfigError, match="needs 5760 bytes on cpu, but only 5759 are free") as raised:
        staging_of(16)
    assert raised.value.field == "kv_staging"
    monkeypatch.setattr(kv_staging, "available_bytes", lambda _device: 5760)
    staging_of(16)
