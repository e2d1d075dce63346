"""Turns among tenants: the sequence by arithmetic, and that no tenant gets ahead of its weight."""

from __future__ import annotations

import random

import pytest

from router.queueing.deficit_ring import DeficitRing
from router.queueing.waiting import Waiting

QUANTUM_MS = 100.0


class Ring:
    """A ring with one bucket, in which items are served in the order they come."""

    def __init__(self) -> None:
        self._ring: DeficitRing[str] = DeficitRing(quantum_ms=QUANTUM_MS)
        self._number = 0

    def add(self, tenant: str, *costs_ms: float, weight: float = 1.0, bucket: int = 0) -> None:
        for cost_ms in costs_ms:
            self._number += 1
            item = self._last = Waiting(
                value=tenant,
                num_tokens=bucket,
                enqueued_at=0.0,
                deadline_at=0.0,
                cost_ms=cost_ms,
                tenant=tenant,
                weight=weight,
                number=self._number,
            )
            self._ring.add(item, bucket, 2)

    def next(self, blocked: str = "", blocked_bucket: int = 0) -> Waiting[str] | None:
        item = self._ring.choose(
            lambda item: item.tenant != blocked or item.num_tokens != blocked_bucket,
        )
        if item is not None:
            self._ring.discard(item, item.num_tokens)
        return item

    def charge(self, tenant: str, cost_ms: float) -> None:
        self.add(tenant, cost_ms)
        self._ring.charge(self._last)
        self._ring.discard(self._last, 0)

    def serve(self, num_items: int, blocked: str = "") -> str:
        items = [self.next(blocked) for _ in range(num_items)]
        return "".join(item.value for item in items if item is not None)


def test_equal_tenants_take_turns() -> None:
    ring = Ring()
    ring.add("a", *[100.0] * 4)
    ring.add("b", *[100.0] * 4)
    assert ring.serve(8) == "abababab"


def test_a_turn_serves_as_many_as_the_quantum_pays_for() -> None:
    ring = Ring()
    ring.add("a", *[40.0] * 5)
    ring.add("b", *[100.0] * 3)
    # 100 pays for two of 40, 20 are left; 120 for three, none is left.
    assert ring.serve(8) == "aabaaabb"


def test_a_weight_multiplies_the_quantum() -> None:
    ring = Ring()
    ring.add("a", *[100.0] * 6, weight=3.0)
    ring.add("b", *[100.0] * 2)
    assert ring.serve(8) == "aaabaaab"


def test_a_dear_item_takes_as_many_turns_as_it_costs() -> None:
    ring = Ring()
    ring.add("a", 1000.0, 1000.0)
    ring.add("b", *[100.0] * 20)
    # a is asked first in its tenth turn; b has had nine by then.
    assert ring.serve(22) == "b" * 9 + "a" + "b" * 10 + "a" + "b"


def test_turns_for_a_dear_item_are_computed_not_gone_through() -> None:
    ring = Ring()
    ring.add("a", 1e15)
    ring.add("b", 2e15)
    assert ring.serve(2) == "ab"


def test_a_tenant_that_comes_later_waits_one_round() -> None:
    ring = Ring()
    ring.add("a", *[100.0] * 4)
    ring.add("b", *[100.0] * 4)
    assert ring.serve(1) == "a"
    ring.add("c", 100.0)
    # b's turn is next, then that of the newcomer, then a's again.
    assert ring.serve(4) == "bcab"


def test_a_tenant_that_does_not_wait_keeps_no_deficit() -> None:
    ring = Ring()
    ring.add("b", *[100.0] * 12)
    for _ in range(5):
        # Each of a's turns leaves 90 ms unused.
        ring.add("a", 10.0)
        assert ring.serve(2) == "ba"
    ring.add("a", *[100.0] * 3)
    assert ring.serve(5) == "babab"


