"""Which workers a length bucket prefers: the deal by arithmetic, and how little of it changes."""

from __future__ import annotations

import random

import pytest

from router.placing.affinity import BucketAffinity


def make_affinity(*work_ms: float, workers: list[int], num_buckets: int = 4) -> BucketAffinity:
    """Four buckets with that much work seen, dealt at 0 s."""
    affinity = BucketAffinity(num_buckets, half_life_s=60.0, redeal_s=10.0, min_moved=0.1)
    for bucket, amount in enumerate(work_ms):
        if amount:
            affinity.observe(bucket, amount, 0.0)
    affinity.assign(workers, 0.0)
    return affinity


def owners(affinity: BucketAffinity, num_buckets: int = 4) -> list[list[int]]:
    return [sorted(affinity.owners(bucket)) for bucket in range(num_buckets)]


def test_before_any_work_was_seen_every_bucket_owns_all() -> None:
    affinity = make_affinity(workers=[7, 8])
    assert owners(affinity) == [[7, 8]] * 4
    assert [affinity.distance(bucket, 8) for bucket in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("work_ms", "num_workers", "expected"),
    [
        pytest.param((10, 10, 10, 10), 4, [[0], [1], [2], [3]], id="one each"),
        pytest.param((10, 20, 30, 40), 10, [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]], id="exact"),
        # Parts of 7: 1.75, 1.75, 1.75, 1.75: a whole one each, three of equal remainders for the shortest.
        pytest.param((10, 10, 10, 10), 7, [[0, 1], [2, 3], [4, 5], [6]], id="remainders"),
        # Parts of 6: 0.6, 0.6, 0.6, 4.2: at least one each, which leaves three for the longest.
        pytest.param((10, 10, 10, 70), 6, [[0], [1], [2], [3, 4, 5]], id="at least one"),
        pytest.param((30, 0, 0, 10), 4, [[0, 1, 2], [], [], [3]], id="buckets without work"),
        # Parts of 2: 0.9, 0.2, 0.9, 0: the second shares the border worker of the first.
        pytest.param((45, 10, 45, 0), 2, [[0], [0], [1], []], id="fewer workers than buckets"),
        # Parts of 2: 0.2, 0.9, 0.9: nothing is dealt before the first, so it shares with the next longer one.
        pytest.param((10, 45, 45, 0), 2, [[0], [0], [1], []], id="the shortest shares with the next"),
        pytest.param((1, 2, 3, 4), 1, [[0], [0], [0], [0]], id="one worker"),
        pytest.param((1, 2, 3, 4), 0, [[], [], [], []], id="no worker"),
        pytest.param((1e6, 1, 1e6, 0), 4, [[0, 1], [], [2, 3], []], id="next to no work"),
    ],
)
def test_workers_are_dealt_in_proportion_to_work(
    work_ms: tuple[float, ...], num_workers: int, expected: list[list[int]]
) -> None:
    assert owners(make_affinity(*work_ms, workers=list(range(num_workers)))) == expected


def test_the_first_deal_goes_by_the_order_given() -> None:
    assert make_affinity(1, 1, 1, 1, workers=[9, 3, 7, 5]).owners(0) == [9]
    assert make_affinity(1, 1, 1, 1, workers=[9, 3, 7, 5]).owners(3) == [5]


def test_distance_counts_buckets_to_the_nearest_that_owns_the_worker() -> None:
    affinity = make_affinity(45, 10, 45, 0, workers=[7, 8])
    # 7 belongs to buckets 0 and 1, 8 to bucket 2.
    assert [affinity.distance(bucket, 7) for bucket in range(4)] == [0, 0, 1, 2]
    assert [affinity.distance(bucket, 8) for bucket in range(4)] == [2, 1, 0, 1]


def test_a_worker_that_is_not_ready_owns_nothing_and_is_farther_than_any() -> None:
    affinity = make_affinity(1, 1, 1, 1, workers=[0, 1, 2, 3])
    affinity.assign([0, 1, 3], 0.1)
    assert affinity.distance(2, 2) == 4
    assert all(2 not in mine for mine in owners(affinity))
    assert affinity.distance(0, 99) == 4


def test_of_a_dead_workers_fellows_only_as_many_move_as_must() -> None:
    affinity = make_affinity(10, 10, 10, 10, workers=list(range(8)))
    assert owners(affinity) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    affinity.assign([0, 1, 3, 4, 5, 6, 7], 0.1)
    # 1.75 each: the shortest three have two. One moves, from the only bucket that has one too many.
    assert owners(affinity) == [[0, 1], [3, 6], [4, 5], [7]] or owners(affinity) == [
        [0, 1],
        [3, 7],
        [4, 5],
        [6],
    ]


def test_a_new_worker_goes_where_one_is_missing_whatever_its_number() -> None:
    affinity = make_affinity(10, 10, 10, 10, workers=[1, 2, 3, 4, 5, 6, 7])
    assert owners(affinity) == [[1, 2], [3, 4], [5, 6], [7]]
    affinity.assign([0, 1, 2, 3, 4, 5, 6, 7], 0.1)
    assert owners(affinity) == [[1, 2], [3, 4], [5, 6], [0, 7]]


