"""The product's own policy in a replay: the cores that a router runs, fed from simulated workers.

A decode worker has room where the whole answer fits, not as a link sees it. What it believes of costs and
lengths it learns while the replay goes on, like a router that has just started. The queue refuses nobody
here, so that all policies serve the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from baton.limits import blocks_needed
from baton.v1 import common_pb2
from router.learning.cost_model import CostModel
from router.learning.output_lengths import OutputLengths
from router.offline.job import Job
from router.offline.policy import Fleet, Placed, Policy
from router.offline.recording import RecordedRequest
from router.offline.simple_policies import CREDIT_TOKENS
from router.offline.simulated_worker import SimulatedWorker, Step
from router.placing.affinity import BucketAffinity
from router.placing.credit import credit_cost, kept_credit
from router.placing.decode_load import DecodeLoad
from router.placing.placement import Placement
from router.placing.places import Ask, Candidate, Decision
from router.placing.prefill_backlog import PrefillBacklog
from router.queueing.buckets import BucketQueue, Waiting

# Nobody's incarnation: predicted like a typical worker.
_ANY_WORKER = 0


class PrefillSide:
    """A simulated prefill worker as placement sees one: what this router has placed there, and credit."""

    num_foreign_tokens = 0

    def __init__(self, worker: SimulatedWorker) -> None:
        self.worker = worker
        self.incarnation = worker.incarnation
        self.name = worker.spec.name
        self.chunk_tokens = worker.spec.chunk_tokens
        self.turn = 0.0
        self.backlog = PrefillBacklog()
        self.costs: dict[bytes, int] = {}

    def is_trusted(self, now: float) -> bool:
        """Simulated workers do not fail."""
        del now
        return True

    def can_ever_take(self, num_tokens: int) -> bool:
        """Whether it could hold such a prompt if it were empty."""
        return blocks_needed(num_tokens, self.worker.spec.block_size) <= self.worker.spec.num_blocks

    def can_reach(self, incarnation: int) -> bool:
        """Everybody reaches everybody."""
        del incarnation
        return True

    def objection(self, num_tokens: int, num_uncached_tokens: int, seniority: float) -> str:
        """Why it cannot take a prompt now: credit or blocks."""
        credit = CREDIT_TOKENS - sum(self.costs.values()) - kept_credit(CREDIT_TOKENS, seniority)
        if credit_cost(num_uncached_tokens, CREDIT_TOKENS, seniority) > credit:
            return "has no credit"
        blocks = blocks_needed(num_tokens, self.worker.spec.block_size)
        return "has no blocks" if self.backlog.num_blocks + blocks > self.worker.spec.num_blocks else ""

    def computed(self, key: bytes, now: float) -> None:
        """A prompt's token was sampled: its credit is free again."""
        self.costs.pop(key, None)
        self.backlog.computed(key, now)

    def work_ahead_ms(self, num_tokens: int, now: float) -> float:
        """Predicted computing that goes before a prompt of num_tokens."""
        return self.backlog.work_ahead_ms(num_tokens, self.chunk_tokens, now)


