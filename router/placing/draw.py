"""Which workers a placement looks at: all of a few; of many, some.

Above SCAN_ALL workers of a role NUM_SAMPLED random ones that can take the prompt are looked at, and those
that have most of it cached: the choice among a few random ones is nearly as even as among all (Mitzenmacher,
"The power of two choices in randomized load balancing"), at a cost that does not grow with the fleet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from router.placing.places import WorkerView

SCAN_ALL = 8
NUM_SAMPLED = 4
# Of those that have most cached, so many are looked at as well.
NUM_HOLDERS = 2
# Reasons kept of a decision, for whoever asks why.
NUM_KEPT = 6

_WorkerT = TypeVar("_WorkerT", bound=WorkerView)


class Draw:
    """Draws the workers to look at: all that are able of a few; of many, some.

    now: for breakers.  excluded: takes name and reason of some that are not able.
    trusts_all: whether breakers are ignored.
    """

    def __init__(
        self, rng: random.Random, now: float, excluded: list[tuple[str, str]], *, trusts_all: bool
    ) -> None:
        self._rng = rng
        self._now = now
        self._excluded = excluded
        self._trusts_all = trusts_all

    def able(
        self, workers: Sequence[_WorkerT], has: Mapping[int, int], objection: Callable[[_WorkerT], str]
    ) -> list[_WorkerT]:
        """Those that can take it; where no breaker lets an attempt pass, breakers are ignored.

        has: leading tokens of the prompt by worker; those with most are always looked at.
        """
        found, are_any_trusted = self._look(workers, has, objection, trusts_all=self._trusts_all)
        if not found and not are_any_trusted:
            found, _ = self._look(workers, has, objection, trusts_all=True)
        return found

    def _look(
        self,
        workers: Sequence[_WorkerT],
        has: Mapping[int, int],
        objection: Callable[[_WorkerT], str],
        *,
        trusts_all: bool,
    ) -> tuple[list[_WorkerT], bool]:
        """The able ones, and whether any was trusted."""
        is_small, are_any_trusted = len(workers) <= SCAN_ALL, False
        found: dict[int, _WorkerT] = {}
        for worker in workers if is_small else self._in_order(workers, has):
            if not is_small and len(found) >= NUM_SAMPLED:
                break
            is_trusted = trusts_all or worker.is_trusted(self._now)
            are_any_trusted = are_any_trusted or is_trusted
            why = objection(worker) if is_trusted else "failed too often lately"
            if not why:
                found[worker.incarnation] = worker
            elif len(self._excluded) < NUM_KEPT:
                self._excluded.append((worker.name, why))
        return list(found.values()), are_any_trusted

    def _in_order(self, workers: Sequence[_WorkerT], has: Mapping[int, int]) -> Iterator[_WorkerT]:
        """Those that have most of the prompt, then all others at random, drawn one by one."""
        first: list[_WorkerT] = []
        if has:
            tokens = [has.get(worker.incarnation, 0) for worker in workers]
            most = max(tokens)
            holders = [worker for worker, count in zip(workers, tokens, strict=True) if count == most > 0]
            first = holders if len(holders) <= NUM_HOLDERS else self._rng.sample(holders, NUM_HOLDERS)
            yield from first
        left = list(workers)
        for last in range(len(left) - 1, -1, -1):
            place = int(self._rng.random() * (last + 1))
            if left[place] not in first:
                yield left[place]
            left[place] = left[last]
