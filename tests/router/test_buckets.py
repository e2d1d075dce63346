"""The router's queue: its order, its bound, and that nothing is lost or served twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import Overloaded
from router.buckets import BucketQueue, Waiting

EDGES = (128, 256, 512)


def make_queue(max_items: int = 100, max_skip_s: float = 5.0) -> BucketQueue[str]:
    return BucketQueue(EDGES, max_items=max_items, max_skip_s=max_skip_s)


def anything(item: Waiting[str]) -> bool:
    return True


def pop_all(queue: BucketQueue[str], now: float = 0.0) -> list[str]:
    values = []
    while (item := queue.pop(anything, now)) is not None:
        values.append(item.value)
    return values


@pytest.mark.parametrize(
    ("num_tokens", "bucket"),
    [(1, 0), (127, 0), (128, 1), (255, 1), (256, 2), (511, 2), (512, 3), (100_000, 3)],
)
def test_an_edge_belongs_to_the_longer_bucket(num_tokens: int, bucket: int) -> None:
    queue = make_queue()
    queue.push("a", num_tokens, 0.0)
    assert queue.bucket(num_tokens) == bucket
    assert [queue.num_waiting(index) for index in range(4)].index(1) == bucket
    assert queue.num_waiting_tokens(bucket) == num_tokens


def test_labels_name_the_tokens_of_each_bucket() -> None:
    assert make_queue().labels == ["<128", "128-255", "256-511", ">=512"]


def test_shorter_buckets_come_first_and_each_is_first_come_first_served() -> None:
    queue = make_queue()
    for value, num_tokens, at in [("long", 600, 0.0), ("s1", 10, 1.0), ("mid", 200, 2.0), ("s2", 5, 3.0)]:
        queue.push(value, num_tokens, at)
    assert pop_all(queue, now=4.0) == ["s1", "s2", "mid", "long"]
    assert queue.num_dispatched == [2, 1, 0, 1]


def test_a_longer_bucket_is_served_while_the_shorter_ones_do_not_fit() -> None:
    queue = make_queue()
    queue.push("short", 10, 0.0)
    queue.push("long", 600, 1.0)
    item = queue.pop(lambda item: item.value == "long", 2.0)
    assert item is not None
    assert item.value == "long"
    assert len(queue) == 1


def test_only_heads_of_lines_are_asked() -> None:
    queue = make_queue()
    queue.push("head", 10, 0.0)
    queue.push("next", 10, 1.0)
    asked: list[str] = []
    assert queue.pop(lambda item: asked.append(item.value) or False, 2.0) is None  # type: ignore[func-returns-value]
    assert asked == ["head"]


def test_an_overdue_item_is_served_before_anything_younger() -> None:
    queue = make_queue(max_skip_s=5.0)
    queue.push("long", 600, 0.0)
    queue.push("short", 10, 1.0)
    assert queue.pop(anything, 5.0).value == "long"  # type: ignore[union-attr]


def test_while_an_overdue_item_does_not_fit_nothing_younger_is_served() -> None:
    queue = make_queue(max_skip_s=5.0)
    queue.push("long", 600, 0.0)
    queue.push("short", 10, 1.0)
    only_short = lambda item: item.num_tokens < 100  # noqa: E731
    assert queue.pop(only_short, 4.9).value == "short"  # type: ignore[union-attr]
    queue.push("short", 10, 1.0)
    assert queue.pop(only_short, 5.0) is None
    assert len(queue) == 2


def test_of_several_overdue_items_the_oldest_goes_first() -> None:
    queue = make_queue(max_skip_s=5.0)
    queue.push("second", 10, 1.0)
    queue.push("first", 600, 0.5)
    assert pop_all(queue, now=100.0) == ["first", "second"]


def test_the_bound_counts_all_buckets_and_names_a_time_to_come_back() -> None:
    queue = make_queue(max_items=2)
    queue.push("a", 10, 1.0)
    queue.push("b", 600, 2.0)
    with pytest.raises(Overloaded) as refusal:
        queue.push("c", 10, 4.0)
    # The oldest has waited 3 s for the queue to move.
    assert refusal.value.retry_after_s == 3.0
    assert len(queue) == 2


@pytest.mark.parametrize(("waited_s", "hint_s"), [(0.0, 0.1), (0.05, 0.1), (500.0, 10.0)])
def test_the_retry_hint_stays_within_limits(waited_s: float, hint_s: float) -> None:
    queue = make_queue(max_items=1)
    queue.push("a", 10, 0.0)
    with pytest.raises(Overloaded) as refusal:
        queue.push("b", 10, waited_s)
    assert refusal.value.retry_after_s == hint_s


def test_a_request_that_comes_back_is_never_refused_and_takes_its_old_place() -> None:
    queue = make_queue(max_items=2)
    queue.push("a", 10, 1.0)
    queue.push("c", 10, 3.0)
    queue.push("b", 10, 2.0, is_new=False)
    assert pop_all(queue, now=3.0) == ["a", "b", "c"]


def test_equal_arrival_times_keep_the_order_of_pushes() -> None:
    queue = make_queue()
    for value in "abc":
        queue.push(value, 10, 1.0)
    assert pop_all(queue, now=1.0) == ["a", "b", "c"]


def test_removal_takes_an_item_once() -> None:
    queue = make_queue()
    item = queue.push("a", 10, 0.0)
    queue.push("b", 10, 1.0)
    assert queue.remove(item)
    assert not queue.remove(item)
    assert pop_all(queue) == ["b"]


def test_drain_takes_everything() -> None:
    queue = make_queue()
    queue.push("a", 10, 0.0)
    queue.push("b", 600, 1.0)
    assert [item.value for item in queue.drain()] == ["a", "b"]
    assert len(queue) == 0
    assert queue.pop(anything, 9.0) is None


ARRIVALS = st.lists(st.tuples(st.integers(1, 700), st.floats(0, 20)), max_size=40)


@given(ARRIVALS, st.sets(st.integers(0, 39)), st.integers(1, 700), st.floats(0, 40))
def test_nothing_is_lost_or_duplicated(
    arrivals: list[tuple[int, float]], removed: set[int], largest: int, now: float
) -> None:
    queue: BucketQueue[int] = BucketQueue(EDGES, max_items=100, max_skip_s=5.0)
    items = [queue.push(number, *arrival) for number, arrival in enumerate(arrivals)]
    taken = [number for number in removed if number < len(items) and queue.remove(items[number])]
    popped = []
    while (item := queue.pop(lambda item: item.num_tokens <= largest, now)) is not None:
        assert item.num_tokens <= largest
        popped.append(item.value)
    left = [item.value for item in queue.drain()]
    assert sorted(taken + popped + left) == list(range(len(items)))


@given(ARRIVALS)
def test_within_a_bucket_arrival_order_is_kept(arrivals: list[tuple[int, float]]) -> None:
    queue: BucketQueue[float] = BucketQueue(EDGES, max_items=100, max_skip_s=1e9)
    for num_tokens, at in arrivals:
        queue.push(at, num_tokens, at)
    served: dict[int, list[float]] = {}
    while (item := queue.pop(lambda _: True, 20.0)) is not None:
        served.setdefault(queue.bucket(item.num_tokens), []).append(item.value)
    assert all(times == sorted(times) for times in served.values())
    assert sum(map(len, served.values())) == len(arrivals)