class DecodeSide:
    """A simulated decode worker as placement sees one."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self.worker = worker
        self.incarnation = worker.incarnation
        self.name = worker.spec.name
        self.chunk_tokens = worker.spec.chunk_tokens
        self.mixed_tokens = worker.spec.mixed_tokens
        self.max_running = worker.spec.max_running
        self.turn = 0.0
        self.load = DecodeLoad()
        self.load.opened(worker.spec.block_size)

    @property
    def num_decoding(self) -> int:
        """Requests that decode there, or will."""
        return len(self.load)

    @property
    def num_context_tokens(self) -> int:
        """Tokens in their caches."""
        return self.load.num_tokens

    @property
    def num_backlog_tokens(self) -> int:
        """Prompt tokens that it is to compute itself."""
        return self.load.num_local_tokens

    def is_trusted(self, now: float) -> bool:
        """Simulated workers do not fail."""
        del now
        return True

    def objection(self, reserve_tokens: int, expected_tokens: int) -> str:
        """Why it cannot take a request now: blocks. One that is alone need not find all it may come to."""
        needed = max(reserve_tokens, expected_tokens) if self.worker.placed else reserve_tokens
        return "" if self.worker.has_room(needed) else "has no blocks"


class CostPolicy(Policy):
    """Length buckets, earliest deadline first, predicted time to the first token.

    settings: of the router, as the log has them.
    """

    name = "cost"

    def __init__(self, settings: Mapping[str, Any], *, rng: random.Random) -> None:
        self._costs = CostModel()
        self._lengths = OutputLengths()
        edges = tuple(settings["bucket_edges"])
        self._affinity = BucketAffinity(len(edges) + 1)
        self._queue: BucketQueue[RecordedRequest] = BucketQueue(
            edges, max_items=1 << 62, max_wait_s=settings["max_wait_s"]
        )
        self._placement: Placement[PrefillSide, DecodeSide] = Placement(
            self._costs,
            rng=rng,
            mode=settings["placement"],
            itl_objective_ms=settings["itl_objective_ms"],
            local_max_tokens=settings["local_max_tokens"],
            distance=self._affinity.distance,
        )
        self._prefills: dict[int, PrefillSide] = {}
        self._decodes: dict[int, DecodeSide] = {}
        self._decision: Decision[PrefillSide, DecodeSide] | None = None
        self._seniority = 0.0

    def add(self, request: RecordedRequest, fleet: Fleet) -> None:
        """Into the queue of its length."""
        most = max((w.num_found(request, below=_rest(request)) for w in fleet.prefills), default=0)
        uncached = request.num_prompt_tokens - most
        cost_ms = self._costs.prefill_ms(_ANY_WORKER, uncached, most)
        self._affinity.observe(self._queue.bucket(uncached), cost_ms, fleet.now)
        self._queue.push(
            request,
            uncached,
            enqueued_at=fleet.now,
            deadline_at=fleet.now + request.ttft_objective_ms / 1000,
            cost_ms=cost_ms,
            tenant=request.tenant,
            weight=request.weight,
            priority=common_pb2.Priority.Value(f"PRIORITY_{request.priority.upper()}"),
        )

    def next(self, fleet: Fleet) -> Placed | None:
        """The next in the queue's order that has a place."""
        self._meet(fleet)

        def fits(item: Waiting[RecordedRequest]) -> bool:
            self._decision = self._decide(item, fleet)
            return self._decision is not None

        item = self._queue.pop(fits, fleet.now)
        if item is None or self._decision is None:
            return None
        chosen = self._decision.chosen
        self._placement.taken(chosen)
        self._count(item.value, chosen, fleet)
        decode = chosen.decode.worker
        return item.value, decode if chosen.prefill is None else chosen.prefill.worker, decode

    def stepped(self, worker: SimulatedWorker, step: Step, fleet: Fleet) -> None:
        """A decode worker's steps say what steps cost, and how its answers grow."""
        del fleet
        decode = self._decodes.get(worker.incarnation)
        if decode is None:
            return
        self._costs.observe_step(
            worker.incarnation,
            len(step.decoding),
            step.num_context_tokens,
            step.num_prompt_tokens,
            step.duration_ms,
        )
        for job in step.decoding:
            decode.load.grew(_id(job.request), 1)

    def sampled(self, job: Job, fleet: Fleet) -> None:
        """A prompt is computed: its prefill worker says how long it took."""
        key = _id(job.request)
        self._decodes[job.decode.incarnation].load.grew(key, 1)
        if job.is_local:
            self._decodes[job.decode.incarnation].load.prompt_computed(key)
            return
        num_computed = job.request.num_prompt_tokens - job.num_cached
        self._costs.observe_prefill(job.prefill.incarnation, num_computed, job.num_cached, job.compute_ms)
        self._prefills[job.prefill.incarnation].computed(key, fleet.now)

    def committed(self, job: Job, tail_ms: float, fleet: Fleet) -> None:
        """The KV has arrived."""
        del fleet
        num_tokens = job.request.num_prompt_tokens
        self._costs.observe_transfer(job.prefill.incarnation, job.decode.incarnation, num_tokens, tail_ms)
        self._prefills[job.prefill.incarnation].backlog.ended(_id(job.request))
        self._decodes[job.decode.incarnation].load.committed(_id(job.request))

    def ended(self, job: Job, fleet: Fleet) -> None:
        """An answer is complete: how long it became is learned."""
        del fleet
        if not job.is_local:
            self._prefills[job.prefill.incarnation].backlog.ended(_id(job.request))
        self._decodes[job.decode.incarnation].load.ended(_id(job.request))
        self._lengths.observe(job.request.max_tokens, job.request.num_output_tokens)

    def _meet(self, fleet: Fleet) -> None:
        """Knows the workers from now on, and deals the buckets out to them."""
        if not self._decodes:
            self._prefills = {worker.incarnation: PrefillSide(worker) for worker in fleet.prefills}
            self._decodes = {worker.incarnation: DecodeSide(worker) for worker in fleet.decodes}
        self._affinity.assign(list(self._prefills), fleet.now)

    def _decide(
        self, item: Waiting[RecordedRequest], fleet: Fleet
    ) -> Decision[PrefillSide, DecodeSide] | None:
        request = item.value
        num_prompt = request.num_prompt_tokens
        expected = num_prompt + self._lengths.expected(request.max_tokens) - 1
        ask = Ask(
            num_tokens=num_prompt,
            reserve_tokens=num_prompt + 1,
            expected_tokens=expected,
            bucket=self._queue.bucket(item.num_tokens),
            num_buckets=len(self._queue.labels),
            cached=_found(request, fleet.prefills, _rest(request)),
            held=_found(request, fleet.decodes, num_prompt),
        )
        self._seniority = ask.seniority
        return self._placement.choose(
            ask, list(self._prefills.values()), list(self._decodes.values()), fleet.now
        )

    def _count(
        self, request: RecordedRequest, chosen: Candidate[PrefillSide, DecodeSide], fleet: Fleet
    ) -> None:
        key, num_prompt = _id(request), request.num_prompt_tokens
        uncached = num_prompt - chosen.num_cached_tokens
        is_local = chosen.prefill is None
        chosen.decode.load.place(
            key,
            num_tokens=num_prompt,
            expected_tokens=num_prompt + self._lengths.expected(request.max_tokens) - 1,
            num_local_tokens=uncached if is_local else 0,
        )
        if chosen.prefill is None:
            chosen.decode.load.committed(key)
            return
        chosen.prefill.costs[key] = credit_cost(uncached, CREDIT_TOKENS, self._seniority)
        chosen.prefill.backlog.place(
            key,
            num_tokens=uncached,
            num_blocks=blocks_needed(num_prompt, chosen.prefill.worker.spec.block_size),
            predicted_ms=chosen.prefill_ms,
            now=fleet.now,
        )


def _id(request: RecordedRequest) -> bytes:
    return request.number.to_bytes(8, "big")


def _rest(request: RecordedRequest) -> int:
    """Most tokens of a prompt that are of use in a cache: its last one is always computed."""
    return request.num_prompt_tokens - 1


def _found(request: RecordedRequest, workers: Sequence[SimulatedWorker], below: int) -> dict[int, int]:
    """Leading tokens that each worker has cached; those that have none are absent."""
    found = ((worker.incarnation, worker.num_found(request, below=below)) for worker in workers)
    return {incarnation: num_tokens for incarnation, num_tokens in found if num_tokens}
