"""A prompt of 32,768 tokens: its numbers, and how little of a chunk's memory grows with the context."""

from __future__ import annotations

import pytest
import torch

from engine.batch_builder import Chunk, build_batch
from engine.model.blocked_attention import blocked_attention
from engine.request import Request
from engine.runner import ModelRunner
from tests.engine.families import FULL, SLIDING, Family
from tests.engine.model.live_bytes import LiveBytes
from tests.engine.model.paged_attention import PagedSequences
from tests.engine.tiny_models import load_runner, make_request

LENGTH, CHUNK, BLOCK = 32_768, 1024, 64
HEAD_DIM, HIDDEN, INNER, VOCAB = 16, 18, 26, 101
FLOAT = 4

# Keys and values of one layer and head, as they are gathered from the cache.
GATHERED_PER_TOKEN = 2 * HEAD_DIM * FLOAT
# 2 ** 22 scores, and as many weights.
SCORES = 2 * 2**22 * FLOAT
# A few copies of everything that a token of the chunk has on its way through a layer.
PER_NEW_TOKEN = 4 * (3 * HIDDEN + 3 * INNER + 4 * HEAD_DIM) * FLOAT


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A layer that sees all and one with a window, and a cache for one such prompt."""
    folder = tmp_path_factory.mktemp("long")
    Family(
        kind="ministral",
        settings={
            "max_position_embeddings": LENGTH,
            "sliding_window": 1000,
            "layer_types": [FULL, SLIDING],
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": HEAD_DIM,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
        },
    ).save(folder)
    return load_runner(folder, block_size=BLOCK, num_blocks=LENGTH // BLOCK)


def test_a_chunk_of_a_32k_prompt_needs_its_scores_and_the_context_of_one_layer(runner: ModelRunner) -> None:
    prompt = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
    request = make_request(prompt, block_ids=list(range(LENGTH // BLOCK)))

    peaks = []
    while request.num_pending_tokens:
        peaks.append(peak_of_step(runner, request))

    assert len(peaks) == 32
    assert max(peaks) <= SCORES + LENGTH * GATHERED_PER_TOKEN + CHUNK * PER_NEW_TOKEN
    # The first chunks' blocks have fewer scores; the last ones' have all they may have.
    assert peaks[0] < SCORES / 8 < SCORES < peaks[-1]


def peak_of_step(runner: ModelRunner, request: Request) -> int:
    """Bytes that the step of the next chunk has allocated at a time."""
    batch = build_batch(1, [Chunk.of(request, CHUNK)], BLOCK)
    with LiveBytes() as live:
        output = runner.run(batch)
    request.num_computed_tokens += CHUNK
    assert output.finite.all()
    return live.peak


def test_many_heads_need_no_more_scores_than_few() -> None:
    # 28 query heads on 4: a row of all of them has 917,504 scores, and one block 2 ** 22 at most.
    q_KGnh, kv_2KCh = torch.randn(4, 7, 40, 2), torch.randn(2, 4, LENGTH, 2)

    with LiveBytes() as live:
        blocked_attention(q_KGnh, kv_2KCh[0], kv_2KCh[1], scale=0.5)

    output = q_KGnh.nbytes
    assert 2**22 * FLOAT <= live.peak <= SCORES + 3 * output


def test_the_end_of_a_32k_prompt_gives_the_dense_softmax() -> None:
    spans = [(LENGTH - 40, LENGTH), (LENGTH - 1, LENGTH)]
    sequences = PagedSequences([LENGTH, LENGTH], heads=(2, 1), block_size=BLOCK)

    outputs = sequences.step(spans, [0, 1000])

    for window in (0, 1000):
        for index, (first, end) in enumerate(spans):
            expected = sequences.expected(index, first, end, window)
            torch.testing.assert_close(outputs[window][index].double(), expected, rtol=0, atol=2e-6)
