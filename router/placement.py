"""Which workers an attempt gets: a synchronous core over views of workers.

It minimises the predicted time to the first token among places that keep the gap between tokens within
its objective. In milliseconds, for a prefill worker p, a decode worker d and a prompt of which p has not
cached n tokens:

    score(p, d) = wait(p) + prefill(p, n) + tail(p, d) + itl(d) + late(d)
    score(d)    = wait(d) + prefill(d, n) + itl(d) + late(d) + harm(d)

wait: what is computed before it; the worker takes the shortest rest first, and a chunk of the oldest.
tail: the part of the transfer that no computation hides. itl: the gap between tokens at d with this request.
late: what itl is above its objective, times the tokens expected, so that it decides only where no place keeps
the objective. harm, of a prompt that d computes itself: what its chunks take from each answer that d is
generating.

Both roles are looked at apart, as nothing but the tail depends on both, and the best few of each together.
Above SCAN_ALL workers of a role only NUM_SAMPLED random ones are looked at and those that have most of the
prompt cached: the choice among a few random ones is nearly as even as among all (Mitzenmacher, "The power of
two choices in randomized load balancing"), at a cost that does not grow with the fleet.

Predictions are not exact: scores within NEAR of the best are equal. Of equal ones the nearest to those that
own the prompt's length bucket is taken (router/affinity.py), so that prompts of one length meet, and then
whoever was chosen least recently, so that equal requests spread evenly.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from router.places import Ask, Candidate, Costs, Decision, DecodeT, PrefillT, WorkerView

SCAN_ALL = 16
NUM_SAMPLED = 8
# Of those that have most cached, so many are looked at as well.
NUM_HOLDERS = 2
# Of each role, so many are combined.
NUM_FINALISTS = 3
# Kept of a decision, for whoever asks why.
NUM_KEPT = 6
# A decode worker computes a prompt itself only if that is better by this share: predictions are not exact.
LOCAL_MARGIN = 0.1
# Scores differ if by more than this share of the best one and this many milliseconds.
NEAR, NEAR_MS = 0.02, 1.0


_WorkerT = TypeVar("_WorkerT", bound=WorkerView)


class Placement(Generic[PrefillT, DecodeT]):
    """The rule, with what it remembers: whose turn it is.

    costs: the predictions.  distance: of a prefill worker to a bucket, in buckets.
    mode: "disaggregated": prefill workers compute all prompts; "colocated": decode workers do; "auto": a
        decode worker computes a rest of at most local_max_tokens where that is predicted to be better and
        keeps the objective, and any prompt where no prefill worker can reach it.
    itl_objective_ms: gap between tokens to keep to.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        rng: random.Random,
        mode: str = "auto",
        itl_objective_ms: float = 150.0,
        local_max_tokens: int = 256,
        distance: Callable[[int, int], int] = lambda _bucket, _worker: 0,
    ) -> None:
        self.mode = mode
        self._costs = costs
        self._rng = rng
        self._itl_objective_ms = itl_objective_ms
        self._local_max_tokens = local_max_tokens
        self._distance = distance
        self._turns: dict[int, float] = {}
        self._next_turn = itertools.count(1)

    def choose(
        self, ask: Ask, prefills: Sequence[PrefillT], decodes: Sequence[DecodeT], now: float
    ) -> Decision[PrefillT, DecodeT] | None:
        """The best place for an attempt now, or None if no worker can take it.

        prefills, decodes: those that take requests. Nothing is taken; call taken() for the place taken.
        """
        excluded: list[tuple[str, str]] = []
        is_last_resort = not _reached(prefills, decodes)
        prefills, decodes = _trusted(prefills, decodes, now)
        able = self._able(decodes, lambda d: d.objection(ask.reserve_tokens, ask.expected_tokens), excluded)
        if not able:
            return None
        candidates = [] if self.mode == "colocated" else self._remote(ask, prefills, able, now, excluded)
        if self.mode != "disaggregated":
            candidates += self._local(ask, able, is_last_resort=is_last_resort)
        if not candidates:
            return None
        best_ms = min(candidate.score_ms for candidate in candidates)
        ranked = sorted(candidates, key=lambda candidate: self._rank(ask, candidate, best_ms))
        chosen = ranked[0]
        best_remote = next((c for c in ranked if c.prefill is not None), None)
        if chosen.prefill is None and best_remote is not None and not _is_clearly_better(chosen, best_remote):
            chosen = best_remote
        others = [candidate for candidate in ranked if candidate is not chosen]
        return Decision(
            chosen=chosen,
            others=tuple(others[: NUM_KEPT - 1]),
            excluded=tuple(excluded[:NUM_KEPT]),
            num_candidates=len(prefills) * len(decodes) + (self.mode != "disaggregated") * len(decodes),
        )

    def soonest_ms(
        self, ask: Ask, prefills: Sequence[PrefillT], decodes: Sequence[DecodeT], now: float
    ) -> float:
        """Predicted time to the first token where it is shortest, whether or not that place takes one now."""
        if self.mode == "colocated" or not prefills:
            return min((c.ttft_ms for c in self._local(ask, decodes, is_last_resort=True)), default=0.0)
        computing = [self._computing(ask, prefill, now) for prefill in self._sample(prefills, ask.cached)]
        return min(c.wait_ms + c.prefill_ms for c in computing)

    def taken(self, candidate: Candidate[PrefillT, DecodeT]) -> None:
        """That place was taken: its workers go to the end of the line of equals."""
        turn = next(self._next_turn)
        for worker in (candidate.prefill, candidate.decode):
            if worker is not None:
                self._turns[worker.incarnation] = turn

    def forget(self, incarnation: int) -> None:
        """That worker is gone."""
        self._turns.pop(incarnation, None)

    def _able(
        self,
        workers: Sequence[_WorkerT],
        objection: Callable[[_WorkerT], str],
        excluded: list[tuple[str, str]],
    ) -> list[_WorkerT]:
        able = []
        for worker in workers:
            why = objection(worker)
            if not why:
                able.append(worker)
            elif len(excluded) < NUM_KEPT:
                excluded.append((worker.name, why))
        return able

    def _remote(
        self,
        ask: Ask,
        prefills: Sequence[PrefillT],
        decodes: Sequence[DecodeT],
        now: float,
        excluded: list[tuple[str, str]],
    ) -> list[Candidate[PrefillT, DecodeT]]:
        """Places with a prefill worker."""

        def objection(prefill: PrefillT) -> str:
            uncached = ask.num_tokens - ask.cached.get(prefill.incarnation, 0)
            return prefill.objection(ask.num_tokens, uncached, ask.seniority)

        able = self._able(prefills, objection, excluded)
        computing = [self._computing(ask, prefill, now) for prefill in self._sample(able, ask.cached)]
        decoding = [self._decoding(ask, decode) for decode in self._sample(decodes, ask.held)]
        found = self._pairs(ask, self._finalists(ask, computing), self._finalists(ask, decoding))
        # Where not everybody reaches everybody, the best few of each may not reach each other.
        return found or self._pairs(
            ask,
            [self._computing(ask, prefill, now) for prefill in able],
            [self._decoding(ask, decode) for decode in decodes],
        )

    def _pairs(
        self, ask: Ask, computing: Sequence[_Computing[PrefillT]], decoding: Sequence[_Decoding[DecodeT]]
    ) -> list[Candidate[PrefillT, DecodeT]]:
        return [
            self._pair(ask, c, d)
            for c in computing
            for d in decoding
            if c.worker.can_reach(d.worker.incarnation)
        ]

    def _pair(self, ask: Ask, c: _Computing[PrefillT], d: _Decoding[DecodeT]) -> Candidate[PrefillT, DecodeT]:
        prefill, decode = c.worker, d.worker
        held = ask.held.get(decode.incarnation, 0)
        tail_ms = self._costs.transfer_ms(
            prefill.incarnation, decode.incarnation, max(0, ask.num_tokens - held)
        )
        return Candidate(
            prefill=prefill,
            decode=decode,
            num_cached_tokens=ask.cached.get(prefill.incarnation, 0),
            num_held_tokens=held,
            wait_ms=c.wait_ms,
            prefill_ms=c.prefill_ms,
            transfer_ms=tail_ms,
            itl_ms=d.itl_ms,
            score_ms=c.score_ms + d.score_ms + tail_ms,
            num_avoided=(prefill.incarnation in ask.avoid) + (decode.incarnation in ask.avoid),
        )

    def _computing(self, ask: Ask, prefill: PrefillT, now: float) -> _Computing[PrefillT]:
        worker = prefill.incarnation
        cached = ask.cached.get(worker, 0)
        uncached = ask.num_tokens - cached
        wait_ms = prefill.work_ahead_ms(uncached, now)
        if prefill.num_foreign_tokens:
            # Of others' prompts the lengths are not known: half of them go first.
            wait_ms += 0.5 * self._costs.prefill_ms(worker, prefill.num_foreign_tokens, 0)
        prefill_ms = self._costs.prefill_ms(worker, uncached, cached)
        return _Computing(prefill, wait_ms, prefill_ms, wait_ms + prefill_ms)

    def _decoding(self, ask: Ask, decode: DecodeT) -> _Decoding[DecodeT]:
        beside = decode.num_decoding
        context = decode.num_context_tokens + ask.num_tokens
        prompt = decode.mixed_tokens if decode.num_backlog_tokens else 0
        itl_ms = self._costs.step_ms(decode.incarnation, beside + 1, context, prompt)
        return _Decoding(decode, itl_ms, itl_ms + self._late_ms(ask, itl_ms, beside + 1, decode.max_running))

    def _late_ms(self, ask: Ask, itl_ms: float, num_running: int, max_running: int) -> float:
        """What a place is worse by because it breaks the objective, or has no seat in its batch."""
        late_ms = max(0.0, itl_ms - self._itl_objective_ms) * ask.num_new_tokens
        if max_running and num_running > max_running:
            # Somebody's whole answer must end first, on average after half of it.
            late_ms += 0.5 * itl_ms * ask.num_new_tokens * (num_running - max_running)
        return late_ms

    def _local(
        self, ask: Ask, decodes: Sequence[DecodeT], *, is_last_resort: bool
    ) -> list[Candidate[PrefillT, DecodeT]]:
        """Places where the decode worker computes the prompt itself."""
        is_free = self.mode == "colocated" or is_last_resort
        found = []
        for decode in self._sample(decodes, ask.held):
            # The last token is always computed: its logits are wanted.
            held = min(ask.held.get(decode.incarnation, 0), ask.num_tokens - 1)
            rest = ask.num_tokens - held
            if is_free or rest <= self._local_max_tokens:
                candidate, step_ms = self._alone(ask, decode, held, rest)
                if is_free or step_ms <= self._itl_objective_ms:
                    found.append(candidate)
        return found

    def _alone(
        self, ask: Ask, decode: DecodeT, held: int, rest: int
    ) -> tuple[Candidate[PrefillT, DecodeT], float]:
        """A place at a decode worker alone, and the time of a step that computes a chunk of the prompt."""
        beside, context = decode.num_decoding, decode.num_context_tokens
        most = min(decode.chunk_tokens, decode.mixed_tokens) if beside else decode.chunk_tokens
        chunk = max(1, min(rest, most))
        step_ms = self._costs.step_ms(decode.incarnation, beside, context, chunk)
        num_steps = -(-rest // chunk)
        wait_ms = step_ms * (decode.num_backlog_tokens / most if most else 0.0)
        plain_ms = self._costs.step_ms(decode.incarnation, beside, context) if beside else 0.0
        harm_ms = beside * num_steps * max(0.0, step_ms - plain_ms)
        d = self._decoding(ask, decode)
        candidate: Candidate[PrefillT, DecodeT] = Candidate(
            prefill=None,
            decode=decode,
            num_cached_tokens=held,
            num_held_tokens=held,
            wait_ms=wait_ms,
            prefill_ms=num_steps * step_ms,
            transfer_ms=0.0,
            itl_ms=d.itl_ms,
            score_ms=wait_ms + num_steps * step_ms + harm_ms + d.score_ms,
            num_avoided=decode.incarnation in ask.avoid,
        )
        return candidate, step_ms

    def _sample(self, workers: Sequence[_WorkerT], has: Mapping[int, int]) -> Sequence[_WorkerT]:
        """The workers to look at: all of a few; of many, random ones and those that have most cached."""
        if len(workers) <= SCAN_ALL:
            return workers
        sampled = {worker.incarnation: worker for worker in self._rng.sample(list(workers), NUM_SAMPLED)}
        if has:
            holders = [worker for worker in workers if worker.incarnation in has]
            best = heapq.nlargest(NUM_HOLDERS, holders, key=lambda worker: has[worker.incarnation])
            sampled |= {worker.incarnation: worker for worker in best}
        return list(sampled.values())

    def _finalists(self, ask: Ask, apart: Sequence[_ApartT]) -> Sequence[_ApartT]:
        """The best few of one role."""
        if len(apart) <= NUM_FINALISTS:
            return apart
        best_ms = min(one.score_ms for one in apart)

        def rank(one: _ApartT) -> tuple[bool, float, int, float]:
            worker = one.worker.incarnation
            distance = self._distance(ask.bucket, worker) if isinstance(one, _Computing) else 0
            return worker in ask.avoid, _blurred(one.score_ms, best_ms), distance, self._turn(worker)

        return heapq.nsmallest(NUM_FINALISTS, apart, key=rank)

    def _rank(
        self, ask: Ask, candidate: Candidate[PrefillT, DecodeT], best_ms: float
    ) -> tuple[int, float, int, float, float]:
        prefill, decode = candidate.prefill, candidate.decode
        return (
            candidate.num_avoided,
            _blurred(candidate.score_ms, best_ms),
            0 if prefill is None else self._distance(ask.bucket, prefill.incarnation),
            0.0 if prefill is None else self._turn(prefill.incarnation),
            self._turn(decode.incarnation),
        )

    def _turn(self, incarnation: int) -> float:
        """When the worker was last chosen; below 0, and random, if never: routers begin at different ones."""
        turn = self._turns.get(incarnation)
        if turn is None:
            turn = self._turns[incarnation] = -self._rng.random()
        return turn


@dataclass(frozen=True, slots=True)
class _Computing(Generic[PrefillT]):
    worker: PrefillT
    wait_ms: float
    prefill_ms: float
    score_ms: float


@dataclass(frozen=True, slots=True)
class _Decoding(Generic[DecodeT]):
    worker: DecodeT
    itl_ms: float
    score_ms: float


_ApartT = TypeVar("_ApartT", bound=_Computing[Any] | _Decoding[Any])


def _blurred(score_ms: float, best_ms: float) -> float:
    """The score, or one and the same for all that are as good as the best."""
    return max(score_ms, best_ms * (1 + NEAR) + NEAR_MS)


def _trusted(
    prefills: Sequence[PrefillT], decodes: Sequence[DecodeT], now: float
) -> tuple[Sequence[PrefillT], Sequence[DecodeT]]:
    """Those whose breaker lets an attempt pass; all where that leaves nobody who reaches anybody."""
    trusted_prefills = [worker for worker in prefills if worker.is_trusted(now)] or prefills
    trusted_decodes = [worker for worker in decodes if worker.is_trusted(now)] or decodes
    if prefills and not _reached(trusted_prefills, trusted_decodes):
        return prefills, decodes
    return trusted_prefills, trusted_decodes


def _reached(prefills: Iterable[PrefillT], decodes: Sequence[DecodeT]) -> bool:
    """Whether any prefill worker reaches any of these decode workers."""
    return any(prefill.can_reach(decode.incarnation) for prefill in prefills for decode in decodes)


def _is_clearly_better(local: Candidate[PrefillT, DecodeT], remote: Candidate[PrefillT, DecodeT]) -> bool:
    if local.num_avoided != remote.num_avoided:
        return local.num_avoided < remote.num_avoided
    return local.score_ms < (1 - LOCAL_MARGIN) * remote.score_ms
