"""A worker in virtual time, with the rules of engine/scheduler.py and no model.

In a step come the decoding requests, one token each, then prompts, shortest rest first, each at most
chunk_tokens, and mixed_tokens together if anything decodes; the oldest prompt always advances by half of what
there is. A prompt begins when the pool has all its blocks. Not modelled: preemption (a decode worker holds
the blocks of the whole answer from the beginning), grammars, requests that get steps of their own, overtaking
of a prompt that waits for blocks, and blocks of generated tokens in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.limits import blocks_needed
from router.offline.block_cache import BlockCache
from router.offline.job import Job
from router.offline.recorded_costs import RecordedCosts
from router.offline.recording import RecordedRequest, RecordedWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step computes, and how long it takes.

    chunks: prompts and how many tokens of each.  decoding: requests that get a token.
    num_context_tokens: in the caches of those, before the step.
    """

    chunks: tuple[tuple[Job, int], ...]
    decoding: tuple[Job, ...]
    num_context_tokens: int
    duration_ms: float

    @property
    def num_prompt_tokens(self) -> int:
        """Of all chunks."""
        return sum(num_tokens for _, num_tokens in self.chunks)


class SimulatedWorker:
    """One worker: what waits in it, what runs, what its cache holds.

    incarnation: names it, at least 1.
    """

    def __init__(self, spec: RecordedWorker, costs: RecordedCosts, *, incarnation: int) -> None:
        self.spec = spec
        self.incarnation = incarnation
        self.cache = BlockCache(spec.num_blocks)
        self.num_held_blocks = 0
        # From placement until nothing of it is here.
        self.placed: dict[Job, int] = {}
        self._costs = costs
        self._waiting: deque[Job] = deque()
        self._joining: deque[Job] = deque()
        # Oldest first.
        self._prompts: list[Job] = []
        self._decoding: list[Job] = []
        self._step: Step | None = None
        # Prompt tokens to compute here.
        self.num_backlog_tokens = 0

    def blocks_of(self, request: RecordedRequest) -> Sequence[int]:
        """The numbers of its prompt's full blocks, in this worker's block size."""
        return request.prefix.get(self.spec.block_size, ())

    def num_found(self, request: RecordedRequest, *, below: int) -> int:
        """Leading tokens of its prompt in the cache, in whole blocks, at most `below`."""
        size = self.spec.block_size
        return self.cache.num_leading(self.blocks_of(request)[: max(0, below) // size]) * size

    def has_room(self, num_tokens: int) -> bool:
        """Whether a request of that many tokens can be held besides what is."""
        needed = blocks_needed(num_tokens, self.spec.block_size)
        return self.num_held_blocks + needed <= self.spec.num_blocks

    def place(self, job: Job, num_tokens: int) -> None:
        """It will come here; its blocks are held from now on if this is where it decodes."""
        blocks = blocks_needed(num_tokens, self.spec.block_size) if job.decode is self else 0
        self.placed[job] = blocks
        self.num_held_blocks += blocks

    def compute(self, job: Job) -> None:
        """Its prompt is to be computed here."""
        self._waiting.append(job)
        self.num_backlog_tokens += job.num_pending

    def join(self, job: Job) -> None:
        """Its KV is here; it is to be decoded."""
        self.cache.store(self.blocks_of(job.request))
        self._joining.append(job)

    def release(self, job: Job) -> None:
        """Nothing of it is here any more; what its blocks held can still be found."""
        self.num_held_blocks -= self.placed.pop(job)

    def begin(self) -> Step | None:
        """Begins the next step, or None if there is nothing to compute or a step runs."""
        if self._step is not None:
            return None
        self._admit()
        decoding = tuple(self._decoding)
        budget = self.spec.max_batch_tokens - len(decoding)
        chunks = tuple(self._chunks(min(budget, self.spec.mixed_tokens) if decoding else budget))
        if not chunks and not decoding:
            return None
        num_context = sum(job.num_context for job in decoding)
        self._step = Step(
            chunks=chunks,
            decoding=decoding,
            num_context_tokens=num_context,
            duration_ms=self._duration_ms(chunks, len(decoding), num_context),
        )
        return self._step

    def finish(self) -> tuple[Step, list[Job]]:
        """Ends the step; returns it, and those whose prompt it completed: they have their first token."""
        step, self._step = self._step, None
        assert step is not None
        for job in step.decoding:
            job.num_generated += 1
        self._decoding = [job for job in self._decoding if job.num_left]
        num_tokens = len(step.decoding) + step.num_prompt_tokens
        sampled = []
        for job, num_computed in step.chunks:
            job.num_computed += num_computed
            self.num_backlog_tokens -= num_computed
            job.compute_ms += step.duration_ms * num_computed / num_tokens
            self.cache.store(self.blocks_of(job.request)[: job.num_computed // self.spec.block_size])
            if not job.num_pending:
                sampled.append(job)
                self._sampled(job)
        return step, sampled

    def _sampled(self, job: Job) -> None:
        self._prompts.remove(job)
        job.num_generated += 1
        if job.is_local and job.num_left:
            self._decoding.append(job)

    def _admit(self) -> None:
        while self._joining and self._has_seat():
            self._decoding.append(self._joining.popleft())
        while self._waiting and self._has_seat() and self._takes_blocks(self._waiting[0]):
            job = self._waiting.popleft()
            most = job.request.num_prompt_tokens - 1
            job.num_cached = job.num_computed = self.num_found(job.request, below=most)
            self.num_backlog_tokens -= job.num_cached
            self._prompts.append(job)

    def _has_seat(self) -> bool:
        return not self.spec.max_running or len(self._decoding) + len(self._prompts) < self.spec.max_running

    def _takes_blocks(self, job: Job) -> bool:
        """Takes the blocks of a prompt that goes elsewhere afterwards; one that stays has its blocks."""
        if job.is_local:
            return True
        num_tokens = job.request.num_prompt_tokens
        if not self.has_room(num_tokens):
            return False
        blocks = blocks_needed(num_tokens, self.spec.block_size)
        self.placed[job] = blocks
        self.num_held_blocks += blocks
        return True

    def _chunks(self, budget: int) -> Iterator[tuple[Job, int]]:
        if not self._prompts or budget < 1:
            return
        oldest, longest = self._prompts[0], self.spec.chunk_tokens
        promised = min(oldest.num_pending, longest, max(1, budget // 2))
        left = budget - promised
        for job in sorted(self._prompts, key=lambda prompt: prompt.num_pending):
            own = promised if job is oldest else 0
            num_tokens = min(job.num_pending, longest, left + own)
            if num_tokens > 0:
                yield job, num_tokens
                left -= num_tokens - own

    def _duration_ms(self, chunks: Sequence[tuple[Job, int]], num_decoding: int, num_context: int) -> float:
        name = self.spec.name
        if num_decoding:
            num_prompt = sum(num_tokens for _, num_tokens in chunks)
            return self._costs.step_ms(name, num_decoding, num_context, num_prompt)
        begins = sum(job.num_computed == job.num_cached for job, _ in chunks)
        parts = (self._costs.chunk_ms(name, num_tokens, job.num_computed) for job, num_tokens in chunks)
        return begins * self._costs.prompt_ms(name) + sum(parts)
