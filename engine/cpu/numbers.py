"""Numbers as kernels for CPUs handle them: addresses, bfloat16, and an exponential that vectorizes.

Every function here is compiled by numba and used inside of kernels only. NaN and infinity stay what they are.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# What may be rearranged in sums; nothing that would let the compiler forget NaN or infinity.
FAST: Final = frozenset({"reassoc", "contract", "nsz"})
# A compiled function without options of its own takes those of whoever is compiled when it is first called.
exact: Final = njit(forceinline=True, fastmath=False, error_model="numpy")
fast: Final = njit(forceinline=True, fastmath=set(FAST), error_model="numpy")
_I32: Final = ir.IntType(32)
_F32: Final = ir.FloatType()


def _pointer(element: Any) -> Any:
    """An intrinsic (address, offset): int64, in bytes and in elements."""
    kind = types.CPointer(element)

    @intrinsic
    def pointer(_context, _address, _offset):
        return kind(types.int64, types.int64), _generator(kind)

    return pointer


def _generator(kind: Any) -> Any:
    def generate(context, builder, _signature, arguments):
        base = builder.inttoptr(arguments[0], context.get_value_type(kind))
        return builder.gep(base, [arguments[1]])

    return generate


def _bits(source: Any, target: Any, llvm: ir.Type) -> Any:
    """An intrinsic that reads the bits of one type as another."""

    @intrinsic
    def reinterpreted(_context, _value):
        def generate(_context, builder, _signature, arguments):
            return builder.bitcast(arguments[0], llvm)

        return target(source), generate

    return reinterpreted


floats_at: Final = _pointer(types.float32)
int32_at: Final = _pointer(types.int32)
int64_at: Final = _pointer(types.int64)
_bits_of: Final = _bits(types.float32, types.int32, _I32)
float_of: Final = _bits(types.int32, types.float32, _F32)


@intrinsic(prefer_literal=True)
def elements_at(_context, _address, _offset, num_bytes):
    """Elements of a tensor: (address, offset, num_bytes), where 2 bytes are a bfloat16 and 4 a float32."""
    kind = types.CPointer(types.uint16 if num_bytes.literal_value == 2 else types.float32)
    return kind(types.int64, types.int64, num_bytes), _generator(kind)


@intrinsic
def wide(_context, element):
    """The float32 of such an element."""

    def generate(_context, builder, _signature, arguments):
        if element == types.float32:
            return arguments[0]
        bits = builder.shl(builder.zext(arguments[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(bits, _F32)

    return types.float32(element), generate


@exact
def _bfloat16(x):
    """The bits of the bfloat16 nearest to x, ties to even; NaN stays one."""
    bits = np.uint32(_bits_of(x))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if x == x else np.uint16(0x7FC0)  # noqa: PLR0124


@exact
def put(target, index, x):
    """Stores a float32 as an element of the target's kind."""
    _put(target, index, x, _bfloat16(x))


@intrinsic
def _put(_context, target, _index, x, bits):
    """Of both forms of a number the one that fits."""

    def generate(_context, builder, _signature, arguments):
        value = arguments[2] if target.dtype == types.float32 else arguments[3]
        builder.store(value, builder.gep(arguments[0], [arguments[1]]))
        return _context.get_dummy_value()

    return types.void(target, types.int64, x, bits), generate


# Below it exp() is taken to be e^-87: a weight of 1e-38 of the largest is none.
_LOWEST: Final = np.float32(-87.0)
_LOG2_E: Final = np.float32(1.4426950408889634)
# Added to a float it leaves the nearest whole number in the lowest bits.
_ROUNDER: Final = np.float32(12582912.0)
_EXPONENT: Final = np.int32(23)
_ONE: Final = np.int32(0x3F800000)
# ln(2)^n / n!: the series of 2^f, at most 4e-6 off for |f| <= 1/2.
_C1: Final = np.float32(0.6931471805599453)
_C2: Final = np.float32(0.2402265069591007)
_C3: Final = np.float32(0.05550410866482158)
_C4: Final = np.float32(0.009618129107628477)
_C5: Final = np.float32(0.0013333558146428441)
_C6: Final = np.float32(0.00015403530393381606)
_C7: Final = np.float32(0.00001525273380405984)
_TOP: Final = np.float32(88.0)


@exact
def exp(x):
    """e^x within 1e-6 of it for -87 <= x <= 88; outside as at the nearest of them."""
    low = max(x, _LOWEST)
    y = (min(low, _TOP)) * _LOG2_E
    shifted = y + _ROUNDER
    f = y - (shifted - _ROUNDER)
    p = _C7
    for c in (_C6, _C5, _C4, _C3, _C2, _C1, np.float32(1.0)):
        p = p * f + c
    return p * float_of((_bits_of(shifted) << _EXPONENT) + _ONE)


@exact
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return np.float32(1.0) / (np.float32(1.0) + exp(-x))


@fast
def total(x, n):
    """Sum of n floats."""
    s = np.float32(0.0)
    for i in range(n):
        s += x[i]
    return s


@exact
def largest(x, n):
    """The largest of n floats, NaN if there is a positive one.

    By whole numbers of the same order: of floats the comparison would have to mind NaN, one by one.
    """
    most = np.int32(-0x80000000)
    for i in range(n):
        bits = _bits_of(x[i])
        most = max(most, bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return float_of(most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@exact
def exponentials(x, most, n):
    """Replaces n floats by e^(x - most); those that are not finite stay so."""
    for i in range(n):
        x[i] = exp(x[i] - most)
