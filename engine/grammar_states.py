"""The grammar states of a worker's requests: opened on arrival, advanced per token, closed at the end.

Owned by the event loop, which never computes a mask: compiling and masks go to the pool. Knows
requests by their key only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from baton.errors import BatonError, InternalError, InvalidRequest, Overloaded
from engine.grammar import GrammarState

ResultT = TypeVar("ResultT")

if TYPE_CHECKING:
    from baton.grammars import GrammarCompiler
    from baton.sampling import SamplingParams
    from engine.token_mask import TokenMask


class Pool(Protocol):
    """Where the work is done: engine.mask_pool.MaskPool, or a test's that does it at once."""

    def start(self, mask: TokenMask) -> None:
        """Computes a mask soon."""

    def compile(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Runs what compiles a grammar."""


class GrammarStates:
    """Key of a request -> where its answer stands in its grammar.

    on_ready: called, on whatever thread it happens, when a request need not wait for its grammar any more.
    """

    def __init__(self, compiler: GrammarCompiler, pool: Pool) -> None:
        self.on_ready: Callable[[], object] = _nobody_waits
        self._compiler = compiler
        self._pool = pool
        self._states: dict[bytes, Future[GrammarState]] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: bytes) -> bool:
        return key in self._states

    def open(self, key: bytes, params: SamplingParams, token_ids: Sequence[int]) -> Future[GrammarState]:
        """Begins to compile a request's grammar; when the future is done, the request may join a step.

        token_ids: tokens of the answer so far; empty unless the request is resumed.

        The future raises InvalidRequest for a grammar that cannot be used, or that the tokens do not match.
        A key that failed is open until close(). Raises Overloaded when too many wait.
        """
        assert key not in self._states, "a request is opened once"
        grammar, tokens = params.grammar, tuple(token_ids)
        assert grammar is not None, "only a request with a grammar has a grammar state"

        def work() -> GrammarState:
            state = GrammarState.of(
                self._compiler.compile(grammar),
                tokens,
                ignore_eos=params.ignore_eos,
                min_tokens=params.min_tokens,
            )
            if state.is_complete:
                raise InvalidRequest("the answer is complete already", field="token_ids")
            state.mask().compute()
            return state

        future = self._states[key] = self._pool.compile(work)
        future.add_done_callback(lambda _: self.on_ready())
        return future

    def prepare(self, params: SamplingParams) -> None:
        """Compiles a grammar whose request will come in a moment; whether it can, shows then."""
        if params.grammar is not None:
            with suppress(Overloaded):
                self._pool.compile(partial(self._compiler.compile, params.grammar))

    def is_ready(self, key: bytes) -> bool:
        """Whether a request may join a step: it has no grammar, or its grammar is compiled and sound."""
        future = self._states.get(key)
        return future is None or (future.done() and not future.cancelled() and future.exception() is None)

    def failed(self) -> list[tuple[bytes, BatonError]]:
        """Requests whose grammar cannot be used, until they are closed."""
        done = [
            (key, future) for key, future in self._states.items() if future.done() and not future.cancelled()
        ]
        return [(key, _typed(error)) for key, future in done if (error := future.exception()) is not None]

    def mask(self, key: bytes) -> TokenMask | None:
        """What the next token may be, for the batch; None for a request without a grammar."""
        return self._state(key).mask() if key in self._states else None

    def advance(self, key: bytes, token_id: int) -> bool:
        """Takes a sampled token; True if the answer is complete: finish with STOP."""
        if key not in self._states:
            return False
        state = self._state(key)
        state.advance(token_id)
        return state.is_complete

    def start_mask(self, key: bytes) -> None:
        """Begins to compute what may come next, for a request that goes on here."""
        if key in self._states:
            self._pool.start(self._state(key).mask())

    def close(self, key: bytes) -> None:
        """Forgets a request, however it ended; idempotent."""
        if (state := self._states.pop(key, None)) is not None:
            state.cancel()

    def _state(self, key: bytes) -> GrammarState:
        future = self._states[key]
        assert future.done(), "a request joins a step when its grammar is compiled"
        return future.result()


def _nobody_waits() -> None:
    """Until somebody does."""


def _typed(error: BaseException) -> BatonError:
    return (
        error if isinstance(error, BatonError) else InternalError(f"a grammar could not be compiled: {error}")
    )
