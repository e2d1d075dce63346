"""Which requests compute how many tokens in the next step: one core for both roles.

A synchronous core: no clock, no asyncio, no tensor. It owns the blocks of every request
it holds; a request that leaves takes its blocks along, and the caller then owns them.

A step lets num_computed_tokens catch up with num_tokens. Requests whose blocks already
cover their tokens (a decode worker's) join at once; others wait, first come first served,
until the pool can give all blocks of their prompt, because two half-prefilled prompts
must not starve each other. In a step come first the decoding requests, one token each;
then prompts, shortest remainder first, each at most chunk_tokens. Two bounds follow, both
counted from admission, while the blocks suffice:

- a short prompt is sampled at the end of the first step that starts after it came, unless
  prompts shorter still fill that step: it waits for one running step, not for long prompts;
- the oldest prompt always advances by min(chunk_tokens, half the budget), so that a stream
  of short prompts cannot starve it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import BatonError, InvalidRequest, NonFiniteLogits, Overloaded
from baton.limits import Limits, blocks_needed
from engine.batch_builder import Chunk, build_batch
from engine.request import FinishReason, Request, RequestStatus

if TYPE_CHECKING:
    from engine.batch import ForwardBatch, StepOutput
    from engine.block_pool import BlockPool
    from engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """A part of a prompt was computed; nothing was sampled. The request stays."""

    request: Request


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """A token was sampled and appended. A finished or prefill_only request has left, with its blocks."""

    request: Request
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request has left, with its blocks, because of an error of its own."""

    request: Request
    error: BatonError


Event = ChunkComputed | TokenSampled | RequestFailed

_SCHEDULABLE = frozenset({RequestStatus.QUEUED, RequestStatus.PREFILLING, RequestStatus.DECODING})


