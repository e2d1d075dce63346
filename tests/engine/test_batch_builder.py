"""The arrays of one step, against values worked out by hand."""

from __future__ import annotations

from baton.sampling import SamplingParams
from engine.batch_builder import Chunk, build_batch
from tests.engine.tiny_models import make_request


def test_a_mixed_batch_is_packed_without_padding() -> None:
    params = SamplingParams(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=2**64 - 1, logprobs=True)
    decoding = make_request(
        [9, 8, 7, 6, 5], num_prompt_tokens=3, num_computed_tokens=4, block_ids=[3, 1, 6], sample_index=2,
        params=params,
    )  # fmt: skip
    middle = make_request(list(range(20, 30)), num_computed_tokens=4, block_ids=[8, 0, 5, 7, 2])
    whole = make_request([40, 41, 42], block_ids=[9, 4])

    batch = build_batch(17, [Chunk.of(decoding, 1), Chunk.of(middle, 3), Chunk.of(whole, 3)], 2)

    assert batch.step_id == 17
    assert (batch.num_tokens, batch.num_sequences) == (7, 3)
    assert batch.token_ids.tolist() == [5, 24, 25, 26, 40, 41, 42]
    assert batch.positions.tolist() == [4, 4, 5, 6, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [12, 10, 11, 14, 18, 19, 8]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4, 7]
    assert batch.seq_lens.tolist() == [5, 7, 3]
    assert batch.block_tables.tolist() == [[3, 1, 6, 0, 0], [8, 0, 5, 7, 2], [9, 4, 0, 0, 0]]
    assert batch.logits_rows.tolist() == [0, 6]
    sampling = batch.sampling
    assert sampling.position.tolist() == [5, 3]
    assert sampling.seed.tolist() == [2**64 - 1, 0]
    assert sampling.sample_index.tolist() == [2, 0]
    assert sampling.temperature.tolist() == [0.5, 0.0]
    assert sampling.top_k.tolist() == [4, 0]
    assert sampling.want_logprobs.tolist() == [True, False]


def test_a_chunk_remembers_whether_it_samples() -> None:
    request = make_request([1, 2, 3])
    part, whole = Chunk.of(request, 2), Chunk.of(request, 3)

    request.token_ids.append(4)

    assert not part.samples
    assert whole.samples


def test_scored_rows_are_those_before_prompt_tokens() -> None:
    wanting = SamplingParams(temperature=0, prompt_logprobs=2)
    modest = SamplingParams(temperature=0, prompt_logprobs=0)
    beginning = make_request([10, 11, 12, 13, 14], block_ids=[0, 1, 2], params=wanting)
    plain = make_request([20, 21], number=1, block_ids=[3])
    # Resumed with two tokens of answer, which are no prompt: tokens 2 and 3 are left to score.
    resumed = make_request(
        [30, 31, 32, 33, 34, 35], number=2, num_prompt_tokens=4, num_computed_tokens=1, block_ids=[4, 5, 6],
        params=modest,
    )  # fmt: skip
    chunks = [Chunk.of(beginning, 3), Chunk.of(plain, 2), Chunk.of(resumed, 5)]

    batch = build_batch(1, chunks, 2)

    assert [chunk.scored for chunk in chunks] == [range(1, 4), range(0), range(2, 4)]
    assert batch.scored is not None
    assert batch.scored.rows.tolist() == [0, 1, 2, 5, 6]
    assert batch.scored.token_ids.tolist() == [11, 12, 13, 32, 33]
    assert batch.scored.num_top_logprobs == 2


def test_a_decoding_request_scores_no_prompt() -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    decoding = make_request(
        [1, 2, 3, 4], num_prompt_tokens=3, num_computed_tokens=3, block_ids=[0, 1], params=params
    )

    batch = build_batch(1, [Chunk.of(decoding, 1)], 2)

    assert batch.scored is None


def test_a_plain_batch_has_nothing_that_few_ask_for() -> None:
    batch = build_batch(1, [Chunk.of(make_request([1, 2], block_ids=[0]), 2)], 2, eos_token_ids={1})

    assert batch.scored is None
    assert batch.sampling.edits is None
    assert batch.sampling.num_top_logprobs == 0


def test_the_batch_asks_for_as_many_likeliest_tokens_as_any_row() -> None:
    requests = [
        make_request([1], block_ids=[0], params=SamplingParams(logprobs=True, top_logprobs=count))
        for count in (0, 5, 2)
    ]

    assert build_batch(1, [Chunk.of(r, 1) for r in requests], 2).sampling.num_top_logprobs == 5
