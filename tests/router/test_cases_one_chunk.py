"""A short prompt behind very long ones waits for one chunk of them at most: at the worker's scheduler, with
a step that takes as long as it has tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from baton.limits import Limits
from baton.sampling import SamplingParams
from engine.batch import StepOutput
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.events import TokenSampled
from engine.scheduler import Scheduler
from tests.engine.tiny_models import make_request

LONG, SHORT = 60_000, 101
CHUNK = 2048
TOKEN_MS = 0.125


class Worker:
    """A prefill worker's scheduler on simulated time. first_token_ms: when each prompt got its token."""

    def __init__(self) -> None:
        num_blocks = 6 * LONG // 16
        config = EngineConfig(
            block_size=16, max_batch_tokens=2 * CHUNK, chunk_tokens=CHUNK, max_running=64, mixed_tokens=512
        )
        limits = Limits(max_model_len=2 * LONG, vocab_size=100)
        pool = BlockPool(num_blocks, 16)
        self._scheduler = Scheduler(pool, limits, config=config, eos_token_ids=())
        self.now_ms = 0.0
        self.first_token_ms: dict[int, float] = {}
        self._numbers: dict[bytes, int] = {}

    def add(self, number: int, num_tokens: int) -> None:
        # No two begin alike: what one has computed is of no use to another.
        tokens = [(13 * number + index) % 98 for index in range(num_tokens)]
        params = SamplingParams(temperature=0, max_tokens=1)
        request = make_request(tokens, number=number, params=params, arrived_at=self.now_ms)
        self._numbers[request.attempt_id] = number
        self._scheduler.add(request)

    def step(self, arriving: Sequence[tuple[int, int]] = ()) -> None:
        """One step; arriving: prompts that come while it runs."""
        batch = self._scheduler.next_batch()
        assert batch is not None
        for number, num_tokens in arriving:
            self.add(number, num_tokens)
        self.now_ms += TOKEN_MS * batch.num_tokens
        rows = len(batch.logits_rows)
        output = StepOutput(
            step_id=batch.step_id,
            token_ids=np.ones(rows, np.int64),
            logprobs=np.zeros(rows, np.float32),
            finite=np.ones(rows, np.bool_),
        )
        for event in self._scheduler.apply(output):
            if isinstance(event, TokenSampled):
                self.first_token_ms[self._numbers[event.request.attempt_id]] = self.now_ms
                self._scheduler.remove(event.request.attempt_id)


@pytest.mark.parametrize("num_long", [1, 5])
def test_a_short_prompt_behind_long_ones_waits_for_one_step_which_is_a_chunk_behind_one_of_them(
    num_long: int,
) -> None:
    worker = Worker()
    for number in range(num_long):
        worker.add(number, LONG)
    worker.step()
    before_ms = worker.now_ms
    # It comes during a step. Of one long prompt that has a chunk, of several as many as a batch holds: two.
    worker.step(arriving=[(99, SHORT)])
    began_ms = worker.now_ms
    assert began_ms - before_ms == TOKEN_MS * min(num_long, 2) * CHUNK
    worker.step()
    # Its own step has it as a whole, and what else fits.
    assert worker.first_token_ms[99] - began_ms <= TOKEN_MS * 2 * CHUNK
    assert len(worker.first_token_ms) == 1


def test_a_flood_of_short_prompts_leaves_the_long_one_its_chunk_of_every_step() -> None:
    worker = Worker()
    worker.add(0, LONG)
    numbers = iter(range(1, 10_000))
    num_steps = 0
    while 0 not in worker.first_token_ms:
        worker.step(arriving=[(next(numbers), SHORT) for _ in range(40)])
        num_steps += 1
        assert num_steps < 100
    assert num_steps == -(-LONG // CHUNK)
