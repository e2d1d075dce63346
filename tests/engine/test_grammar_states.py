from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from baton.errors import InvalidRequest
from baton.sampling import Grammar, SamplingParams
from engine.grammar import GrammarState
from engine.grammar_states import GrammarStates
from engine.mask_pool import MaskPool
from engine.token_mask import TokenMask
from tests.grammar_answers import allowed, tiny
from tests.router.tiny_text import EOS, ids_of

AB = SamplingParams(grammar=Grammar(kind="regex", source="ab?"))


class Later:
    """A pool that does nothing until it is told to."""

    def __init__(self) -> None:
        self.masks: list[TokenMask] = []
        self.work: list[tuple[Future[GrammarState], Callable[[], GrammarState]]] = []

    def start(self, mask: TokenMask) -> None:
        self.masks.append(mask)

    def compile(self, work: Callable[[], GrammarState]) -> Future[GrammarState]:
        self.work.append((Future(), work))
        return self.work[-1][0]

    def run(self) -> None:
        for future, work in self.work:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        self.work.clear()


def test_one_answer_from_arrival_to_end() -> None:
    pool = Later()
    states = GrammarStates(tiny().compiler, pool)
    states.open(b"r", AB, ())
    assert not states.is_ready(b"r")
    pool.run()
    assert states.is_ready(b"r")
    mask = states.mask(b"r")
    assert mask is not None
    assert allowed(mask.bits()) == ids_of("a")
    assert states.advance(b"r", ids_of("a")[0]) is False
    states.start_mask(b"r")
    assert pool.masks == [states.mask(b"r")]
    assert allowed(pool.masks[0].bits()) == [EOS, *ids_of("b")]
    assert states.advance(b"r", ids_of("b")[0]) is True
    assert len(pool.masks) == 1
    states.close(b"r")
    states.close(b"r")
    assert len(states) == 0


def test_a_request_without_a_grammar_is_ready_and_free() -> None:
    states = GrammarStates(tiny().compiler, Later())
    assert states.is_ready(b"r")
    assert states.mask(b"r") is None
    assert states.advance(b"r", 5) is False
    states.start_mask(b"r")
    assert b"r" not in states


def test_a_resumed_answer_goes_on_after_its_tokens() -> None:
    pool = Later()
    states = GrammarStates(tiny().compiler, pool)
    states.open(b"r", AB, ids_of("a"))
    pool.run()
    mask = states.mask(b"r")
    assert mask is not None
    assert allowed(mask.bits()) == [EOS, *ids_of("b")]


def test_closing_before_the_grammar_is_compiled_keeps_it_from_being() -> None:
    pool = Later()
    states = GrammarStates(tiny().compiler, pool)
    opened = states.open(b"r", AB, ())
    states.close(b"r")
    pool.run()
    assert opened.cancelled()
    assert len(states) == 0


def test_with_real_threads_a_broken_grammar_fails_its_request_only() -> None:
    pool = MaskPool()
    try:
        states = GrammarStates(tiny().compiler, pool)
        broken = states.open(b"x", SamplingParams(grammar=Grammar(kind="regex", source="(")), ())
        good = states.open(b"r", AB, ())
        with pytest.raises(InvalidRequest, match="column 1"):
            broken.result(10)
        assert not good.result(10).is_complete
        states.close(b"x")
        assert len(states) == 1
    finally:
        asyncio.run(pool.close(10))