def test_a_tenant_whose_items_do_not_fit_blocks_nobody_and_keeps_its_turn() -> None:
    ring = Ring()
    ring.add("a", *[100.0] * 4)
    ring.add("b", *[100.0] * 20)
    assert ring.serve(10, blocked="a") == "b" * 10
    # The turn it kept and the one that is due; not the nine that it could not use.
    assert ring.serve(6) == "aababa"


def test_when_nothing_fits_nobody_loses_or_gains_a_turn() -> None:
    ring = Ring()
    ring.add("a", *[100.0] * 3)
    assert ring.serve(5, blocked="a") == ""
    ring.add("b", *[100.0] * 3)
    assert ring.serve(6) == "ababab"


def test_the_head_of_another_bucket_is_served_when_the_first_does_not_fit() -> None:
    ring = Ring()
    ring.add("a", 100.0, bucket=0)
    ring.add("a", 300.0, bucket=1)
    ring.add("b", *[100.0] * 4)
    served = [ring.next(blocked="a", blocked_bucket=0) for _ in range(5)]
    # 300 ms take three turns of a's; b has had two by then.
    assert [item and (item.value, item.cost_ms) for item in served] == [
        ("b", 100.0),
        ("b", 100.0),
        ("a", 300.0),
        ("b", 100.0),
        ("b", 100.0),
    ]


def test_what_is_left_of_a_turn_is_kept_while_the_next_item_does_not_fit() -> None:
    ring = Ring()
    ring.add("a", *[10.0] * 30)
    ring.add("b", *[100.0] * 4)
    assert ring.serve(1) == "a"
    assert ring.serve(3, blocked="a") == "bbb"
    # 90 ms are left, and 100 are granted.
    assert ring.serve(20) == "a" * 19 + "b"


def test_a_cheap_item_behind_a_dear_one_that_does_not_fit_waits_for_the_turns_of_the_dear_one() -> None:
    ring = Ring()
    ring.add("a", 300.0, bucket=0)
    ring.add("a", *[50.0] * 8, bucket=1)
    ring.add("b", 310.0)
    # In its third turn a could pay for the dear one; it does not fit, one of 50 does: 250 ms are left,
    # and b has 200. The next turn brings a to 350: two of 50, until the dear one could not be
    # paid for. Then b has 400.
    served = [ring.next(blocked="a", blocked_bucket=0) for _ in range(4)]
    assert [item and item.value for item in served] == ["a", "a", "a", "b"]


def test_service_out_of_turn_is_paid_for_but_leaves_no_debt() -> None:
    ring = Ring()
    ring.add("a", *[50.0] * 10)
    ring.add("b", *[100.0] * 4)
    assert ring.serve(1) == "a"
    # 50 ms are left of a's turn: they are spent, and no more.
    ring.charge("a", 500.0)
    assert ring.serve(6) == "baabaa"


@pytest.mark.parametrize(("greedy_weight", "modest_weight"), [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("seed", range(4))
def test_served_work_stays_by_weight_however_much_a_tenant_sends(
    seed: int, greedy_weight: float, modest_weight: float
) -> None:
    rng = random.Random(seed)
    ring = Ring()
    largest_ms = 450.0
    weights = {"greedy": greedy_weight, "modest": modest_weight}
    ring.add("greedy", *[rng.uniform(1, largest_ms) for _ in range(4000)], weight=greedy_weight)
    # The greedy tenant is in the middle of a turn when the modest one comes.
    ring.serve(1 + seed)
    ring.add("modest", *[rng.uniform(1, largest_ms) for _ in range(40)], weight=modest_weight)
    served = {"greedy": 0.0, "modest": 0.0}
    left = 40
    while left > 1:
        item = ring.next()
        assert item is not None
        served[item.value] += item.cost_ms / weights[item.value]
        left -= item.value == "modest"
        ahead_ms = served["greedy"] - served["modest"]
        assert abs(ahead_ms) <= QUANTUM_MS + largest_ms / min(weights.values())
    assert served["greedy"] > 0
