"""Which prefill workers a length bucket prefers, so that short prompts are packed with short ones.

A synchronous core. Workers are dealt out to buckets in proportion to the work seen of late. It is a
preference: a bucket spills over to the workers of its neighbors (distance). Whether a worker has room is not
its affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from router.learning.decaying_sum import DecayingSum

# A smaller part of all work than this is none: a bucket that is hardly used any more claims no worker.
NEGLIGIBLE_SHARE = 0.001


class BucketAffinity:
    """The workers that each bucket owns.

    num_buckets: buckets, shortest first.
    half_life_s: how long ago work counts half, in seconds.
    redeal_s: how often the deal may change while the workers stay the same, in seconds.
    min_moved: the part of all work, 0 to 1, that must have moved between buckets for that.
    """

    def __init__(
        self, num_buckets: int, *, half_life_s: float = 60.0, redeal_s: float = 10.0, min_moved: float = 0.1
    ) -> None:
        self._redeal_s = redeal_s
        self._min_moved = min_moved
        self._work_ms = [DecayingSum(half_life_s) for _ in range(num_buckets)]
        # Per bucket its share of the work at the last deal; empty while every bucket owns all.
        self._shares: list[float] = []
        self._dealt: list[list[int]] = [[] for _ in range(num_buckets)]
        self._workers: tuple[int, ...] = ()
        self._owned: dict[int, list[int]] = {}
        self._looked_at = 0.0

    def observe(self, bucket: int, work_ms: float, now: float) -> None:
        """Work of that bucket, in predicted ms of prefill, came at `now`, in seconds."""
        self._work_ms[bucket].add(work_ms, now)

    def assign(self, workers: Sequence[int], now: float) -> None:
        """Deals the ready workers out, if that is due.

        workers: the incarnations of those that may be given work; all others own nothing from now on. The
            first deal goes by their order, shortest bucket first.
        When they change, and every redeal_s seconds when enough work has moved, they are dealt out anew, so
        that as few as possible change their bucket.
        """
        if set(workers) == set(self._workers):
            if now - self._looked_at < self._redeal_s:
                return
            self._looked_at = now
            shares = self._shares_now(now)
            if _moved(self._shares, shares) <= self._min_moved:
                return
        else:
            shares = self._shares_now(now)
        self._workers = tuple(workers)
        self._looked_at = now
        self._shares = shares
        self._deal()

    def distance(self, bucket: int, worker: int) -> int:
        """0 for a worker that the bucket owns, else how many buckets away the nearest is that does.

        It is the number of buckets for a worker that owns nothing.
        """
        near = (abs(bucket - owner) for owner in self._owned.get(worker, ()))
        return min(near, default=len(self._work_ms))

    def owners(self, bucket: int) -> list[int]:
        """The bucket's workers, in the order of the deal."""
        return [worker for worker, buckets in self._owned.items() if bucket in buckets]

    def _shares_now(self, now: float) -> list[float]:
        """Each bucket's part of the work; empty where there was none."""
        work_ms = [work.value(now) for work in self._work_ms]
        total_ms = sum(work_ms)
        if not total_ms:
            return []
        shares = [work / total_ms for work in work_ms]
        return [share if share >= NEGLIGIBLE_SHARE else 0.0 for share in shares]

    def _deal(self) -> None:
        if not self._shares:
            self._dealt = [[] for _ in self._work_ms]
            self._owned = {worker: list(range(len(self._work_ms))) for worker in self._workers}
            return
        counts = _counts(self._shares, len(self._workers))
        self._dealt = _keep(self._dealt, self._workers, counts)
        self._owned = {worker: [bucket] for bucket, dealt in enumerate(self._dealt) for worker in dealt}
        if self._workers:
            self._share_borders()

    def _share_borders(self) -> None:
        """Lets a bucket with work but no worker use the last one dealt before it, else the first of all."""
        line = [worker for dealt in self._dealt for worker in dealt]
        starts = accumulate(map(len, self._dealt), initial=0)
        for bucket, (start, dealt) in enumerate(zip(starts, self._dealt, strict=False)):
            if self._shares[bucket] > 0 and not dealt:
                self._owned[line[max(start - 1, 0)]].append(bucket)


def _moved(before: list[float], after: list[float]) -> float:
    """The part of all work that is in another bucket than before."""
    if not before or not after:
        return 0.0 if before == after else 1.0
    return sum(abs(a - b) for a, b in zip(before, after, strict=True)) / 2


def _counts(shares: list[float], num_workers: int) -> list[int]:
    """Workers per bucket by the largest remainder; at least one where there is work, if they suffice."""
    num_busy = sum(share > 0 for share in shares)
    counts = [int(share > 0 and num_workers >= num_busy) for share in shares]
    while sum(counts) < num_workers:
        # To the bucket that lacks most: that is whole workers first, then the largest remainders.
        lacks = [share * num_workers - count for share, count in zip(shares, counts, strict=True)]
        counts[lacks.index(max(lacks))] += 1
    return counts


def _keep(dealt: list[list[int]], workers: Sequence[int], counts: list[int]) -> list[list[int]]:
    """A deal with these counts in which as few workers as possible change their bucket.

    What a bucket has too many, and new workers, go to those that lack some, from the nearest bucket first.
    """
    ready = set(workers)
    kept = [
        [worker for worker in old if worker in ready][:count]
        for old, count in zip(dealt, counts, strict=True)
    ]
    settled = {worker for bucket in kept for worker in bucket}
    homes = {worker: bucket for bucket, old in enumerate(dealt) for worker in old}
    free = [worker for worker in workers if worker not in settled]
    for bucket, count in enumerate(counts):
        while len(kept[bucket]) < count:
            nearest = min(free, key=lambda worker: abs(homes.get(worker, bucket) - bucket))
            free.remove(nearest)
            kept[bucket].append(nearest)
    return kept
