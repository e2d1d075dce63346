"""Which workers an attempt gets: a synchronous core over views of workers.

It minimises the predicted time to the first token among places that keep the gap between tokens within
its objective. In milliseconds, for a prefill worker p, a decode worker d and a prompt of which p has not
cached n tokens:

    score(p, d) = wait(p) + prefill(p, n) + tail(p, d) + itl(d) + late(d)
    score(d)    = wait(d) + prefill(d, n) + itl(d) + late(d) + harm(d)

wait: what is computed before it; the worker takes the shortest rest first, and a chunk of the oldest.
tail: the part of the transfer that no computation hides. itl: the gap between tokens at d with this request.
late: what itl is above its objective, times the tokens expected, so that it decides only where no place keeps
the objective. harm, of a prompt that d computes itself: what its chunks take from every answer that d is
generating, so that it gains more than any of them loses.

Both roles are looked at apart, as nothing but the tail depends on both, and the best few of each together. Of
many workers only some are looked at (router/placing/draw.py).

Predictions are not exact: scores within NEAR of the best are equal. Of equal ones the nearest to those that
own the prompt's length bucket is taken (router/placing/affinity.py), so that prompts of one length meet, and
then whoever was chosen least recently, so that equal requests spread evenly.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from router.placing.draw import NUM_KEPT, Draw
from router.placing.places import Ask, Candidate, Costs, Decision, DecodeT, PrefillT, WorkerView

# Of each role, so many are combined.
NUM_FINALISTS = 2
# A decode worker computes a prompt itself only if that is better by this share: predictions are not exact.
LOCAL_MARGIN = 0.1
# Scores differ if by more than this share of the best one and this many milliseconds.
NEAR, NEAR_MS = 0.02, 1.0


class Placement(Generic[PrefillT, DecodeT]):
    """The rule, with what it remembers: whose turn it is.

    costs: the predictions.  distance: of a prefill worker to a bucket, in buckets.
    mode: "disaggregated": prefill workers compute all prompts, a decode worker only what an answer grew to
        and none of them can hold; "colocated": decode workers compute all; "auto": a decode worker computes
        a rest of at most local_max_tokens where that is predicted to be better and keeps the objective, and
        any prompt that no prefill worker can hold and send.
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
        # Of its own, because drawing from the system's is slow.
        self._rng = random.Random(rng.getrandbits(64))
        self._itl_objective_ms = itl_objective_ms
        self._local_max_tokens = local_max_tokens
        self._distance = distance
        self._next_turn = itertools.count(1)

    def choose(
        self, ask: Ask, prefills: Sequence[PrefillT], decodes: Sequence[DecodeT], now: float
    ) -> Decision[PrefillT, DecodeT] | None:
        """The best place for an attempt now, or None if no worker can take it.

        prefills, decodes: those that take requests. Nothing is taken; call taken() for the place taken.
        """
        excluded: list[tuple[str, str]] = []
        candidates = self._candidates(ask, prefills, decodes, now, excluded)
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
            num_candidates=(len(prefills) + self._allows_local(ask, prefills)) * len(decodes),
        )

    def soonest_ms(
        self, ask: Ask, prefills: Sequence[PrefillT], decodes: Sequence[DecodeT], now: float
    ) -> float:
        """Predicted time to the first token where it is shortest, be it that nobody takes a prompt now."""
        if self.mode == "colocated" or not prefills:
            return min((c.ttft_ms for c in self._local(ask, decodes, [], is_last_resort=True)), default=0.0)
        drawn = Draw(self._rng, now, [], trusts_all=True).able(prefills, ask.cached, lambda _: "")
        computing = [self._computing(ask, prefill, now) for prefill in drawn]
        local = [] if self.mode != "auto" else self._local(ask, decodes, [], is_last_resort=False)
        return min(*(c.wait_ms + c.prefill_ms for c in computing), *(c.ttft_ms for c in local), float("inf"))

    def taken(self, candidate: Candidate[PrefillT, DecodeT]) -> None:
        """That place was taken: its workers go to the end of the line of equals."""
        turn = next(self._next_turn)
        if candidate.prefill is not None:
            candidate.prefill.turn = turn
        candidate.decode.turn = turn

    def _candidates(
        self,
        ask: Ask,
        prefills: Sequence[PrefillT],
        decodes: Sequence[DecodeT],
        now: float,
        excluded: list[tuple[str, str]],
    ) -> list[Candidate[PrefillT, DecodeT]]:
        """Places at workers whose breaker lets an attempt pass; at any where those reach nobody."""
        is_last_resort = not _reached(ask, prefills, decodes)
        found = self._places(ask, prefills, decodes, now, excluded, is_last_resort=is_last_resort)
        if found or is_last_resort or self.mode == "colocated":
            return found
        trusted_prefills = [worker for worker in prefills if worker.is_trusted(now)]
        trusted_decodes = [worker for worker in decodes if worker.is_trusted(now)]
        if _reached(ask, trusted_prefills or prefills, trusted_decodes or decodes):
            # They are busy: waited for, and no reason to go to one that fails.
            return found
        return self._places(ask, prefills, decodes, now, excluded, is_last_resort=False, trusts_all=True)

    def _places(
        self,
        ask: Ask,
        prefills: Sequence[PrefillT],
        decodes: Sequence[DecodeT],
        now: float,
        excluded: list[tuple[str, str]],
        *,
        is_last_resort: bool,
        trusts_all: bool = False,
    ) -> list[Candidate[PrefillT, DecodeT]]:
        drawn = Draw(self._rng, now, excluded, trusts_all=trusts_all)
        able = drawn.able(decodes, ask.held, lambda d: d.objection(ask.reserve_tokens, ask.expected_tokens))
        if not able:
            return []
        candidates: list[Candidate[PrefillT, DecodeT]] = []
        if self.mode != "colocated":

            def objection(prefill: PrefillT) -> str:
                uncached = ask.num_tokens - ask.cached.get(prefill.incarnation, 0)
                return prefill.objection(ask.num_tokens, uncached, ask.seniority)

            candidates += self._remote(ask, drawn.able(prefills, ask.cached, objection), able, now)
        if self._allows_local(ask, prefills):
            candidates += self._local(ask, able, excluded, is_last_resort=is_last_resort)
        return candidates

    def _allows_local(self, ask: Ask, prefills: Sequence[PrefillT]) -> bool:
        """Whether a decode worker may compute them at all."""
        if self.mode != "disaggregated":
            return True
        # Where there is no prefill worker it waits for one, like everybody.
        is_outgrown = ask.may_be_local and bool(prefills)
        return is_outgrown and not any(prefill.can_ever_take(ask.num_tokens) for prefill in prefills)

    def _remote(
        self, ask: Ask, prefills: Sequence[PrefillT], decodes: Sequence[DecodeT], now: float
    ) -> list[Candidate[PrefillT, DecodeT]]:
        """Places with a prefill worker."""
        computing = [self._computing(ask, prefill, now) for prefill in prefills]
        decoding = [self._decoding(ask, decode) for decode in decodes]
        # Where not everybody reaches everybody, the best few of each may not reach each other.
        found = self._pairs(ask, self._finalists(ask, computing), self._finalists(ask, decoding))
        return found or self._pairs(ask, computing, decoding)

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
        source, target = c.worker.incarnation, d.worker.incarnation
        held = ask.held.get(target, 0)
        tail_ms = self._costs.transfer_ms(source, target, max(0, ask.num_tokens - held))
        return Candidate(
            c.worker,
            d.worker,
            num_cached_tokens=ask.cached.get(source, 0),
            num_held_tokens=held,
            wait_ms=c.wait_ms,
            prefill_ms=c.prefill_ms,
            transfer_ms=tail_ms,
            itl_ms=d.itl_ms,
            score_ms=c.score_ms + d.score_ms + tail_ms,
            num_avoided=(source in ask.avoid) + (target in ask.avoid),
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
        beside, backlog = decode.num_decoding, decode.num_backlog_tokens
        context = decode.num_context_tokens + ask.num_tokens
        itl_ms = self._costs.step_ms(decode.incarnation, beside + 1, context)
        if backlog:
            # Some of the answer's steps compute prompts as well.
            mixed = min(backlog, decode.mixed_tokens)
            slow_ms = self._costs.step_ms(decode.incarnation, beside + 1, context, mixed)
            num_slow = -(-backlog // max(1, decode.mixed_tokens))
            itl_ms += (slow_ms - itl_ms) * min(1.0, num_slow / ask.num_new_tokens)
        return _Decoding(decode, itl_ms, itl_ms + self._late_ms(ask, itl_ms, beside + 1, decode.max_running))

    def _late_ms(self, ask: Ask, itl_ms: float, num_running: int, max_running: int) -> float:
        """What a place is worse by because it breaks the objective, or has no seat in its batch."""
        late_ms = max(0.0, itl_ms - self._itl_objective_ms) * ask.num_new_tokens
        if max_running and num_running > max_running:
            # Somebody's whole answer must end first, on average after half of it.
            late_ms += 0.5 * itl_ms * ask.num_new_tokens * (num_running - max_running)
        return late_ms

    def _local(
        self,
        ask: Ask,
        decodes: Sequence[DecodeT],
        excluded: list[tuple[str, str]],
        *,
        is_last_resort: bool,
    ) -> list[Candidate[PrefillT, DecodeT]]:
        """Places where the decode worker computes the prompt itself."""
        is_free = self.mode == "colocated" or is_last_resort
        found = []
        for decode in decodes:
            # The last token is always computed: its logits are wanted.
            held = min(ask.held.get(decode.incarnation, 0), ask.num_tokens - 1)
            rest, why = ask.num_tokens - held, ""
            if is_free or rest <= self._local_max_tokens:
                candidate, step_ms = self._alone(ask, decode, held, rest)
                if is_free or step_ms <= self._itl_objective_ms:
                    found.append(candidate)
                else:
                    why = f"alone: steps of {step_ms:.0f} ms would be above the objective for gaps"
            else:
                why = f"alone: {rest} tokens are above local_max_tokens"
            if why and len(excluded) < NUM_KEPT:
                excluded.append((decode.name, why))
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
        harm_ms = num_steps * max(0.0, step_ms - plain_ms) if beside else 0.0
        d = self._decoding(ask, decode)
        candidate: Candidate[PrefillT, DecodeT] = Candidate(
            None,
            decode,
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

    def _finalists(self, ask: Ask, apart: Sequence[_ApartT]) -> Sequence[_ApartT]:
        """The best few of one role."""
        if len(apart) <= NUM_FINALISTS:
            return apart
        best_ms = min(one.score_ms for one in apart)

        def rank(one: _ApartT) -> tuple[bool, float, int, float]:
            worker = one.worker.incarnation
            distance = self._distance(ask.bucket, worker) if isinstance(one, _Computing) else 0
            return worker in ask.avoid, _blurred(one.score_ms, best_ms), distance, self._turn(one.worker)

        # Of so few, faster than heapq.nsmallest().
        return sorted(apart, key=rank)[:NUM_FINALISTS]

    def _rank(
        self, ask: Ask, candidate: Candidate[PrefillT, DecodeT], best_ms: float
    ) -> tuple[int, float, int, float, float]:
        prefill, decode = candidate.prefill, candidate.decode
        return (
            candidate.num_avoided,
            _blurred(candidate.score_ms, best_ms),
            0 if prefill is None else self._distance(ask.bucket, prefill.incarnation),
            0.0 if prefill is None else self._turn(prefill),
            self._turn(decode),
        )

    def _turn(self, worker: WorkerView) -> float:
        """When the worker was last chosen; below 0, and random, if never: routers begin at different ones."""
        if not worker.turn:
            worker.turn = -self._rng.random()
        return worker.turn


@dataclass(slots=True)
class _Computing(Generic[PrefillT]):
    worker: PrefillT
    wait_ms: float
    prefill_ms: float
    score_ms: float


@dataclass(slots=True)
class _Decoding(Generic[DecodeT]):
    worker: DecodeT
    itl_ms: float
    score_ms: float


_ApartT = TypeVar("_ApartT", bound=_Computing[Any] | _Decoding[Any])


def _blurred(score_ms: float, best_ms: float) -> float:
    """The score, or one and the same for all that are as good as the best."""
    return max(score_ms, best_ms * (1 + NEAR) + NEAR_MS)


def _reached(ask: Ask, prefills: Iterable[PrefillT], decodes: Sequence[DecodeT]) -> bool:
    """Whether any prefill worker that can ever hold the prompt reaches any of these decode workers."""
    return any(
        prefill.can_reach(decode.incarnation)
        for prefill in prefills
        if prefill.can_ever_take(ask.num_tokens)
        for decode in decodes
    )


def _is_clearly_better(local: Candidate[PrefillT, DecodeT], remote: Candidate[PrefillT, DecodeT]) -> bool:
    if local.num_avoided != remote.num_avoided:
        return local.num_avoided < remote.num_avoided
    return local.score_ms < (1 - LOCAL_MARGIN) * remote.score_ms