def test_the_deal_stays_while_little_work_moves() -> None:
    affinity = make_affinity(50, 50, 0, 0, workers=list(range(4)))
    # Now 50 to 61: 5 % of all work has moved, though the counts would still be equal; then 50 to 200, 30 %.
    affinity.observe(1, 11.0, 0.0)
    affinity.assign(list(range(4)), 10.0)
    assert owners(affinity) == [[0, 1], [2, 3], [], []]
    affinity.observe(1, 139.0, 0.0)
    affinity.assign(list(range(4)), 19.9)
    assert owners(affinity) == [[0, 1], [2, 3], [], []], "it is not due yet"
    affinity.assign(list(range(4)), 20.0)
    assert owners(affinity) == [[0], [1, 2, 3], [], []]


def test_the_bound_on_moved_work_counts_from_the_last_deal() -> None:
    affinity = make_affinity(500, 500, 0, 0, workers=list(range(10)))
    # 8 % twice: shares of 0.5, 0.42, 0.34.
    affinity.observe(1, 500 / 0.42 - 1000, 0.0)
    affinity.assign(list(range(10)), 10.0)
    assert [len(mine) for mine in owners(affinity)] == [5, 5, 0, 0]
    affinity.observe(1, 500 / 0.34 - 500 / 0.42, 0.0)
    affinity.assign(list(range(10)), 20.0)
    # 3.4 and 6.6 of ten.
    assert [len(mine) for mine in owners(affinity)] == [3, 7, 0, 0]


def test_who_must_move_moves_to_the_nearest_bucket() -> None:
    affinity = make_affinity(100, 300, 300, 100, workers=list(range(8)))
    assert owners(affinity) == [[0], [1, 2, 3], [4, 5, 6], [7]]
    affinity.observe(0, 200.0, 0.0)
    affinity.observe(3, 200.0, 0.0)
    affinity.assign(list(reversed(range(8))), 10.0)
    assert owners(affinity) == [[0, 3], [1, 2], [4, 5], [6, 7]]


def test_a_deal_for_new_workers_puts_the_next_one_off() -> None:
    affinity = make_affinity(50, 50, 0, 0, workers=[0, 1, 2])
    affinity.assign([0, 1, 2, 3], 9.0)
    assert owners(affinity) == [[0, 1], [2, 3], [], []]
    affinity.observe(1, 1000.0, 9.0)
    affinity.assign([0, 1, 2, 3], 18.9)
    assert owners(affinity) == [[0, 1], [2, 3], [], []]
    affinity.assign([0, 1, 2, 3], 19.0)
    assert owners(affinity) == [[0], [1, 2, 3], [], []]


def test_the_order_of_the_same_workers_changes_nothing() -> None:
    affinity = make_affinity(10, 10, 10, 10, workers=[0, 1, 2, 3])
    affinity.assign([3, 2, 1, 0], 0.1)
    assert owners(affinity) == [[0], [1], [2], [3]]


def test_old_work_is_forgotten() -> None:
    affinity = make_affinity(1000, 0, 0, 0, workers=[0, 1])
    assert owners(affinity) == [[0, 1], [], [], []]
    # Ten half-lives later the thousand count as one.
    affinity.observe(3, 1000 / 1024, 600.0)
    affinity.assign([0, 1], 600.0)
    assert owners(affinity) == [[0], [], [], [1]]


def test_the_first_work_is_waited_for_until_a_deal_is_due() -> None:
    affinity = make_affinity(workers=[0, 1])
    affinity.observe(2, 1.0, 0.1)
    affinity.assign([0, 1], 0.2)
    assert owners(affinity) == [[0, 1]] * 4
    affinity.assign([0, 1], 10.0)
    assert owners(affinity) == [[], [], [0, 1], []]


@pytest.mark.parametrize("seed", range(10))
def test_all_workers_are_used_all_buckets_served_and_no_more_workers_moved_than_must(seed: int) -> None:
    rng = random.Random(seed)
    affinity = BucketAffinity(5, half_life_s=30.0, redeal_s=5.0, min_moved=0.1)
    workers = [rng.getrandbits(64) for _ in range(8)]
    now, old, num_moved = 0.0, [set[int]()] * 5, 0
    for _ in range(200):
        now += rng.uniform(0, 4)
        for bucket in range(5):
            affinity.observe(bucket, rng.choice([1, 10, 300]), now)
        joined = [rng.getrandbits(64)] if rng.random() < 0.1 else []
        left = rng.sample(workers, 1) if len(workers) > 5 and rng.random() < 0.1 else []
        workers = [worker for worker in workers if worker not in left] + joined
        affinity.assign(workers, now)
        new = [set(affinity.owners(bucket)) for bucket in range(5)]
        # There are at least as many workers as buckets: none is shared.
        assert sorted(worker for mine in new for worker in mine) == sorted(workers)
        assert all(new)
        survivors = [mine & set(workers) for mine in old]
        stayed = sum(len(before & after) for before, after in zip(survivors, new, strict=True))
        assert stayed == sum(min(len(b), len(a)) for b, a in zip(survivors, new, strict=True))
        num_moved += sum(map(len, survivors)) - stayed
        old = new
    assert num_moved > 0
