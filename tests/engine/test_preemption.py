"""A pool that is too small: the youngest give way, the oldest never, and no token changes.

The tattle-tale model runs on the real cache: a block that is shared, reused or given back wrongly
changes the next token.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.limits import Limits
from baton.sampling import SamplingParams
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.events import Preempted, TokenSampled
from engine.kv_cache import CacheShape, KVCache
from engine.model.tattletale import TattleTaleRunner
from engine.request import Request, RequestStatus
from engine.scheduler import Scheduler
from tests.fakes import VOCAB, expected_answer

BLOCK_SIZE = 4


class Engine:
    """Scheduler, pool and tattle-tale in lockstep; whoever gives way is added again at once.

    rope_steps: of the model.
    """

    def __init__(self, num_blocks: int, *, rope_steps: tuple[int, ...] = (), **config: Any) -> None:
        settings = {"max_batch_tokens": 64, "chunk_tokens": 16, "max_running": 8} | config
        self.shape = CacheShape(
            num_blocks=num_blocks,
            num_layers=2,
            num_kv_heads=2,
            block_size=BLOCK_SIZE,
            head_dim=4,
            dtype=torch.float32,
        )
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.limits = Limits(max_model_len=512, vocab_size=VOCAB, rope_steps=rope_steps)
        engine_config = EngineConfig(block_size=BLOCK_SIZE, **settings)
        self.scheduler = Scheduler(self.pool, self.limits, config=engine_config)
        self.num_preempted = Counter[bytes]()
        self.num_outgrown = Counter[bytes]()
        self._runner = TattleTaleRunner(KVCache(self.shape), VOCAB)

    def add(self, number: int, prompt: list[int], max_tokens: int, **fields: Any) -> Request:
        request = Request(
            attempt_id=number.to_bytes(16, "big"),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(temperature=0, max_tokens=max_tokens),
            arrived_at=float(number),
            rope_step=self.limits.rope_step(len(prompt)),
            **fields,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        batch = self.scheduler.next_batch()
        left = self.scheduler.take_left()
        for event in left:
            assert isinstance(event, Preempted)
            assert event.request.block_ids == []
            counter = self.num_outgrown if event.outgrown else self.num_preempted
            counter[event.request.attempt_id] += 1
            event.request.scale_to(self.limits.rope_step(event.request.num_tokens))
            self.scheduler.add(event.request)
        if batch is None:
            assert left, "work is left and nothing advances"
            return
        for event in self.scheduler.apply(self._runner.run(batch)):
            if isinstance(event, TokenSampled) and event.request.is_finished:
                self.scheduler.tables.give_back(event.request)
        found = self.pool.num_free + self.pool.num_used + self.pool.num_fenced
        assert found == self.pool.num_blocks

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def answer(self, request: Request) -> list[int]:
        return request.token_ids[request.num_prompt_tokens :]

    def expected(self, prompt: list[int], max_tokens: int) -> list[int]:
        shape = (self.shape.num_layers, 2, self.shape.num_kv_heads, self.shape.head_dim)
        return expected_answer(prompt, max_tokens, shape=shape, rope_steps=self.limits.rope_steps)


def test_requests_that_do_not_fit_together_change_no_token() -> None:
    # 100 tokens each need 25 blocks in the end; all of them together have 34.
    prompts = [[(7 * index + 11 * number) % 90 + 2 for index in range(40)] for number in range(4)]
    lengths = [60, 9, 40, 60]
    engine = Engine(34)
    requests = [engine.add(number, prompts[number], lengths[number]) for number in range(4)]

    engine.run()

    assert engine.num_preempted[requests[0].attempt_id] == 0
    assert sum(engine.num_preempted.values()) >= 2
    assert max(engine.num_preempted.values()) >= 2
    for request, prompt, num_tokens in zip(requests, prompts, lengths, strict=True):
        assert engine.answer(request) == engine.expected(prompt, num_tokens)
    assert engine.pool.num_used == 0


def test_a_request_that_gave_way_finds_what_is_left_of_its_kv() -> None:
    engine = Engine(20)
    engine.add(0, list(range(2, 34)), 20)
    second = engine.add(1, list(range(40, 56)), 20)
    while not engine.num_preempted:
        engine.step()
    engine.run()
    assert second.num_cached_tokens >= 16


def test_an_older_request_that_comes_later_is_not_the_one_to_give_way() -> None:
    engine = Engine(20)
    young = engine.add(5, list(range(2, 26)), 30)
    engine.step()
    old = engine.add(1, list(range(40, 64)), 30)
    engine.run()
    assert engine.num_preempted[young.attempt_id] >= 1
    assert engine.num_preempted[old.attempt_id] == 0


def test_growth_keeps_blocks_free_above_an_admission() -> None:
    engine = Engine(10)
    decoding = engine.add(0, list(range(2, 18)), 20)
    while decoding.status is not RequestStatus.DECODING:
        engine.step()
    # Five blocks are taken and five free; this prompt needs exactly those.
    waiting = engine.add(1, list(range(40, 60)), 1)
    engine.step()
    assert waiting.status is RequestStatus.QUEUED
    assert engine.scheduler.num_growth_blocks == 1


def test_the_oldest_waits_for_blocks_that_nobody_here_can_give() -> None:
    engine = Engine(8)
    request = engine.add(0, list(range(2, 18)), 8)
    leased = engine.pool.allocate(3)
    while request.num_tokens < 21:
        engine.step()
    assert engine.scheduler.next_batch() is None
    assert engine.scheduler.take_left() == []
    engine.pool.release(leased)
    engine.run()
    assert engine.answer(request) == engine.expected(list(range(2, 18)), 8)


def test_an_equal_prompt_is_computed_once() -> None:
    engine = Engine(64)
    prompt = list(range(2, 42))
    first = engine.add(0, prompt, 4)
    engine.run()
    second = engine.add(1, prompt, 4)
    other_tenant = engine.add(2, prompt, 4, cache_salt=b"somebody else")
    engine.run()
    # The last token is always computed, and blocks are shared whole.
    assert (first.num_cached_tokens, second.num_cached_tokens, other_tenant.num_cached_tokens) == (0, 36, 0)
    assert engine.answer(first) == engine.answer(second) == engine.answer(other_tenant)


def test_prompt_logprobs_find_nothing_in_the_cache() -> None:
    engine = Engine(64)
    engine.add(0, list(range(2, 42)), 1)
    engine.run()
    scored = Request(
        attempt_id=bytes(16),
        token_ids=list(range(2, 42)),
        num_prompt_tokens=40,
        params=SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
    )
    assert engine.scheduler.tables.lookup(scored, 40) == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_comes_and_goes_every_answer_is_the_undisturbed_one(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(
        rng.randint(26, 60),
        rope_steps=rng.choice(((), (), (16, 32, 64, 512))),
        max_running=rng.randint(2, 6),
        chunk_tokens=rng.choice((3, 7, 16)),
    )
    stems = [[rng.randrange(2, VOCAB) for _ in range(rng.randint(4, 30))] for _ in range(2)]
    requests: dict[int, tuple[Request, list[int], int]] = {}
    for number in range(12):
        tail = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 12))]
        prompt, max_tokens = rng.choice(stems) + tail, rng.randint(1, 50)
        requests[number] = (engine.add(number, prompt, max_tokens), prompt, max_tokens)
        for _ in range(rng.randint(0, 6)):
            if engine.scheduler.has_work:
                engine.step()
        if rng.random() < 0.2:
            leaving, _, _ = requests.pop(rng.choice(list(requests)))
            if engine.scheduler.remove(leaving.attempt_id) is not None:
                engine.scheduler.tables.give_back(leaving, engine.scheduler.fence)
    engine.run()
    for request, prompt, max_tokens in requests.values():
        assert engine.answer(request) == engine.expected(prompt, max_tokens)
    assert engine.pool.num_used == engine.pool.num_fenced == 0


def test_a_request_that_has_blocks_and_not_begun_can_give_way_too() -> None:
    engine = Engine(9, max_running=1)
    old = engine.add(0, list(range(2, 18)), 12)
    engine.step()
    # It waits for a place in the batch, with blocks that were reserved for it.
    young = engine.add(1, list(range(40, 52)), 4, block_ids=engine.pool.allocate(3))
    engine.run()
    assert engine.num_preempted == {young.attempt_id: 1}
    assert engine.answer(old) == engine.expected(list(range(2, 18)), 12)
    assert engine.answer(young) == engine.expected(list(range(40, 52)), 4)


def test_a_request_whose_kv_is_on_its_way_holds_no_place_in_the_batch() -> None:
    engine = Engine(40, max_running=1)
    sent = engine.add(0, list(range(2, 18)), 4, prefill_only=True)
    engine.step()
    assert sent.status is RequestStatus.TRANSFERRING
    # Its transfer may stall as long as it likes.
    other = engine.add(1, list(range(40, 56)), 4, prefill_only=True)
    engine.step()
    assert other.status is RequestStatus.TRANSFERRING
    assert (engine.scheduler.num_running, len(sent.block_ids)) == (0, 4)
