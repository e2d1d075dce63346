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
