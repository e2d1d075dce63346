"""The router's queue: its order, its bound, who is shed, and what it says about the work that waits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from baton.errors import Overloaded
from baton.v1 import common_pb2
from router.queueing.buckets import BucketQueue, Waiting

EDGES = (128, 256, 512)
LOW, NORMAL, HIGH = common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH


def make_queue(
    max_items: int = 100,
    max_wait_s: float = 5.0,
    on_shed: Callable[[Waiting[str]], None] | None = None,
) -> BucketQueue[str]:
    return BucketQueue(EDGES, max_items=max_items, max_wait_s=max_wait_s, on_shed=on_shed)


def push(
    queue: BucketQueue[str],
    value: str,
    num_tokens: int = 10,
    *,
    at: float = 0.0,
    due: float = math.inf,
    cost_ms: float = 10.0,
    tenant: str = "",
    priority: int = NORMAL,
    is_new: bool = True,
) -> Waiting[str]:
    return queue.push(
        value,
        num_tokens,
        enqueued_at=at,
        deadline_at=due,
        cost_ms=cost_ms,
        tenant=tenant,
        priority=priority,
        is_new=is_new,
    )


def anything(item: Waiting[str]) -> bool:
    return True


def pop_all(queue: BucketQueue[str], now: float = 0.0) -> list[str]:
    values = []
    while (item := queue.pop(anything, now)) is not None:
        values.append(item.value)
    return values


# Buckets


@pytest.mark.parametrize(
    ("num_tokens", "bucket"),
    [(1, 0), (127, 0), (128, 1), (255, 1), (256, 2), (511, 2), (512, 3), (100_000, 3)],
)
def test_an_edge_belongs_to_the_longer_bucket(num_tokens: int, bucket: int) -> None:
    queue = make_queue()
    push(queue, "a", num_tokens)
    assert queue.bucket(num_tokens) == bucket
    assert [queue.num_waiting(index) for index in range(4)].index(1) == bucket
    assert queue.num_waiting_tokens(bucket) == num_tokens


def test_labels_name_the_tokens_of_each_bucket() -> None:
    assert make_queue().labels == ["<128", "128-255", "256-511", ">=512"]
    assert BucketQueue[str]((), max_items=1, max_wait_s=1.0).labels == ["any"]


def test_new_edges_deal_out_what_waits_and_keep_its_order() -> None:
    queue = make_queue()
    push(queue, "b", 100, due=2.0)
    push(queue, "a", 300, due=1.0)
    push(queue, "c", 400, due=3.0)
    queue.set_edges((200, 350))
    assert queue.labels == ["<200", "200-349", ">=350"]
    assert [queue.num_waiting(bucket) for bucket in range(3)] == [1, 1, 1]
    assert [queue.num_waiting_tokens(bucket) for bucket in range(3)] == [100, 300, 400]
    assert pop_all(queue) == ["a", "b", "c"]
    assert queue.num_dispatched == [1, 1, 1]


def test_counts_of_dispatched_items_stay_while_the_number_of_buckets_does() -> None:
    queue = make_queue()
    push(queue, "a", 10)
    pop_all(queue)
    queue.set_edges((5, 6, 7))
    assert queue.num_dispatched == [1, 0, 0, 0]
    queue.set_edges((5, 6))
    assert queue.num_dispatched == [0, 0, 0]


# Order


def test_the_earliest_deadline_is_first_whatever_the_bucket() -> None:
    queue = make_queue()
    for value, num_tokens, due in [("c", 10, 3.0), ("a", 600, 1.0), ("d", 200, 4.0), ("b", 20, 2.0)]:
        push(queue, value, num_tokens, due=due)
    assert pop_all(queue) == ["a", "b", "c", "d"]
    assert queue.num_dispatched == [2, 1, 0, 1]


def test_equal_deadlines_are_served_in_order_of_arrival() -> None:
    queue = make_queue()
    for value, at in [("b", 1.0), ("c", 1.0), ("a", 0.5), ("d", 1.0)]:
        push(queue, value, at=at, due=7.0)
    assert pop_all(queue) == ["a", "b", "c", "d"]


def test_another_bucket_is_served_while_the_earliest_deadline_does_not_fit() -> None:
    queue = make_queue()
    push(queue, "long", 600, due=1.0)
    push(queue, "short", 10, due=2.0)
    item = queue.pop(lambda item: item.num_tokens < 100, 0.0)
    assert item is not None
    assert item.value == "short"
    assert len(queue) == 1


def test_only_heads_are_asked_in_the_order_of_their_deadlines() -> None:
    queue = make_queue()
    push(queue, "next", 10, due=2.0)
    push(queue, "long", 600, due=3.0)
    push(queue, "head", 20, due=1.0)
    asked: list[str] = []
    assert queue.pop(lambda item: asked.append(item.value) or False, 0.0) is None  # type: ignore[func-returns-value]
    assert asked == ["head", "long"]


def test_priority_goes_before_deadline() -> None:
    queue = make_queue()
    push(queue, "low", due=1.0, priority=LOW)
    push(queue, "unspecified", due=3.0, priority=common_pb2.PRIORITY_UNSPECIFIED)
    push(queue, "normal", due=2.0, priority=NORMAL)
    push(queue, "high", due=9.0, priority=HIGH)
    assert pop_all(queue) == ["high", "normal", "unspecified", "low"]


def test_lower_priority_is_served_while_the_higher_does_not_fit() -> None:
    queue = make_queue()
    push(queue, "high", 600, priority=HIGH)
    push(queue, "low", 10, priority=LOW)
    assert queue.pop(lambda item: item.num_tokens < 100, 0.0).value == "low"  # type: ignore[union-attr]


def test_an_overdue_item_is_served_before_anything_else() -> None:
    queue = make_queue(max_wait_s=5.0)
    push(queue, "old", 600, at=0.0, priority=LOW)
    push(queue, "new", 10, at=1.0, due=2.0, priority=HIGH)
    assert queue.pop(anything, 4.9).value == "new"  # type: ignore[union-attr]
    push(queue, "new", 10, at=1.0, due=2.0, priority=HIGH)
    assert pop_all(queue, now=5.0) == ["old", "new"]


def test_while_an_overdue_item_does_not_fit_nothing_else_is_served() -> None:
    queue = make_queue(max_wait_s=5.0)
    push(queue, "long", 600, at=0.0)
    push(queue, "short", 10, at=1.0)
    only_short = lambda item: item.num_tokens < 100  # noqa: E731
    assert queue.pop(only_short, 4.9).value == "short"  # type: ignore[union-attr]
    push(queue, "short", 10, at=1.0)
    assert queue.pop(only_short, 5.0) is None
    assert len(queue) == 2


def test_of_several_overdue_items_the_oldest_goes_first() -> None:
    queue = make_queue(max_wait_s=5.0)
    push(queue, "second", 10, at=1.0, due=1.5)
    push(queue, "first", 600, at=0.5, due=9.0)
    assert pop_all(queue, now=100.0) == ["first", "second"]


def test_what_is_served_because_it_is_overdue_is_paid_for_from_the_tenants_turn() -> None:
    queue = make_queue(max_wait_s=5.0)
    push(queue, "a1", cost_ms=50.0, tenant="a")
    push(queue, "a3", cost_ms=50.0, tenant="a")
    push(queue, "b1", cost_ms=100.0, tenant="b")
    assert queue.pop(anything, 0.0).value == "a1"  # type: ignore[union-attr]
    push(queue, "a2", at=-10.0, cost_ms=50.0, tenant="a", is_new=False)
    # The other 50 ms of a's turn are gone with the overdue one.
    assert pop_all(queue, now=0.0) == ["a2", "b1", "a3"]


def test_an_item_that_never_fits_can_be_ended_by_the_one_who_is_asked() -> None:
    queue = make_queue(max_wait_s=5.0)
    push(queue, "never", 100_000, at=0.0)
    push(queue, "short", 10, at=1.0)
    ended: list[str] = []

    def fits(item: Waiting[str]) -> bool:
        if item.num_tokens == 100_000:
            ended.append(item.value)
        return True

    assert [item.value for item in iter(lambda: queue.pop(fits, 50.0), None)] == ["never", "short"]
    assert ended == ["never"]


# The bound on items


def test_the_bound_counts_all_buckets_and_names_a_time_to_come_back() -> None:
    queue = make_queue(max_items=2)
    push(queue, "a", 10, at=1.0)
    push(queue, "b", 600, at=2.0)
    with pytest.raises(Overloaded) as refusal:
        push(queue, "c", at=4.0)
    # Nothing was served yet; the oldest has waited 3 s for it.
    assert refusal.value.retry_after_s == 3.0
    assert len(queue) == 2


@pytest.mark.parametrize(("waited_s", "hint_s"), [(0.0, 0.1), (0.05, 0.1), (500.0, 10.0)])
def test_the_retry_hint_stays_within_limits(waited_s: float, hint_s: float) -> None:
    queue = make_queue(max_items=1)
    push(queue, "a")
    with pytest.raises(Overloaded) as refusal:
        push(queue, "b", at=waited_s)
    assert refusal.value.retry_after_s == hint_s


def test_the_retry_hint_is_the_waiting_work_at_the_pace_of_service() -> None:
    queue = make_queue(max_items=1)
    push(queue, "served", cost_ms=1000.0, at=10.0)
    assert pop_all(queue, now=10.0) == ["served"]
    push(queue, "waits", cost_ms=200.0, at=10.0)
    with pytest.raises(Overloaded) as refusal:
        push(queue, "refused", at=10.0)
    # A sum of 1000 ms with a half-life of 5 s stands for 1000 * ln 2 / 5 = 138.6 ms per s.
    assert refusal.value.retry_after_s == pytest.approx(200 / (1000 * math.log(2) / 5))


def test_a_request_that_comes_back_is_never_refused_and_takes_its_old_place() -> None:
    queue = make_queue(max_items=2)
    push(queue, "a", at=1.0, due=11.0)
    push(queue, "c", at=3.0, due=13.0)
    push(queue, "b", at=2.0, due=12.0, is_new=False)
    assert pop_all(queue, now=3.0) == ["a", "b", "c"]


def test_at_an_equal_deadline_a_request_that_comes_back_keeps_its_place_by_arrival() -> None:
    queue = make_queue()
    push(queue, "c", at=3.0)
    push(queue, "b", at=2.0, is_new=False)
    assert pop_all(queue, now=3.0) == ["b", "c"]


# Shedding


def test_the_youngest_of_the_lowest_priority_gives_way() -> None:
    shed: list[str] = []
    queue = make_queue(max_items=4, on_shed=lambda item: shed.append(item.value))
    push(queue, "low old", 10, at=1.0, priority=LOW)
    push(queue, "low young", 600, at=2.0, tenant="x", priority=LOW)
    push(queue, "normal", at=3.0)
    push(queue, "high", at=4.0, priority=HIGH)
    push(queue, "n1", at=5.0)
    assert shed == ["low young"]
    push(queue, "h1", at=5.0, priority=HIGH)
    assert shed == ["low young", "low old"]
    with pytest.raises(Overloaded):
        push(queue, "n2", at=6.0)
    push(queue, "h2", at=6.0, priority=HIGH)
    assert shed == ["low young", "low old", "n1"]
    assert pop_all(queue, now=4.0) == ["high", "h1", "h2", "normal"]


def test_equals_are_not_shed_and_low_ones_are_refused() -> None:
    queue = make_queue(max_items=1, on_shed=lambda item: pytest.fail(f"{item.value} was shed"))
    push(queue, "high", priority=HIGH)
    for priority in (LOW, NORMAL, HIGH):
        with pytest.raises(Overloaded):
            push(queue, "late", priority=priority)


def test_what_was_placed_before_is_not_shed() -> None:
    shed: list[str] = []
    # What comes back, and the further answers to a prompt, come on top of the bound.
    queue = make_queue(max_items=1, on_shed=lambda item: shed.append(item.value))
    push(queue, "came back", at=9.0, priority=LOW, is_new=False)
    push(queue, "normal", at=1.0)
    push(queue, "high", at=9.0, priority=HIGH)
    assert shed == ["normal"]
    with pytest.raises(Overloaded):
        push(queue, "normal again", at=9.0)


def test_nobody_is_shed_without_somebody_to_tell() -> None:
    queue = make_queue(max_items=1)
    push(queue, "low", priority=LOW)
    with pytest.raises(Overloaded):
        push(queue, "high", priority=HIGH)
    assert pop_all(queue) == ["low"]


def test_the_newcomer_has_its_place_when_the_shed_one_is_told() -> None:
    seen: list[tuple[int, bool]] = []
    queue = make_queue(max_items=1, on_shed=lambda item: seen.append((len(queue), queue.remove(item))))
    push(queue, "low", priority=LOW)
    push(queue, "high", priority=HIGH)
    assert seen == [(1, False)]


# Taking out


def test_removal_takes_an_item_once() -> None:
    queue = make_queue()
    item = push(queue, "a")
    push(queue, "b", at=1.0)
    assert queue.remove(item)
    assert not queue.remove(item)
    assert pop_all(queue) == ["b"]


def test_an_item_of_another_queue_is_not_removed() -> None:
    queue, other = make_queue(), make_queue()
    push(queue, "mine")
    assert not queue.remove(push(other, "mine"))
    assert pop_all(queue) == ["mine"]


def test_drain_takes_everything_the_oldest_first() -> None:
    queue = make_queue()
    push(queue, "b", 10, at=2.0, due=1.0)
    push(queue, "a", 600, at=1.0, due=9.0, priority=LOW)
    assert [item.value for item in queue.drain()] == ["a", "b"]
    assert len(queue) == 0
    assert queue.pop(anything, 9.0) is None


# The work ahead


def test_work_ahead_is_what_is_due_earlier_and_of_higher_priority() -> None:
    queue = make_queue()
    assert queue.work_ahead_ms(1.0, NORMAL, "") == 0.0
    push(queue, "high", due=9.0, cost_ms=1000.0, priority=HIGH)
    push(queue, "earlier", 10, due=1.0, cost_ms=100.0)
    push(queue, "equal", 600, due=2.0, cost_ms=10.0)
    push(queue, "later", due=3.0, cost_ms=1.0)
    push(queue, "low", due=0.0, cost_ms=0.1, priority=LOW)
    assert queue.work_ahead_ms(2.0, HIGH, "") == 0.0
    assert queue.work_ahead_ms(2.0, NORMAL, "") == pytest.approx(1110.0)
    assert queue.work_ahead_ms(2.0, common_pb2.PRIORITY_UNSPECIFIED, "") == pytest.approx(1110.0)
    assert queue.work_ahead_ms(2.0, LOW, "") == pytest.approx(1111.1)


def test_work_ahead_takes_of_other_tenants_their_share_only() -> None:
    queue = make_queue()
    for _ in range(50):
        push(queue, "greedy", cost_ms=100.0, tenant="greedy")
    push(queue, "small", cost_ms=30.0, tenant="small")
    # A tenant that does not wait: the greedy one has one turn of 100 ms before it, the small one all it has.
    assert queue.work_ahead_ms(1.0, NORMAL, "new") == pytest.approx(130.0)
    # While the 200 ms of its own are served, the greedy one gets as much, and a turn.
    for _ in range(2):
        push(queue, "own", due=1.0, cost_ms=100.0, tenant="new")
    assert queue.work_ahead_ms(1.0, NORMAL, "new") == pytest.approx(200.0 + 300.0 + 30.0)
    # All the own work of the greedy tenant, and little of the others, since they have little.
    assert queue.work_ahead_ms(math.inf, NORMAL, "greedy") == pytest.approx(5000.0 + 200.0 + 30.0)


def test_work_ahead_of_a_heavier_tenant_is_less() -> None:
    queue = make_queue()
    for tenant in ("a", "b"):
        for _ in range(10):
            queue.push(tenant, 10, enqueued_at=0.0, deadline_at=1.0, cost_ms=100.0, tenant=tenant, weight=1.0)
    queue.push("c", 10, enqueued_at=0.0, deadline_at=1.0, cost_ms=400.0, tenant="c", weight=4.0)
    # 400 ms of its own at weight 4 are worth 100 ms of a's and b's, and a turn of 100 ms each.
    assert queue.work_ahead_ms(1.0, NORMAL, "c") == pytest.approx(400.0 + 200.0 + 200.0)
