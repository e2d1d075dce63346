"""Which requests compute how many tokens in the next step: one core for both roles.

A synchronous core: no clock, no asyncio, no tensor. It owns the blocks of every request
it holds; a request that leaves takes its blocks along, and the caller then owns them.

A step lets num_computed_tokens catch up with num_tokens: prefix hits, chunked prefill, decode
and resume are one statement. Requests whose blocks already cover their tokens (a decode
worker's) join at once; others wait, oldest first, until the pool can give all blocks of their
prompt, because two half-prefilled prompts must not starve each other, and one more for
every request that decodes, because those grow. Who fits may overtake who does not, a stated number
of times (engine/waiting_line.py).

A model whose rotary embedding hangs on the length computes all tokens of a request at the step of its
length. A decoding request that outgrows its step leaves as well, without its blocks, and is computed anew
at the next (docs/adr/0008).

Blocks can run out all the same. Then the youngest request gives its blocks away and leaves, to be
resumed by whoever sent it; the oldest never does, so something always gets finished. Requests are
as old as their arrival at the router, to within the delay of a message; whoever gives way
keeps its tokens, so no two requests evict each other for ever.

In a step come first the decoding requests, one token each; then prompts, shortest
remainder first, each at most chunk_tokens, and mixed_tokens together if anything decodes.
Two bounds follow, both counted from admission:

- a short prompt is sampled at the end of the first step that starts after it came, unless
  prompts shorter still fill that step: it waits for one running step, not for long prompts;
- the oldest prompt always advances by min(chunk_tokens, half the budget), so that a stream
  of short prompts cannot starve it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from baton.errors import BatonError, InvalidRequest, NonFiniteLogits
from baton.limits import Limits
from engine.admission import check_fits
from engine.batch_builder import Chunk, build_batch
from engine.block_tables import BlockTables
from engine.events import ChunkComputed, Event, Preempted, RequestFailed, TokenSampled
from engine.prompt_chunks import share_out
from engine.request import FinishReason, Request, RequestStatus
from engine.step_results import PromptLogprobs, SampledToken, split_output
from engine.waiting_line import WaitingLine

if TYPE_CHECKING:
    from engine.batch import ForwardBatch, StepOutput
    from engine.block_pool import BlockPool
    from engine.config import EngineConfig
    from engine.grammar_states import GrammarStates


_SCHEDULABLE = frozenset({RequestStatus.QUEUED, RequestStatus.PREFILLING, RequestStatus.DECODING})


class Scheduler:
    """Waiting and running requests of one engine. Exactly one step is in flight at a time.

    eos_token_ids: ids that end a generation, unless the request ignores them.
    grammars: where answers with a grammar stand in it; None refuses such requests.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        *,
        config: EngineConfig,
        eos_token_ids: Collection[int] = (),
        grammars: GrammarStates | None = None,
    ) -> None:
        self.tables = BlockTables(pool)
        self.config = config
        self._pool = pool
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._waiting = WaitingLine()
        # Oldest first.
        self._joining: dict[bytes, Request] = {}
        self._running: dict[bytes, Request] = {}
        self._step_id = 0
        self._in_flight: list[Chunk] | None = None
        self._was_alone = False
        self._grammars = grammars
        self._left: list[Event] = []

    @property
    def alone_in_flight(self) -> bytes | None:
        """The attempt that has the step in flight to itself because it asked for that; else None."""
        if self._in_flight is None or not self._in_flight[0].request.alone:
            return None
        return self._in_flight[0].request.attempt_id

    @property
    def in_flight(self) -> Sequence[Chunk]:
        """What the step in flight computes; empty when there is none."""
        return self._in_flight or ()

    @property
    def completing(self) -> list[Request]:
        """The prefill-only requests whose prompt is complete after the step in flight."""
        last = [chunk.request for chunk in self.in_flight if chunk.samples]
        return [r for r in last if r.prefill_only and self._running.get(r.attempt_id) is r]

    @property
    def num_running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks or for a place."""
        return len(self._waiting) + len(self._joining)

    @property
    def num_backlog_tokens(self) -> int:
        """Tokens of prompts that are not computed yet. Of one that waits all count, cached or not."""
        return sum(r.num_pending_tokens for r in self._held() if r.status is not RequestStatus.DECODING)

    @property
    def num_context_tokens(self) -> int:
        """Tokens in the caches of the requests in the batch."""
        return sum(request.num_computed_tokens for request in self._running.values())

    @property
    def num_grammars(self) -> int:
        """Grammars that requests hold."""
        return 0 if self._grammars is None else len(self._grammars)

    @property
    def num_growth_blocks(self) -> int:
        """Blocks that must stay free above any reservation: one for every request that decodes."""
        decoding = RequestStatus.DECODING
        return sum(r.status is decoding for held in (self._running, self._joining) for r in held.values())

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
        if any(request.attempt_id in line for line in (self._running, self._joining, self._waiting)):
            raise ValueError("this attempt is scheduled already")
        check_fits(request, self._limits, self._pool)
        if request.status not in _SCHEDULABLE or request.num_pending_tokens < 1:
            raise ValueError(
                f"a request that is {request.status.name} with {request.num_pending_tokens} pending tokens "
                "has nothing to compute"
            )
        is_decoding = request.status is RequestStatus.DECODING
        if not is_decoding and request.rope_step != self._limits.rope_step(request.num_tokens):
            raise ValueError(f"{request.num_tokens} tokens cannot be computed at step {request.rope_step}")
        self._open_grammar(request)
        if self.tables.missing(request) == 0:
            self._joining[request.attempt_id] = request
        else:
            self._waiting.add(request)

    def remove(self, attempt_id: bytes) -> Request | None:
        """Takes a request out, waiting or running; None if it is not held.

        The caller owns its blocks and releases them with fence=scheduler.fence.
        """
        for line in (self._running, self._joining, self._waiting):
            if attempt_id in line:
                self._close_grammar(attempt_id)
                return line.pop(attempt_id)
        return None

    def next_batch(self) -> ForwardBatch | None:
        """The next step, or None if nothing can be computed. apply() must follow it."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._step_id} is still in flight")
        self._fail_broken_grammars()
        if self._limits.rope_steps:
            self._outgrow()
        self._grow()
        self._admit()
        chunks = self._alone_chunks() or self._shared_chunks()
        if not chunks:
            return None
        self._step_id += 1
        self._in_flight = chunks
        if self._grammars is not None:
            for chunk in chunks:
                chunk.request.mask = self._grammars.mask(chunk.request.attempt_id)
        return build_batch(self._step_id, chunks, self._pool.block_size, self._eos_token_ids)

    def wake_by(self, wake: Callable[[], object]) -> None:
        """Names what to call, on any thread, when a request need not wait for its grammar any more."""
        if self._grammars is not None:
            self._grammars.on_ready = wake

    def prepare(self, request: Request) -> None:
        """A request that will be added in a moment: what takes time can begin."""
        if self._grammars is not None:
            self._grammars.prepare(request.params)

    def take_left(self) -> list[Event]:
        """What became of requests that left between steps, each once: they gave way, or have failed."""
        left, self._left = self._left, []
        return left

    def apply(self, output: StepOutput) -> list[Event]:
        """Ends the step in flight: advances its requests and frees what was fenced by it."""
        events: list[Event] = []
        for chunk, token, prompt_logprobs, error in split_output(self._end_step(output.step_id), output):
            request = chunk.request
            if self._running.get(request.attempt_id) is not request:
                continue
            request.num_computed_tokens += chunk.num_tokens
            if isinstance(error, NonFiniteLogits):
                # The next request of this prefix must not inherit what went wrong.
                self._pool.unpublish(request.block_ids)
            else:
                self.tables.publish(request)
            if error is not None:
                events.append(self._fail(request, error))
            elif token is None:
                events.append(ChunkComputed(request, prompt_logprobs))
            else:
                events += self._sampled(request, token, prompt_logprobs)
        return events

    def _held(self) -> Iterator[Request]:
        yield from self._running.values()
        yield from self._joining.values()
        yield from self._waiting

    def _admit(self) -> None:
        max_running = self.config.max_running
        for request in [r for r in self._joining.values() if self._has_grammar(r)]:
            if len(self._running) == max_running:
                return
            self._start(self._joining.pop(request.attempt_id))
        if len(self._running) == max_running:
            return
        for request in self._waiting.take(self._has_grammar, self._try_cover):
            self._start(request)
            if len(self._running) == max_running:
                return

    def _has_grammar(self, request: Request) -> bool:
        """Whether its grammar, if it has one, is compiled."""
        return self._grammars is None or self._grammars.is_ready(request.attempt_id)

    def _try_cover(self, request: Request) -> bool:
        """Gives a waiting request all blocks of its tokens, if enough are left for those that grow."""
        # It needs one at least; looking for its prefix takes longer than to see that there is none.
        return (
            self._pool.can_allocate(1) and self._leaves_room_to_grow(request) and self.tables.cover(request)
        )

    def _leaves_room_to_grow(self, request: Request) -> bool:
        """Whether its blocks would leave enough for the requests that grow."""
        growth = self.num_growth_blocks
        return growth == 0 or self._pool.can_allocate(self.tables.missing(request) + growth)

    def _start(self, request: Request) -> None:
        if request.status is RequestStatus.QUEUED:
            request.move_to(RequestStatus.PREFILLING)
        self.tables.publish(request)
        self._running[request.attempt_id] = request

    def _outgrow(self) -> None:
        """Decoding requests that have become too long for their scale step leave."""
        for request in [r for r in self._held() if r.status is RequestStatus.DECODING]:
            if self._limits.rope_step(request.num_tokens) != request.rope_step:
                # What came from elsewhere may not be published yet; others of its length can use it.
                self.tables.publish(request)
                self._send_away(request, outgrown=True)

    def _grow(self) -> None:
        """Gives decoding requests the block their next token needs; the youngest give way."""
        decoding = [r for r in self._running.values() if r.status is RequestStatus.DECODING]
        needy = [request for request in decoding if self.tables.missing(request)]
        for request in sorted(needy, key=lambda r: r.arrived_at):
            # It may have given way to an older one meanwhile.
            while request.attempt_id in self._running and not self.tables.cover(request):
                victim = self._youngest()
                if victim is None:
                    # The oldest waits, for leases to be committed or given up.
                    break
                self._send_away(victim, outgrown=False)

    def _youngest(self) -> Request | None:
        """The request that gives way; None where only the oldest is left."""
        held = [request for requests in (self._running, self._joining) for request in requests.values()]
        return max(held, key=lambda request: request.arrived_at) if len(held) > 1 else None

    def _send_away(self, request: Request, *, outgrown: bool) -> None:
        self.remove(request.attempt_id)
        self.tables.give_back(request)
        request.rewind()
        self._left.append(Preempted(request, outgrown))

    def _alone_chunks(self) -> list[Chunk]:
        """The next alone request's chunk, every other step at most while others have work too."""
        alone = next((r for r in self._running.values() if r.alone and not self.tables.missing(r)), None)
        others = any(not request.alone for request in self._running.values())
        if alone is None or (self._was_alone and others):
            self._was_alone = False
            return []
        self._was_alone = True
        # To the end of the line, so that several of them take turns.
        self._running[alone.attempt_id] = self._running.pop(alone.attempt_id)
        if alone.status is RequestStatus.DECODING:
            return [Chunk.of(alone, 1)]
        limit = min(self.config.chunk_tokens, self.config.max_batch_tokens)
        return [Chunk.of(alone, min(alone.num_pending_tokens, limit))]

    def _shared_chunks(self) -> list[Chunk]:
        chunks = list(self._decode_chunks())
        budget = self.config.max_batch_tokens - len(chunks)
        return chunks + self._prompt_chunks(min(budget, self.config.mixed_tokens) if chunks else budget)

    def _decode_chunks(self) -> Iterator[Chunk]:
        for request in self._running.values():
            is_ready = request.status is RequestStatus.DECODING and not self.tables.missing(request)
            if is_ready and not request.alone:
                yield Chunk.of(request, 1)

    def _prompt_chunks(self, budget: int) -> list[Chunk]:
        prompts = [r for r in self._running.values() if r.status is RequestStatus.PREFILLING and not r.alone]
        return share_out(budget, prompts, chunk_tokens=self.config.chunk_tokens)

    def _end_step(self, step_id: int) -> list[Chunk]:
        if self._in_flight is None or step_id != self._step_id:
            raise ValueError(f"step {step_id} is not in flight")
        chunks, self._in_flight = self._in_flight, None
        self._pool.complete(step_id)
        return chunks

    def _sampled(
        self, request: Request, token: SampledToken, prompt_logprobs: PromptLogprobs | None
    ) -> list[Event]:
        request.token_ids.append(token.token_id)
        events: list[Event] = [TokenSampled(request, *token, prompt_logprobs)]
        is_complete = self._grammars is not None and self._grammars.advance(
            request.attempt_id, token.token_id
        )
        reason = FinishReason.STOP if is_complete else self._finish_reason(request, token.token_id)
        if reason is not None:
            request.finish(reason)
        elif request.prefill_only:
            request.move_to(RequestStatus.TRANSFERRING)
        else:
            if request.status is RequestStatus.PREFILLING:
                request.move_to(RequestStatus.DECODING)
            if self._grammars is not None:
                self._grammars.start_mask(request.attempt_id)
            return events
        self.remove(request.attempt_id)
        return events

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.params
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if token_id in self._eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        full = request.num_tokens >= self._limits.max_model_len
        return FinishReason.LENGTH if full or request.num_output_tokens >= params.max_tokens else None

    def _fail(self, request: Request, error: BatonError) -> RequestFailed:
        self.remove(request.attempt_id)
        request.move_to(RequestStatus.FINISHED)
        return RequestFailed(request, error)

    def _open_grammar(self, request: Request) -> None:
        if request.params.grammar is None:
            return
        if self._grammars is None:
            raise InvalidRequest("this worker's model cannot be used with a grammar", field="grammar")
        output_token_ids = request.token_ids[request.num_prompt_tokens :]
        self._grammars.open(request.attempt_id, request.params, output_token_ids)

    def _close_grammar(self, attempt_id: bytes) -> None:
        if self._grammars is not None:
            self._grammars.close(attempt_id)

    def _fail_broken_grammars(self) -> None:
        """Requests whose grammar turned out not to be usable leave before they took a place."""
        failed = [] if self._grammars is None else self._grammars.failed()
        for attempt_id, error in failed:
            request = next(r for r in self._held() if r.attempt_id == attempt_id)
            self._left.append(self._fail(request, error))
