"""The scheduler, driven by a runner that needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from baton.errors import InvalidRequest, NonFiniteLogits
from baton.limits import Limits
from baton.sampling import SamplingParams
from engine.batch import ForwardBatch, StepOutput
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.events import ChunkComputed, Event, RequestFailed, TokenSampled
from engine.request import FinishReason, Request, RequestStatus
from engine.scheduler import Scheduler
from tests.engine.tiny_models import make_request

EOS = 99


class Engine:
    """A scheduler and its pool; steps yield the tokens a test asks for."""

    def __init__(self, *, num_blocks: int = 64, max_model_len: int = 512, **config: Any) -> None:
        settings = {"max_batch_tokens": 64, "chunk_tokens": 16, "max_running": 8} | config
        self.pool = BlockPool(num_blocks, 4)
        self.scheduler = Scheduler(
            self.pool,
            Limits(max_model_len=max_model_len, vocab_size=100),
            config=EngineConfig(block_size=4, **settings),
            eos_token_ids=[EOS],
        )

    def add(self, number: int, num_tokens: int, **fields: Any) -> Request:
        # No two begin alike: what one has computed is of no use to another.
        tokens = [(13 * number + index) % 98 for index in range(num_tokens)]
        request = make_request(tokens, number=number, **{"params": params(max_tokens=20)} | fields)
        self.scheduler.add(request)
        return request

    def add_decoding(self, number: int, num_tokens: int, *, room: int = 0, **fields: Any) -> Request:
        """A request as a lease hands it over: KV of all but the last token is there."""
        blocks = self.pool.allocate(-(-(num_tokens + room) // 4))
        return self.add(
            number,
            num_tokens,
            num_computed_tokens=num_tokens - 1,
            block_ids=blocks,
            status=RequestStatus.DECODING,
            **fields,
        )

    def step(self, token_id: int = 1) -> list[Event]:
        batch = self.scheduler.next_batch()
        assert batch is not None
        return self.scheduler.apply(output_of(batch, [token_id] * len(batch.logits_rows)))


def output_of(batch: ForwardBatch, token_ids: Sequence[int], *, bad_rows: Sequence[int] = ()) -> StepOutput:
    finite = np.ones(len(token_ids), np.bool_)
    finite[list(bad_rows)] = False
    return StepOutput(
        step_id=batch.step_id,
        token_ids=np.array(token_ids, np.int64),
        logprobs=np.full(len(token_ids), -0.5, np.float32),
        finite=finite,
    )


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)


def lengths_of(batch: ForwardBatch | None) -> list[int]:
    assert batch is not None
    return np.diff(batch.cu_seqlens_q).tolist()


def test_a_prompt_is_computed_chunk_by_chunk_and_then_decodes() -> None:
    engine = Engine()
    request = engine.add(1, 40)

    assert engine.step() == [ChunkComputed(request)]
    assert request.status is RequestStatus.PREFILLING
    assert engine.step() == [ChunkComputed(request)]
    assert request.num_computed_tokens == 32
    assert engine.step(token_id=7) == [TokenSampled(request, 7, -0.5)]
    assert request.status is RequestStatus.DECODING
    assert (request.token_ids[-1], request.num_computed_tokens, request.num_tokens) == (7, 40, 41)
    assert engine.step(token_id=8) == [TokenSampled(request, 8, -0.5)]
    assert request.num_computed_tokens == 41


def test_all_blocks_of_a_prompt_are_reserved_before_its_first_chunk() -> None:
    engine = Engine(num_blocks=16)
    first, second = engine.add(1, 40), engine.add(2, 40)

    engine.step()

    assert len(first.block_ids) == 10
    assert second.block_ids == []
    assert second.status is RequestStatus.QUEUED
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)
    engine.pool.release(engine.scheduler.remove(first.attempt_id).block_ids)  # type: ignore[union-attr]
    engine.step()
    assert len(second.block_ids) == 10


def test_a_request_with_its_blocks_joins_past_waiting_prompts() -> None:
    engine = Engine(num_blocks=20)
    engine.add(1, 40)
    engine.step()
    engine.add(2, 40)
    decoding = engine.add_decoding(3, 9)

    assert TokenSampled(decoding, 5, -0.5) in engine.step(token_id=5)


def test_decode_tokens_come_first_and_prompts_share_the_rest_shortest_first() -> None:
    engine = Engine(max_batch_tokens=24)
    engine.add_decoding(1, 9, room=4)
    engine.add_decoding(2, 5, room=4)
    engine.add(3, 100)
    engine.add(4, 30)
    engine.add(5, 6)

    # 22 tokens are left; half of them, 11, are promised to the oldest prompt.
    assert lengths_of(engine.scheduler.next_batch()) == [1, 1, 6, 5, 11]


def test_a_short_prompt_behind_long_ones_is_sampled_one_step_after_it_came() -> None:
    engine = Engine(num_blocks=256, max_batch_tokens=32)
    for number in range(4):
        engine.add(number, 200)
    batch = engine.scheduler.next_batch()
    assert batch is not None
    short = engine.add(9, 8)
    engine.scheduler.apply(output_of(batch, []))

    assert TokenSampled(short, 1, -0.5) in engine.step()


def test_a_stream_of_short_prompts_cannot_starve_a_long_one() -> None:
    engine = Engine(num_blocks=256, max_batch_tokens=32)
    long = engine.add(1, 200, prefill_only=True)

    for number in range(13):  # ceil(200 / 16) steps
        for short in range(4):
            engine.add(100 + 4 * number + short, 8, params=params(max_tokens=1))
        for event in engine.step():
            if event.request.is_finished:
                engine.pool.release(event.request.block_ids)

    assert long.num_computed_tokens == 200
    assert long.status is RequestStatus.TRANSFERRING


def test_prefill_only_leaves_with_its_blocks_after_one_token() -> None:
    engine = Engine()
    request = engine.add(1, 10, prefill_only=True)

    assert engine.step(token_id=3) == [TokenSampled(request, 3, -0.5)]

    assert request.status is RequestStatus.TRANSFERRING
    assert not engine.scheduler.has_work
    assert len(request.block_ids) == 3
    assert engine.pool.num_used == 3


@pytest.mark.parametrize(
    ("token_id", "fields", "reason"),
    [
        (EOS, {}, FinishReason.STOP),
        (EOS, {"ignore_eos": True}, None),
        (42, {"stop_token_ids": (41, 42)}, FinishReason.STOP),
        (EOS, {"stop_token_ids": (EOS,), "ignore_eos": True}, FinishReason.STOP),
        (5, {"max_tokens": 1}, FinishReason.LENGTH),
        (5, {"max_tokens": 2}, None),
        (EOS, {"max_tokens": 1}, FinishReason.STOP),
    ],
)
@pytest.mark.parametrize("prefill_only", [False, True])
def test_stop_rules(
    token_id: int, fields: dict[str, Any], reason: FinishReason | None, prefill_only: bool
) -> None:
    engine = Engine()
    request = engine.add(1, 10, params=params(**fields), prefill_only=prefill_only)

    engine.step(token_id)

    assert request.finish_reason is reason
    assert request.is_finished is (reason is not None)
    assert request.token_ids[-1] == token_id


def test_max_tokens_counts_generated_tokens_after_a_resume() -> None:
    engine = Engine()
    request = engine.add(1, 12, num_prompt_tokens=10, params=params(max_tokens=4))

    engine.step()
    assert request.finish_reason is None
    engine.step()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_output_tokens == 4


def test_the_context_limit_ends_a_request() -> None:
    engine = Engine(max_model_len=12)
    request = engine.add(1, 10, params=params(max_tokens=100))

    engine.step()
    engine.step()

    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_tokens == 12


def test_a_decoding_request_grows_by_a_block_when_it_needs_one() -> None:
    engine = Engine()
    request = engine.add(1, 4)

    engine.step()
    assert len(request.block_ids) == 1
    for _ in range(4):
        engine.step()
        assert len(request.block_ids) == 2
    engine.step()
    assert (request.num_tokens, len(request.block_ids)) == (10, 3)


def test_a_request_that_could_not_even_grow_alone_is_refused() -> None:
    engine = Engine(num_blocks=3)
    engine.add(1, 4, params=params(max_tokens=9))
    with pytest.raises(InvalidRequest, match="needs 4 blocks") as error:
        engine.add(2, 4, params=params(max_tokens=10))
    assert error.value.field == "max_tokens"


def test_removal_during_a_step_keeps_the_blocks_until_it_ends() -> None:
    engine = Engine()
    gone, stays = engine.add(1, 8), engine.add(2, 6)
    batch = engine.scheduler.next_batch()
    assert batch is not None

    removed = engine.scheduler.remove(gone.attempt_id)
    assert removed is gone
    engine.pool.release(gone.block_ids, fence=engine.scheduler.fence)
    # What its owner does with it must not disturb the rows of the step.
    gone.token_ids.append(55)
    assert engine.pool.num_fenced == 2

    events = engine.scheduler.apply(output_of(batch, [31, 32]))

    # Shortest first: row 0 is the six-token prompt.
    assert events == [TokenSampled(stays, 31, -0.5)]
    assert engine.pool.num_fenced == 0
    assert gone.num_computed_tokens == 0
    assert engine.scheduler.fence is None


def test_removal_between_steps_needs_no_fence() -> None:
    engine = Engine()
    request = engine.add(1, 40)
    engine.step()

    assert engine.scheduler.remove(request.attempt_id) is request
    assert engine.scheduler.fence is None
    assert engine.scheduler.remove(request.attempt_id) is None
    assert engine.scheduler.next_batch() is None


def test_removing_a_waiting_request_lets_the_next_one_in() -> None:
    engine = Engine(num_blocks=16)
    engine.add(1, 40)
    engine.step()
    blocked = engine.add(2, 40)
    small = engine.add(3, 4)

    assert engine.scheduler.remove(blocked.attempt_id) is blocked
    assert TokenSampled(small, 1, -0.5) in engine.step()


def test_non_finite_logits_fail_their_request_alone() -> None:
    engine = Engine()
    first, second = engine.add_decoding(1, 5, room=4), engine.add_decoding(2, 6, room=4)
    batch = engine.scheduler.next_batch()
    assert batch is not None

    failed, sampled = engine.scheduler.apply(output_of(batch, [0, 4], bad_rows=[0]))

    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, NonFiniteLogits)
    assert failed.request is first
    assert first.is_finished
    assert first.num_tokens == 5
    assert sampled == TokenSampled(second, 4, -0.5)


def test_the_batch_never_holds_more_than_max_running() -> None:
    engine = Engine(max_running=3)
    for number in range(5):
        engine.add(number, 4)

    assert len(lengths_of(engine.scheduler.next_batch())) == 3
    assert engine.scheduler.num_waiting == 2


def test_only_one_step_is_in_flight() -> None:
    engine = Engine()
    engine.add(1, 8)
    batch = engine.scheduler.next_batch()
    assert batch is not None

    with pytest.raises(RuntimeError, match="in flight"):
        engine.scheduler.next_batch()
    engine.scheduler.apply(output_of(batch, [1]))
    with pytest.raises(ValueError, match="not in flight"):
        engine.scheduler.apply(output_of(batch, [1]))


def test_what_can_never_run_is_refused() -> None:
    engine = Engine(num_blocks=4, max_model_len=30)
    with pytest.raises(InvalidRequest, match="needs 8 blocks"):
        engine.add(1, 17)
    with pytest.raises(InvalidRequest, match="has 30 tokens"):
        engine.add(2, 30)
    with pytest.raises(InvalidRequest, match="has 0 tokens"):
        engine.add(3, 0)
    assert not engine.scheduler.has_work


def test_misuse_is_refused() -> None:
    engine = Engine()
    engine.add(1, 8)
    with pytest.raises(ValueError, match="scheduled already"):
        engine.add(1, 8)
    with pytest.raises(ValueError, match="TRANSFERRING"):
        engine.add(2, 8, status=RequestStatus.TRANSFERRING)
    with pytest.raises(ValueError, match="0 pending"):
        engine.add(3, 8, num_computed_tokens=8)


def test_a_request_that_must_run_alone_shares_no_step_and_takes_every_other_one() -> None:
    engine = Engine()
    engine.add_decoding(1, 5, room=20)
    suspect = engine.add_decoding(2, 5, room=20, alone=True)
    engine.add(3, 40)
    sequences, alone = [], []
    for _ in range(4):
        batch = engine.scheduler.next_batch()
        assert batch is not None
        sequences.append(batch.num_sequences)
        alone.append(engine.scheduler.alone_in_flight)
        engine.scheduler.apply(output_of(batch, [1] * len(batch.logits_rows)))
    assert sequences == [1, 2, 1, 2]
    assert alone == [suspect.attempt_id, None, suspect.attempt_id, None]
    assert engine.scheduler.alone_in_flight is None


def test_prompts_that_must_run_alone_take_turns() -> None:
    engine = Engine()
    for number in (1, 2):
        engine.add(number, 30, alone=True)
    order = []
    while (batch := engine.scheduler.next_batch()) is not None:
        assert batch.num_sequences == 1
        order.append((engine.scheduler.alone_in_flight or b"")[-1])
        engine.scheduler.apply(output_of(batch, [EOS] * len(batch.logits_rows)))
    assert len(order) == 4
    assert order[0] != order[1]
