"""A prompt that lacks blocks stops nobody, and nobody stops it for ever (case B15)."""

from __future__ import annotations

from engine.events import TokenSampled
from engine.request import Request, RequestStatus
from engine.waiting_line import MAX_OVERTAKEN
from tests.engine.test_scheduler import Engine, params


def one_token(engine: Engine, number: int, num_tokens: int) -> Request:
    return engine.add(
        number, num_tokens, params=params(max_tokens=1), arrived_at=float(number), prefill_only=True
    )


def step(engine: Engine) -> list[Request]:
    """Runs a step; those that end in it give their blocks back, and are returned."""
    ended = [event.request for event in engine.step() if isinstance(event, TokenSampled)]
    for request in ended:
        engine.pool.release(request.block_ids)
    return ended


def test_small_prompts_run_while_a_big_one_waits_for_blocks() -> None:
    engine = Engine(num_blocks=40, max_batch_tokens=128, max_running=32)
    held = engine.pool.allocate(30)
    big = one_token(engine, 1, 120)
    small = [one_token(engine, number, 4) for number in range(2, 22)]
    assert step(engine) == small[:10]
    assert step(engine) == small[10:]
    assert (big.status, big.block_ids) == (RequestStatus.QUEUED, [])
    engine.pool.release(held)
    step(engine)
    assert len(big.block_ids) == 30


def test_a_big_prompt_starts_in_spite_of_a_flood_of_small_ones() -> None:
    # Small prompts of two steps each, three more in every step: 15 of 32 blocks are always taken.
    engine = Engine(num_blocks=32, max_batch_tokens=128, max_running=32)
    small = [one_token(engine, number, 20) for number in range(3)]
    step(engine)
    big = one_token(engine, 3, 120)
    while not big.block_ids:
        small += [one_token(engine, 1 + len(small) + index, 20) for index in range(3)]
        step(engine)
        assert len(small) < 120
    overtaking = [request for request in small[3:] if request.status is not RequestStatus.QUEUED]
    assert len(overtaking) == MAX_OVERTAKEN
    # Whoever came after the last of them has waited, in order.
    assert overtaking == small[3 : 3 + MAX_OVERTAKEN]


def test_nothing_is_looked_up_while_no_block_is_free() -> None:
    engine = Engine(num_blocks=10)
    engine.pool.allocate(10)
    waiting = [one_token(engine, number, 8) for number in range(5)]
    assert engine.scheduler.next_batch() is None
    assert [request.prefix_keys for request in waiting] == [None] * 5
