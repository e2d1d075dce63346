"""The order of the router's queue, against an oracle that looks at everything that waits."""

from __future__ import annotations

import math
import random

import pytest

from baton.v1 import common_pb2
from router.queueing.buckets import BucketQueue, Waiting

EDGES = (128, 256, 512)
LOW, NORMAL, HIGH = common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH


def oracle(waiting: list[Waiting[int]], largest: int, now: float, max_wait_s: float) -> Waiting[int] | None:
    """The rules for one tenant, by looking at everything."""
    oldest = min(waiting, key=lambda item: (item.enqueued_at, item.value), default=None)
    if oldest is not None and now - oldest.enqueued_at >= max_wait_s:
        return oldest if oldest.num_tokens <= largest else None
    for priority in (HIGH, NORMAL, LOW):
        mine = [item for item in waiting if item.priority == priority]
        mine.sort(key=lambda item: (item.deadline_at, item.enqueued_at, item.value))
        ranges = [(0, 128), (128, 256), (256, 512), (512, 10**9)]
        heads = [next((i for i in mine if low <= i.num_tokens < high), None) for low, high in ranges]
        able = [item for item in mine if item in heads and item.num_tokens <= largest]
        if able:
            return able[0]
    return None


@pytest.mark.parametrize("priorities", [(NORMAL,), (LOW, NORMAL, HIGH)], ids=["one priority", "three"])
@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_that_of_an_oracle(seed: int, priorities: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    queue: BucketQueue[int] = BucketQueue(EDGES, max_items=10_000, max_wait_s=3.0)
    waiting: list[Waiting[int]] = []
    now, served = 0.0, 0
    for number in range(1000):
        now += rng.choice([0.0, 0.01, 0.05])
        waiting.append(
            queue.push(
                number,
                rng.choice([20, 100, 128, 200, 300, 511, 600, 5000]),
                enqueued_at=now,
                # Few distinct values: ties are common.
                deadline_at=math.floor(now) + rng.randrange(5),
                cost_ms=rng.uniform(1, 500),
                priority=rng.choice(priorities),
            )
        )
        for _ in range(rng.randrange(3)):
            largest = rng.choice([50, 150, 400, 10_000, 10_000])
            expected = oracle(waiting, largest, now, 3.0)
            assert queue.pop(lambda item, largest=largest: item.num_tokens <= largest, now) is expected  # type: ignore[misc]
            if expected is not None:
                waiting.remove(expected)
                served += 1
    assert served > 500
    assert len(queue) == len(waiting)
