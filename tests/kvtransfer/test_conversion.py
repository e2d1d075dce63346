"""Values between dtypes: rounding, saturation, what is not a number; on one thread."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch

from kvtransfer.conversion import DTYPES, Conversion
from tests.kvtransfer.elements import stored, to_bytes

torch.set_num_threads(1)


INF, NAN = float("inf"), float("nan")


def converted(values: list[float], source: str, target: str) -> tuple[list[float], list[int]]:
    """Values after a conversion, and which of them were saturated."""
    payload = memoryview(b"".join(to_bytes(value, source) for value in values))
    bits, excess = Conversion(DTYPES[target]).convert(payload, source)
    result = torch.from_numpy(bits.view(f"i{bits.itemsize}").copy()).view(DTYPES[target])
    return result.tolist(), [] if excess is None else np.flatnonzero(excess).tolist()


def same(ours: list[float], theirs: list[float]) -> bool:
    return np.array_equal(ours, theirs, equal_nan=True) and bool(
        (np.signbit(ours) == np.signbit(theirs))[~np.isnan(ours)].all()
    )


def test_float32_beyond_float16_saturates_with_its_sign_but_nan_and_infinity_stay() -> None:
    # 65520 and above round to infinity in float16: its largest value is 65504, the next step 32 wide.
    values = [65504.0, 65519.0, 65520.0, -1e9, INF, -INF, NAN, 1.0, -65504.0, -65520.0, 3.4e38, -0.0]
    wanted = [65504.0, 65504.0, 65504.0, -65504.0, INF, -INF, NAN, 1.0, -65504.0, -65504.0, 65504.0, -0.0]
    got, saturated = converted(values, "float32", "float16")
    assert same(got, wanted)
    assert saturated == [2, 3, 9, 10]


def test_bfloat16_beyond_float16_saturates_too() -> None:
    values = [65280.0, 65536.0, -65536.0, -INF, NAN, INF]
    got, saturated = converted(values, "bfloat16", "float16")
    assert same(got, [65280.0, 65504.0, -65504.0, -INF, NAN, INF])
    assert saturated == [1, 2]


@pytest.mark.parametrize("values", [[1.0, 2.0, 65536.0], [1.0, 2.0, -65536.0]])
def test_a_single_value_of_either_sign_is_noticed(values: list[float]) -> None:
    got, saturated = converted(values, "float32", "float16")
    assert got == [max(-65504.0, min(value, 65504.0)) for value in values]
    assert saturated == [2]


@pytest.mark.parametrize(("source", "target"), list(product(DTYPES, DTYPES)))
def test_what_is_not_a_number_and_what_is_zero_stay_so_in_any_dtype(source: str, target: str) -> None:
    values = [NAN, INF, -INF, 0.0, -0.0, 1.5]
    got, saturated = converted(values, source, target)
    assert same(got, values)
    assert saturated == []


@pytest.mark.parametrize(
    ("target", "value", "wanted"),
    [
        ("bfloat16", 1 + 2**-8, 1.0),  # a tie, to even
        ("bfloat16", 1 + 3 * 2**-8, 1 + 2**-6),
        ("bfloat16", 1 + 2**-8 + 2**-20, 1 + 2**-7),
        ("float16", 1 + 2**-11, 1.0),
        ("float16", 1 + 3 * 2**-11, 1 + 2**-9),
        ("float16", 2**-24, 2**-24),  # its smallest
        ("float16", 2**-25, 0.0),
    ],
)
def test_float32_is_rounded_to_nearest_ties_to_even(target: str, value: float, wanted: float) -> None:
    assert converted([value, -value], "float32", target) == ([wanted, -wanted], [])


@pytest.mark.parametrize(("source", "target"), list(product(DTYPES, DTYPES)))
def test_many_values_in_one_memory_each_time(source: str, target: str) -> None:
    # More than one piece, then fewer values in what the first have left behind.
    rng = random.Random(3)
    conversion = Conversion(DTYPES[target])
    for count in (33_000, 10, 1):
        values = [stored(rng.uniform(-2.0, 2.0) ** 15, "bfloat16") for _ in range(count)]
        values = [stored(value, source) for value in values]
        bits, _ = conversion.convert(memoryview(b"".join(to_bytes(v, source) for v in values)), source)
        assert bits.tobytes() == b"".join(to_bytes(stored(value, target), target) for value in values)


THREADS_SCRIPT = """
import os, torch
from kvtransfer.conversion import DTYPES, Conversion

torch.set_num_threads(2)
num_before = len(os.listdir("/proc/self/task"))
payload = memoryview(bytes(1 << 20))
for target in DTYPES.values():
    for source in DTYPES:
        Conversion(target).convert(payload, source)
print(len(os.listdir("/proc/self/task")) - num_before)
torch.zeros(1 << 20).bfloat16()
print(len(os.listdir("/proc/self/task")) - num_before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_conversion_stays_on_the_thread_that_calls_it() -> None:
    # The caller is an event loop, and torch's threads are the engine's.
    run = subprocess.run(
        [sys.executable, "-c", THREADS_SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.split() == ["0", "1"]  # the second shows that a thread would have been seen