class Scheduler:
    """Waiting and running requests of one engine. Exactly one step is in flight at a time.

    eos_token_ids: ids that end a generation, unless the request ignores them.
    """

    def __init__(
        self, pool: BlockPool, limits: Limits, *, config: EngineConfig, eos_token_ids: Collection[int] = ()
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._config = config
        self._eos_token_ids = frozenset(eos_token_ids)
        # Insertion order is order of arrival.
        self._waiting: dict[bytes, Request] = {}
        self._joining: dict[bytes, Request] = {}
        self._running: dict[bytes, Request] = {}
        self._step_id = 0
        self._in_flight: list[Chunk] | None = None
        self._was_alone = False

    @property
    def alone_in_flight(self) -> bytes | None:
        """The attempt that has the step in flight to itself because it asked for that; else None."""
        if self._in_flight is None or not self._in_flight[0].request.alone:
            return None
        return self._in_flight[0].request.attempt_id

    @property
    def num_running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks or for a place."""
        return len(self._waiting) + len(self._joining)

    @property
    def fence(self) -> int | None:
        """Number of the step in flight, for BlockPool.release(); None when there is none."""
        return self._step_id if self._in_flight is not None else None

    @property
    def has_work(self) -> bool:
        """Whether any request is held."""
        return bool(self._running or self._waiting or self._joining)

    def add(self, request: Request) -> None:
        """Takes a request, and the blocks it holds.

        Raises InvalidRequest if it can never run here, ValueError if its attempt is held already
        or its status or progress leaves nothing to compute.
        """
        if any(request.attempt_id in held for held in (self._running, self._joining, self._waiting)):
            raise ValueError("this attempt is scheduled already")
        self._check_fits(request)
        if request.status not in _SCHEDULABLE or request.num_pending_tokens < 1:
            raise ValueError(
                f"a request that is {request.status.name} with {request.num_pending_tokens} pending tokens "
                "has nothing to compute"
            )
        if self._missing_blocks(request) == 0:
            self._joining[request.attempt_id] = request
        else:
            self._waiting[request.attempt_id] = request

    def remove(self, attempt_id: bytes) -> Request | None:
        """Takes a request out, waiting or running; None if it is not held.

        The caller owns its blocks and releases them with fence=scheduler.fence.
        """
        for held in (self._running, self._joining, self._waiting):
            if attempt_id in held:
                return held.pop(attempt_id)
        return None

    def next_batch(self) -> ForwardBatch | None:
        """The next step, or None if nothing can be computed. apply() must follow it."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._step_id} is still in flight")
        self._admit()
        chunks = self._alone_chunks() or self._shared_chunks()
        if not chunks:
            return None
        self._step_id += 1
        self._in_flight = chunks
        return build_batch(self._step_id, chunks, self._pool.block_size)

    def apply(self, output: StepOutput) -> list[Event]:
        """Ends the step in flight: advances its requests and frees what was fenced by it."""
        chunks = self._end_step(output.step_id)
        sampled = iter(range(len(output.token_ids)))
        events: list[Event] = []
        for chunk in chunks:
            row = next(sampled) if chunk.samples else None
            if self._running.get(chunk.request.attempt_id) is not chunk.request:
                continue
            chunk.request.num_computed_tokens += chunk.num_tokens
            if row is None:
                events.append(ChunkComputed(chunk.request))
            elif not output.finite[row]:
                error = NonFiniteLogits("the model produced NaN or infinite logits for this request")
                events.append(self._fail(chunk.request, error))
            else:
                token_id, logprob = int(output.token_ids[row]), float(output.logprobs[row])
                events += self._sampled(chunk.request, token_id, logprob)
        return events

    def _missing_blocks(self, request: Request) -> int:
        return max(0, blocks_needed(request.num_tokens, self._pool.block_size) - len(request.block_ids))

    def _check_fits(self, request: Request) -> None:
        if not 0 < request.num_tokens < self._limits.max_model_len:
            raise InvalidRequest(
                f"the request has {request.num_tokens} tokens; this model takes 1 to "
                f"{self._limits.max_model_len - 1} and needs room for one more",
                field="prompt",
            )
        needed = blocks_needed(request.num_tokens, self._pool.block_size)
        if needed > self._pool.num_blocks:
            raise InvalidRequest(
                f"the prompt needs {needed} blocks of {self._pool.block_size} tokens; this worker has "
                f"{self._pool.num_blocks} in all: shorten the prompt or raise kv_cache_bytes",
                field="prompt",
            )

    def _admit(self) -> None:
        for held in (self._joining, self._waiting):
            while held and len(self._running) < self._config.max_running:
                request = next(iter(held.values()))
                missing = self._missing_blocks(request)
                if not self._pool.can_allocate(missing):
                    break
                request.block_ids += self._pool.allocate(missing)
                if request.status is RequestStatus.QUEUED:
                    request.move_to(RequestStatus.PREFILLING)
                self._running[request.attempt_id] = held.pop(request.attempt_id)

    def _alone_chunks(self) -> list[Chunk]:
        """The next alone request's chunk, every other step at most while others have work too."""
        alone = next((request for request in self._running.values() if request.alone), None)
        others = any(not request.alone for request in self._running.values())
        if alone is None or (self._was_alone and others):
            self._was_alone = False
            return []
        self._was_alone = True
        # To the end of the line, so that several of them take turns.
        self._running[alone.attempt_id] = self._running.pop(alone.attempt_id)
        if alone.status is RequestStatus.DECODING:
            return [Chunk.of(alone, 1)]
        limit = min(self._config.chunk_tokens, self._config.max_batch_tokens)
        return [Chunk.of(alone, min(alone.num_pending_tokens, limit))]

    def _shared_chunks(self) -> list[Chunk]:
        chunks = list(self._decode_chunks())
        return chunks + self._prompt_chunks(self._config.max_batch_tokens - len(chunks))

    def _decode_chunks(self) -> Iterator[Chunk]:
        for request in self._running.values():
            if request.status is RequestStatus.DECODING and not request.alone:
                yield Chunk.of(request, 1)

    def _prompt_chunks(self, budget: int) -> list[Chunk]:
        prompts = [r for r in self._running.values() if r.status is RequestStatus.PREFILLING and not r.alone]
        if not prompts or budget < 1:
            return []
        oldest, longest = prompts[0], self._config.chunk_tokens
        # The oldest prompt's share is set aside first, whatever shorter ones come.
        promised = min(oldest.num_pending_tokens, longest, max(1, budget // 2))
        left = budget - promised
        chunks = []
        for request in sorted(prompts, key=lambda r: r.num_pending_tokens):
            own = promised if request is oldest else 0
            num_tokens = min(request.num_pending_tokens, longest, left + own)
            if num_tokens > 0:
                chunks.append(Chunk.of(request, num_tokens))
                left -= num_tokens - own
        return chunks

    def _end_step(self, step_id: int) -> list[Chunk]:
        if self._in_flight is None or step_id != self._step_id:
            raise ValueError(f"step {step_id} is not in flight")
        chunks, self._in_flight = self._in_flight, None
        self._pool.complete(step_id)
        return chunks

    def _sampled(self, request: Request, token_id: int, logprob: float) -> list[Event]:
        request.token_ids.append(token_id)
        events: list[Event] = [TokenSampled(request, token_id, logprob)]
        reason = self._finish_reason(request, token_id)
        if reason is not None:
            request.finish(reason)
        elif request.prefill_only:
            request.move_to(RequestStatus.TRANSFERRING)
        else:
            if request.status is RequestStatus.PREFILLING:
                request.move_to(RequestStatus.DECODING)
            return events + self._grow(request)
        del self._running[request.attempt_id]
        return events

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.params
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if token_id in self._eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        full = request.num_tokens >= self._limits.max_model_len
        return FinishReason.LENGTH if full or request.num_output_tokens >= params.max_tokens else None

    def _grow(self, request: Request) -> list[Event]:
        missing = self._missing_blocks(request)
        if missing == 0:
            return []
        if not self._pool.can_allocate(missing):
            error = Overloaded("the KV cache is full; try again later", retry_after_s=1.0)
            return [self._fail(request, error)]
        request.block_ids += self._pool.allocate(missing)
        return []

    def _fail(self, request: Request, error: BatonError) -> RequestFailed:
        del self._running[request.attempt_id]
        request.move_to(RequestStatus.FINISHED)
        return RequestFailed(request, error)
