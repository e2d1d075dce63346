"""Requests with a grammar in the scheduler: they wait while it is compiled, and end when it is complete."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.errors import InvalidRequest
from baton.grammars import GrammarCompiler
from baton.limits import Limits
from baton.sampling import Grammar, SamplingParams
from engine.batch import StepOutput
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.events import Event, RequestFailed, TokenSampled
from engine.grammar_states import GrammarStates
from engine.request import FinishReason, Request, RequestStatus
from engine.scheduler import Scheduler
from engine.token_mask import TokenMask
from tests.engine.tiny_models import make_request
from tests.router.tiny_text import EOS, byte_tokenizer, ids_of

VOCAB = 300


class Later:
    """A pool that compiles when a test says so, and computes masks at once."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def start(self, mask: TokenMask) -> None:
        mask.compute()

    def compile(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, work))
        return future

    def go_on(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future, work in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except InvalidRequest as error:
                future.set_exception(error)


class Engine:
    def __init__(self, compiler: GrammarCompiler) -> None:
        self.later, self.pool, self.num_wakes = Later(), BlockPool(32, 4), 0
        self.scheduler = Scheduler(
            self.pool,
            Limits(max_model_len=64, vocab_size=VOCAB),
            config=EngineConfig(block_size=4),
            eos_token_ids=[EOS],
            grammars=GrammarStates(compiler, self.later),
        )
        self.scheduler.wake_by(self.wake)

    def wake(self) -> None:
        self.num_wakes += 1

    def add(self, grammar: Grammar | None, number: int = 0) -> Request:
        params = SamplingParams(temperature=0, max_tokens=9, grammar=grammar)
        request = make_request([5, 6, 7], number=number, params=params)
        self.scheduler.add(request)
        return request

    def step(self, *token_ids: int) -> list[Event]:
        batch = self.scheduler.next_batch()
        assert batch is not None
        count = len(token_ids)
        return self.scheduler.apply(
            StepOutput(
                step_id=batch.step_id,
                token_ids=np.array(token_ids, np.int64),
                logprobs=np.zeros(count, np.float32),
                finite=np.ones(count, np.bool_),
            )
        )


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    path: Path = tmp_path_factory.mktemp("tokenizers") / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return GrammarCompiler(path, VOCAB, [EOS])


@pytest.fixture
def engine(compiler: GrammarCompiler) -> Engine:
    return Engine(compiler)


YES_OR_NO = Grammar(kind="choice", choices=("yes", "no"))


def test_it_waits_for_its_grammar_and_nobody_waits_for_it(engine: Engine) -> None:
    constrained, plain = engine.add(YES_OR_NO, 1), engine.add(None, 2)
    assert [event.request for event in engine.step(9)] == [plain]
    assert constrained.status is RequestStatus.QUEUED
    engine.later.go_on()
    assert engine.num_wakes == 1
    assert {event.request for event in engine.step(9, *ids_of("n"))} == {plain, constrained}


def test_it_ends_when_nothing_can_follow(engine: Engine) -> None:
    request = engine.add(YES_OR_NO)
    engine.later.go_on()
    for letter in ids_of("ye"):
        engine.step(letter)
        assert not request.is_finished
    (event,) = engine.step(*ids_of("s"))
    assert isinstance(event, TokenSampled)
    assert request.finish_reason is FinishReason.STOP
    assert engine.scheduler.num_grammars == 0


def test_its_mask_goes_with_the_step(engine: Engine) -> None:
    request = engine.add(YES_OR_NO)
    engine.later.go_on()
    assert engine.scheduler.next_batch() is not None
    assert request.mask is not None
    bits = np.unpackbits(request.mask.bits().view(np.uint8), bitorder="little")
    assert sorted(np.flatnonzero(bits)) == sorted([*ids_of("y"), *ids_of("n")])


def test_a_grammar_that_cannot_be_used_fails_its_request_alone(engine: Engine) -> None:
    broken, plain = engine.add(Grammar(kind="regex", source="("), 1), engine.add(None, 2)
    engine.later.go_on()
    assert [event.request for event in engine.step(9)] == [plain]
    (failed,) = engine.scheduler.take_left()
    assert isinstance(failed, RequestFailed)
    assert (failed.request, failed.error.field) == (broken, "grammar")
    assert (broken.block_ids, engine.scheduler.num_grammars) == ([], 0)


def test_a_request_that_leaves_while_its_grammar_is_compiled_leaves_nothing(engine: Engine) -> None:
    request = engine.add(YES_OR_NO)
    assert engine.scheduler.remove(request.attempt_id) is request
    engine.later.go_on()
    assert (engine.scheduler.num_grammars, engine.scheduler.has_work) == (0, False)


def test_a_resumed_answer_stands_where_it_stood(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, grammar=YES_OR_NO)
    request = make_request([5, 6, 7, *ids_of("ye")], num_prompt_tokens=3, params=params)
    engine.scheduler.add(request)
    engine.later.go_on()
    engine.step(*ids_of("s"))
    assert request.finish_reason is FinishReason.STOP


def test_without_grammars_a_request_that_has_one_is_refused() -> None:
    scheduler = Scheduler(
        BlockPool(8, 4), Limits(max_model_len=64, vocab_size=VOCAB), config=EngineConfig(block_size=4)
    )
    with pytest.raises(InvalidRequest) as error:
        scheduler.add(make_request([5], params=SamplingParams(max_tokens=2, grammar=YES_OR_NO)))
    assert error.value.field == "grammar"


def test_a_grammar_that_fails_while_others_are_admitted_ends_no_worker(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, plain = engine.add(Grammar(kind="regex", source="("), 1), engine.add(None, 2)
    # The compiling thread does not wait for the scheduler to look.
    monkeypatch.setattr(Scheduler, "_grow", lambda self: engine.later.go_on())
    assert [event.request for event in engine.step(9)] == [plain]
    engine.step(9)
    assert [event.request for event in engine.scheduler.take_left()] == [broken]
