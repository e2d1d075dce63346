"""What holds for tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _widened(operand: Any) -> Any:
    if operand.dtype != tl.bfloat16:
        return operand
    return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as 16-bit integers, and its tl.dot would multiply those."""
    dot = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def silent_arithmetic() -> Iterator[None]:
    """As on a device: numpy warns of infinities and NaN, which tests make on purpose."""
    with np.errstate(all="ignore"):
        yield
