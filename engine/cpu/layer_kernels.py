"""What a layer computes between its products: residual and norm, rotation, gate, the store of KV.

Each factory gives a kernel for tensors of num_bytes per element (2: bfloat16, 4: float32), made once; inside
all is fp32. A row is computed by one thread, in an order that does not hang on the other rows: a token's
numbers are the same in every batch.

Shape suffixes: T tokens, D hidden, F intermediate, N heads of q and k, M heads of all, h head_dim.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.cpu.numbers import elements_at, exact, fast, float_of, floats_at, int64_at, put, sigmoid, wide
from engine.cpu.team import Kernel, num_threads, thread_index

_GELU_IN = np.float32(0.7978845608028654)
_GELU_CUBE = np.float32(0.044715)


@exact
def share(count):
    """(first, end): the part of so many rows that is the calling thread's."""
    threads = np.int64(num_threads())
    index = np.int64(thread_index())
    return count * index // threads, count * (index + 1) // threads


@fast
def _inverse_rms(x, n, eps):
    square = np.float32(0.0)
    for i in range(n):
        square += x[i] * x[i]
    return np.float32(1.0) / np.sqrt(square / np.float32(n) + eps)


@cache
def residual_kernel(num_bytes: int) -> Kernel:
    """hidden + norm(delta), and the norm of that: see residual()."""

    def body(a):
        rows, width, eps = a[0], a[1], float_of(np.int32(a[2]))
        hidden, delta, summed, normed = a[3], a[4], a[5], a[6]
        post, weight = floats_at(a[7], 0), floats_at(a[8], 0)
        first, end = share(rows)
        for row in range(first, end):
            x = floats_at(hidden, row * width)
            if delta:
                y = elements_at(delta, row * width, num_bytes)
                z = floats_at(summed, row * width)
                if a[7]:
                    for i in range(width):
                        z[i] = wide(y[i])
                    scale = _inverse_rms(z, width, eps)
                    for i in range(width):
                        z[i] = x[i] + z[i] * scale * post[i]
                else:
                    for i in range(width):
                        z[i] = x[i] + wide(y[i])
                x = z
            if normed:
                out = elements_at(normed, row * width, num_bytes)
                scale = _inverse_rms(x, width, eps)
                for i in range(width):
                    put(out, i, x[i] * scale * weight[i])

    return Kernel(body)


@cache
def rotation_kernel(num_bytes: int, head_dim: int) -> Kernel:
    """Norms and turns the first N of M heads in place: see rotate()."""
    half = head_dim // 2

    def body(a):
        rows, heads, all_heads, eps = a[0], a[1], a[2], float_of(np.int32(a[3]))
        first, end = share(rows)
        for row in range(first, end):
            cos, sin = floats_at(a[5], row * head_dim), floats_at(a[6], row * head_dim)
            for head in range(heads):
                x = elements_at(a[4], (row * all_heads + head) * head_dim, num_bytes)
                turned = floats_at(a[8], np.int64(thread_index()) * 2 * head_dim)
                y = floats_at(a[8], np.int64(thread_index()) * 2 * head_dim + head_dim)
                for i in range(head_dim):
                    y[i] = wide(x[i])
                if a[7]:
                    weight = floats_at(a[7], head * head_dim)
                    scale = _inverse_rms(y, head_dim, eps)
                    for i in range(head_dim):
                        y[i] = y[i] * scale * weight[i]
                for i in range(half):
                    turned[i] = y[i] * cos[i] + y[i + half] * sin[i]
                for i in range(half):
                    turned[i + half] = y[i + half] * cos[i + half] + y[i] * sin[i + half]
                for i in range(head_dim):
                    put(x, i, turned[i])

    return Kernel(body)


@cache
def gate_kernel(num_bytes: int, *, is_silu: bool) -> Kernel:
    """activation(gate) * up: see gate()."""

    def body(a):
        rows, width = a[0], a[1]
        first, end = share(rows)
        for row in range(first, end):
            x = elements_at(a[2], 2 * row * width, num_bytes)
            up = elements_at(a[2], (2 * row + 1) * width, num_bytes)
            out = elements_at(a[3], row * width, num_bytes)
            for i in range(width):
                g = wide(x[i])
                z = g
                if not is_silu:
                    z = np.float32(2.0) * _GELU_IN * (g + _GELU_CUBE * g * g * g)
                put(out, i, g * sigmoid(z) * wide(up[i]))

    return Kernel(body)


@cache
def store_kernel(num_bytes: int) -> Kernel:
    """Copies new keys and values into their slots: see store()."""

    def body(a):
        rows, heads, head_dim, from_row = a[0], a[1], a[2], a[3]
        source, target = a[4], a[5]
        block_stride, pair_stride, head_stride, token_stride, block_size = a[6], a[7], a[8], a[9], a[10]
        first, end = share(rows)
        for row in range(first, end):
            slot = int64_at(a[11], row)[0]
            base = slot // block_size * block_stride + slot % block_size * token_stride
            for pair in range(2):
                for head in range(heads):
                    x = elements_at(source, row * from_row + (pair * heads + head) * head_dim, num_bytes)
                    y = elements_at(target, base + pair * pair_stride + head * head_stride, num_bytes)
                    for i in range(head_dim):
                        y[i] = x[i]

    return Kernel(body)
