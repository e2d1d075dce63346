"""All workers in virtual time, and the life of every request among them. Owns the order of events, no policy.

A request arrives, waits until the policy places it, is computed, travels and is decoded. Messages take no
time. Whatever happens at one moment happens before the policy is asked again and any step begins, so that
prompts that come together can share a step.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from baton.errors import ConfigError
from router.offline.job import Job
from router.offline.policy import Policy
from router.offline.recorded_costs import RecordedCosts
from router.offline.recording import Outcome, RecordedRequest, RecordedWorker
from router.offline.simulated_worker import SimulatedWorker


class SimulatedFleet:
    """The workers and the clock. Run one recording once: run() leaves it used.

    now: virtual time in seconds.
    """

    def __init__(self, specs: Sequence[RecordedWorker], costs: RecordedCosts) -> None:
        workers = [
            SimulatedWorker(spec, costs, incarnation=index) for index, spec in enumerate(specs, start=1)
        ]
        self.prefills = tuple(worker for worker in workers if worker.spec.role == "prefill")
        self.decodes = tuple(worker for worker in workers if worker.spec.role == "decode")
        self.now = 0.0
        self._costs = costs
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ended: list[Job] = []

    def run(self, requests: Iterable[RecordedRequest], policy: Policy) -> list[Outcome]:
        """What becomes of the requests, in their order.

        Raises ConfigError if some can never be placed: no worker has room for them.
        """
        wanted = list(requests)
        for request in wanted:
            self._at(request.arrived_at, partial(policy.add, request, self))
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
            self._place(policy)
            self._begin_steps(policy)
        jobs = {job.request.number: job for job in self._ended}
        missing = [request for request in wanted if request.number not in jobs]
        if missing:
            raise ConfigError(
                f"policy {policy.name}: {len(missing)} of {len(wanted)} requests fit nowhere, the first has "
                f"{missing[0].num_prompt_tokens} prompt tokens: it needs more blocks than any worker has",
                field="LOG",
            )
        return [_outcome(jobs[request.number]) for request in wanted]

    def _at(self, moment: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), event))

    def _after(self, duration_ms: float, event: Callable[[], None]) -> None:
        self._at(self.now + duration_ms / 1000, event)

    def _place(self, policy: Policy) -> None:
        while (placed := policy.next(self)) is not None:
            request, prefill, decode = placed
            job = Job(request, prefill, decode, self.now)
            decode.place(job, request.num_prompt_tokens + request.num_output_tokens)
            if not job.is_local:
                prefill.place(job, 0)
            policy.placed(job, self)
            prefill.compute(job)

    def _begin_steps(self, policy: Policy) -> None:
        for worker in (*self.prefills, *self.decodes):
            step = worker.begin()
            if step is not None:
                self._after(step.duration_ms, partial(self._finish_step, worker, policy))

    def _finish_step(self, worker: SimulatedWorker, policy: Policy) -> None:
        step, sampled = worker.finish()
        policy.stepped(worker, step, self)
        for job in sampled:
            job.first_token_at = self.now
            policy.sampled(job, self)
            if job.num_left and not job.is_local:
                # The decode worker's cache is looked at now; what it has does not travel.
                held = job.decode.num_found(job.request, below=job.request.num_prompt_tokens)
                tail_ms = self._costs.transfer_ms(job.request.num_prompt_tokens - held)
                self._after(tail_ms, partial(self._commit, job, policy, tail_ms))
        for job in (*sampled, *step.decoding):
            if not job.num_left:
                self._end(job, policy)

    def _commit(self, job: Job, policy: Policy, tail_ms: float) -> None:
        job.prefill.release(job)
        job.decode.join(job)
        policy.committed(job, tail_ms, self)

    def _end(self, job: Job, policy: Policy) -> None:
        job.ended_at = self.now
        if job in job.prefill.placed and not job.is_local:
            # It ended with its first token: nothing travelled.
            job.prefill.release(job)
        job.decode.release(job)
        self._ended.append(job)
        policy.ended(job, self)


def _outcome(job: Job) -> Outcome:
    request = job.request
    assert job.first_token_at is not None
    assert job.ended_at is not None
    gaps = request.num_output_tokens - 1
    return Outcome(
        request=request,
        ttft_ms=1000 * (job.first_token_at - request.arrived_at),
        itl_ms=1000 * (job.ended_at - job.first_token_at) / gaps if gaps else 0.0,
        prefill_worker=job.prefill.spec.name,
        decode_worker=job.decode.spec.name,
        compute_ms=job.compute_ms,
        num_computed_tokens=request.num_prompt_tokens - job.num_cached,
        num_cached_tokens=job.num_cached,
    )
