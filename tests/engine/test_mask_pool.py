from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest

from baton.errors import InvalidRequest, Overloaded
from engine.mask_pool import MAX_COMPILATIONS, MaskPool
from engine.token_mask import TokenMask, UInt32Array

BITS: UInt32Array = np.array([7], np.uint32)


@pytest.fixture
def pool() -> Iterator[MaskPool]:
    made = MaskPool()
    yield made
    asyncio.run(made.close(10))


class Gate:
    """Work that holds its thread until it may end."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.may_end.wait(10)
        return "done"


def test_a_mask_is_computed_on_a_thread_of_the_pool(pool: MaskPool) -> None:
    computed = threading.Event()
    names = []

    def compute() -> UInt32Array:
        names.append(threading.current_thread().name)
        computed.set()
        return BITS

    mask = TokenMask(compute)
    pool.start(mask)
    assert computed.wait(10)
    assert mask.bits() is BITS
    assert names == ["masks"]


def test_a_mask_that_fails_leaves_the_thread_working(pool: MaskPool) -> None:
    def fail() -> UInt32Array:
        raise InvalidRequest("too complex", field="grammar")

    broken, computed = TokenMask(fail), threading.Event()
    pool.start(broken)
    pool.start(TokenMask(lambda: computed.set() or BITS))  # type: ignore[func-returns-value]
    assert computed.wait(10)
    with pytest.raises(InvalidRequest):
        broken.bits()


def test_a_slow_compilation_delays_no_mask(pool: MaskPool) -> None:
    gate, computed = Gate(), threading.Event()
    slow = pool.compile(gate)
    assert gate.begun.wait(10)
    pool.start(TokenMask(lambda: computed.set() or BITS))  # type: ignore[func-returns-value]
    assert computed.wait(10)
    assert not slow.done()
    gate.may_end.set()
    assert slow.result(10) == "done"


def test_too_many_compilations_are_refused_and_cancelled_ones_do_not_run(pool: MaskPool) -> None:
    gate, ran = Gate(), []
    first = pool.compile(gate)
    assert gate.begun.wait(10)
    waiting = [pool.compile(lambda: ran.append(1)) for _ in range(MAX_COMPILATIONS - 1)]
    assert pool.num_compilations == MAX_COMPILATIONS
    with pytest.raises(Overloaded):
        pool.compile(lambda: None)
    assert all(future.cancel() for future in waiting[1:])
    # What nobody waits for takes nobody's place.
    assert pool.num_compilations == 2
    another = pool.compile(lambda: ran.append(2))
    gate.may_end.set()
    assert first.result(10) == "done"
    assert waiting[0].result(10) is None
    assert another.result(10) is None
    asyncio.run(pool.close(10))
    assert ran == [1, 2]


def test_closing_cancels_what_has_not_begun_and_ends_the_threads() -> None:
    pool, gate = MaskPool(), Gate()
    first = pool.compile(gate)
    assert gate.begun.wait(10)
    second = pool.compile(lambda: None)
    closing = threading.Thread(target=lambda: asyncio.run(pool.close(10)))
    closing.start()
    while not pool.is_closed:
        pass
    gate.may_end.set()
    closing.join(10)
    assert first.result(0) == "done"
    with pytest.raises(CancelledError):
        second.result(0)
    with pytest.raises(RuntimeError):
        pool.compile(lambda: None)
    asyncio.run(pool.close(10))


def test_closing_gives_up_on_a_thread_that_is_stuck() -> None:
    pool, gate = MaskPool(), Gate()
    stuck = pool.compile(gate)
    assert gate.begun.wait(10)
    asyncio.run(pool.close(0.01))
    assert not stuck.done()
    gate.may_end.set()
    assert stuck.result(10) == "done"
