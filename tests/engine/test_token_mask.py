from __future__ import annotations

import threading

import numpy as np
import pytest

from baton.errors import InvalidRequest
from engine.token_mask import TokenMask, UInt32Array

BITS: UInt32Array = np.array([5, 1], np.uint32)


def test_whoever_wants_the_bits_computes_them_if_nobody_has_begun() -> None:
    threads = []

    def compute() -> UInt32Array:
        threads.append(threading.get_ident())
        return BITS

    mask = TokenMask(compute)
    assert mask.bits() is BITS
    assert mask.bits() is BITS
    mask.compute()
    assert threads == [threading.get_ident()]


def test_bits_wait_for_the_thread_that_has_begun() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def compute() -> UInt32Array:
        begun.set()
        assert may_end.wait(10)
        return BITS

    mask = TokenMask(compute)
    worker = threading.Thread(target=mask.compute)
    worker.start()
    assert begun.wait(10)
    taken: list[UInt32Array] = []
    taker = threading.Thread(target=lambda: taken.append(mask.bits()))
    taker.start()
    assert taken == []
    may_end.set()
    worker.join()
    taker.join()
    assert taken[0] is BITS


def test_what_computing_raises_reaches_the_taker_only() -> None:
    def compute() -> UInt32Array:
        raise InvalidRequest("too complex", field="grammar")

    mask = TokenMask(compute)
    mask.compute()
    with pytest.raises(InvalidRequest, match="too complex"):
        mask.bits()


def test_a_dropped_mask_is_never_computed() -> None:
    calls: list[int] = []

    def compute() -> UInt32Array:
        calls.append(1)
        return BITS

    mask = TokenMask(compute)
    mask.drop()
    mask.compute()
    with pytest.raises(RuntimeError):
        mask.bits()
    assert calls == []
    taken = TokenMask(compute)
    taken.compute()
    taken.drop()
    assert taken.bits() is BITS
