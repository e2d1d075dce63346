"""A full queue between tenants: one that floods it cannot keep another out of it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from baton.errors import Overloaded
from baton.v1 import common_pb2
from router.queueing.buckets import BucketQueue, Waiting

LOW, NORMAL, HIGH = common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH


class Room:
    """A queue of ten, and who has lost a place in it. Values are names; times rise by one."""

    def __init__(self, max_items: int = 10) -> None:
        self.shed: list[str] = []
        self.queue: BucketQueue[str] = BucketQueue(
            (128, 256), max_items=max_items, max_wait_s=1e9, on_shed=lambda item: self.shed.append(item.value)
        )
        self._now = 0.0

    def push(
        self,
        name: str,
        tenant: str,
        *,
        weight: float = 1.0,
        num_tokens: int = 100,
        priority: int = NORMAL,
        is_new: bool = True,
    ) -> Waiting[str]:
        self._now += 1.0
        return self.queue.push(
            name,
            num_tokens,
            enqueued_at=self._now,
            deadline_at=self._now + 5.0,
            cost_ms=10.0,
            tenant=tenant,
            weight=weight,
            priority=priority,
            is_new=is_new,
        )

    def flood(self, count: int, tenant: str = "greedy", **more: object) -> None:
        for number in range(count):
            self.push(f"{tenant}{number}", tenant, **more)  # type: ignore[arg-type]

    def counts(self) -> Counter[str]:
        return Counter(item.tenant for _, _, item in self.queue._ages)


def test_a_modest_tenant_takes_the_place_of_the_greedy_ones_youngest() -> None:
    room = Room()
    room.flood(10)
    room.push("first", "modest")
    assert room.shed == ["greedy9"]
    room.push("second", "modest")
    assert room.shed == ["greedy9", "greedy8"]
    assert room.counts() == {"greedy": 8, "modest": 2}


def test_it_goes_on_until_both_have_as_many_and_no_further() -> None:
    room = Room()
    room.flood(10)
    for number in range(5):
        room.push(f"modest{number}", "modest")
    assert room.counts() == {"greedy": 5, "modest": 5}
    for tenant in ("modest", "greedy"):
        with pytest.raises(Overloaded) as refused:
            room.push("one more", tenant)
        assert refused.value.retry_after_s is not None
    assert room.counts() == {"greedy": 5, "modest": 5}
    assert len(room.shed) == 5


def test_the_greedy_tenant_is_refused_and_sheds_nobody() -> None:
    room = Room()
    room.flood(9)
    room.push("modest", "modest")
    with pytest.raises(Overloaded):
        room.push("more", "greedy")
    assert room.shed == []


def test_places_are_shared_by_weight() -> None:
    room = Room(max_items=12)
    room.flood(12, "heavy", weight=3.0)
    taken = 0
    while True:
        try:
            room.push(f"light{taken}", "light", weight=1.0)
        except Overloaded:
            break
        taken += 1
    # Three to one: the fourth of the light tenant would be as much for its weight as the heavy one's ninth.
    assert room.counts() == {"heavy": 9, "light": 3}


def test_a_heavier_newcomer_displaces_equals_in_number() -> None:
    room = Room()
    room.flood(5, "light")
    room.flood(5, "heavy", weight=2.0)
    room.push("heavy5", "heavy", weight=2.0)
    assert room.shed == ["light4"]


def test_of_several_tenants_the_one_with_most_for_its_weight_gives_way() -> None:
    room = Room()
    room.flood(6, "a", weight=3.0)
    room.flood(4, "b", weight=1.0)
    room.push("c0", "c")
    assert room.shed == ["b3"]


def test_the_youngest_gives_way_whatever_its_bucket_or_deadline() -> None:
    room = Room(max_items=3)
    room.push("long", "greedy", num_tokens=1000)
    room.push("short", "greedy", num_tokens=10)
    room.push("middle", "greedy", num_tokens=200)
    room.push("modest", "modest")
    assert room.shed == ["middle"]


def test_what_was_placed_before_is_never_shed_and_the_next_greedy_tenant_gives_way_instead() -> None:
    room = Room(max_items=4)
    room.flood(6, "resuming", is_new=False)
    room.flood(4, "greedy")
    room.push("modest", "modest")
    assert room.shed == ["greedy3"]
    assert room.counts() == {"resuming": 6, "greedy": 3, "modest": 1}


def test_a_lower_priority_of_anybody_gives_way_before_an_equal_one_of_the_greedy_tenant() -> None:
    room = Room()
    room.flood(9, "greedy")
    room.push("low", "modest", priority=LOW)
    room.push("other", "other")
    assert room.shed == ["low"]


def test_tenants_share_one_priority_and_no_other() -> None:
    """Who may use a higher priority goes first, and its requests are displaced by nobody below."""
    room = Room()
    room.flood(10, "greedy", priority=HIGH)
    with pytest.raises(Overloaded):
        room.push("modest", "modest")
    room.push("urgent", "modest", priority=HIGH)
    assert room.shed == ["greedy9"]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_a_flood_sends_a_tenant_within_its_share_is_never_refused(seed: int) -> None:
    rng, room = random.Random(seed), Room(max_items=20)
    modest_waiting: list[Waiting[str]] = []
    num_refused = 0
    for number in range(400):
        for _ in range(rng.randrange(1, 6)):
            try:
                room.push(f"g{number}", "greedy", num_tokens=rng.randrange(1, 1000))
            except Overloaded:
                num_refused += 1
        # Two tenants share twenty places: up to ten at a time are its own.
        if rng.random() < 0.5 and len(modest_waiting) < 10:
            modest_waiting.append(room.push(f"m{number}", "modest", num_tokens=rng.randrange(1, 1000)))
        if rng.random() < 0.4 and (served := room.queue.pop(lambda _: True, float(number))) is not None:
            modest_waiting = [item for item in modest_waiting if item is not served]
        assert len(room.queue) <= 20
    assert num_refused > 100
    assert not any(name.startswith("m") for name in room.shed)
