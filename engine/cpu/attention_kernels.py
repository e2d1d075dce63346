"""Attention of single new tokens over the paged cache.

A sequence's context is read where it lies, block by block, once for the G queries that share a kv head. It is
cut into parts of PART tokens, which threads share; what they found is put together by the weights of their
largest scores (online softmax, Milakov and Gimelshein 2018). The cuts do not hang on the batch, and so a
token's numbers do not either.

Shape suffixes: H query heads, K kv heads, G = H / K, h head_dim, b block_size.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

from engine.cpu.layer_kernels import share
from engine.cpu.numbers import (
    elements_at,
    exp,
    exponentials,
    float_of,
    floats_at,
    int32_at,
    int64_at,
    largest,
    put,
    total,
    wide,
)
from engine.cpu.team import Kernel, barrier, num_threads, thread_index

PART = 256
# Fields of a task: row of the batch, sequence of the block tables, first and end position.
TASK_FIELDS = 4


def floats_per_part(group: int, head_dim: int) -> int:
    """What a part leaves of each kv head: largest score and sum of each query, and its weighted values."""
    return group * (2 + head_dim)


def floats_per_thread(group: int, head_dim: int) -> int:
    """Room that a thread works in: queries, and their scores of a part."""
    return group * (head_dim + PART)


@njit(inline="always")
def _score(q, k, scores, num_tokens, stride, group, head_dim):
    """Scores of tokens of one block, each against all queries."""
    for t in range(num_tokens):
        for g in range(group):
            s = np.float32(0.0)
            for i in range(head_dim):
                s += q[g * head_dim + i] * wide(k[t * stride + i])
            scores[g * PART + t] = s


@njit(inline="always")
def _weigh(scores, v, values, num_tokens, stride, group, head_dim):
    """Adds the values of tokens of one block; four at a time: sums are read and written less often."""
    fours = num_tokens - num_tokens % 4
    for t in range(0, fours, 4):
        for i in range(head_dim):
            v0, v1 = wide(v[t * stride + i]), wide(v[(t + 1) * stride + i])
            v2, v3 = wide(v[(t + 2) * stride + i]), wide(v[(t + 3) * stride + i])
            for g in range(group):
                at = g * PART + t
                first = scores[at] * v0 + scores[at + 1] * v1
                values[g * head_dim + i] += first + (scores[at + 2] * v2 + scores[at + 3] * v3)
    for t in range(fours, num_tokens):
        for i in range(head_dim):
            v0 = wide(v[t * stride + i])
            for g in range(group):
                values[g * head_dim + i] += scores[g * PART + t] * v0


@njit(inline="always")
def _put_together(partial, first, end, stride, out, group, head_dim, num_bytes):
    """The answer of one kv head's queries from parts first to end of its sequence, stride floats apart."""
    for g in range(group):
        most = floats_at(partial, first * stride)[g]
        for part in range(first + 1, end):
            other = floats_at(partial, part * stride)[g]
            # Once NaN, it stays so.
            most = max(most, other)
        whole = floats_at(partial, first * stride)
        values = floats_at(partial, first * stride + 2 * group + g * head_dim)
        weight = exp(whole[g] - most)
        weights = weight * whole[group + g]
        for i in range(head_dim):
            values[i] *= weight
        for part in range(first + 1, end):
            found = floats_at(partial, part * stride)
            weight = exp(found[g] - most)
            weights += weight * found[group + g]
            for i in range(head_dim):
                values[i] += weight * found[2 * group + g * head_dim + i]
        inverse = np.float32(1.0) / weights
        target = elements_at(out, g * head_dim, num_bytes)
        for i in range(head_dim):
            put(target, i, values[i] * inverse)


@cache
def decode_kernel(num_bytes: int, head_dim: int, group: int) -> Kernel:
    """Of tasks over kv heads: see engine.cpu.paged_decode.PagedDecode."""
    left = floats_per_part(group, head_dim)
    room = floats_per_thread(group, head_dim)

    def body(a):
        num_tasks, heads, num_rows, scale = a[0], a[1], a[2], float_of(np.int32(a[3]))
        tables, width = a[7], a[8]
        block_stride, value_offset, head_stride, token_stride, block_size = a[10], a[11], a[12], a[13], a[14]
        threads, index = np.int64(num_threads()), np.int64(thread_index())
        q = floats_at(a[18], index * room)
        for unit in range(index, num_tasks * heads, threads):
            head, task = unit % heads, int64_at(a[15], TASK_FIELDS * (unit // heads))
            begin, count = task[2], task[3] - task[2]
            blocks = int32_at(tables, task[1] * width)
            given = elements_at(a[4], task[0] * a[5] + head * group * head_dim, num_bytes)
            for i in range(group * head_dim):
                q[i] = wide(given[i]) * scale
            done = np.int64(0)
            while done < count:
                at = (begin + done) % block_size
                num_tokens = min(block_size - at, count - done)
                base = blocks[(begin + done) // block_size] * block_stride + at * token_stride
                k = elements_at(a[9], base + head * head_stride, num_bytes)
                scores = floats_at(a[18], index * room + group * head_dim + done)
                _score(q, k, scores, num_tokens, token_stride, group, head_dim)
                done += num_tokens
            found = floats_at(a[17], unit * left)
            values = floats_at(a[17], unit * left + 2 * group)
            for g in range(group):
                of_query = floats_at(a[18], index * room + group * head_dim + g * PART)
                found[g] = largest(of_query, count)
                exponentials(of_query, found[g], count)
                found[group + g] = total(of_query, count)
            for i in range(group * head_dim):
                values[i] = np.float32(0.0)
            done = np.int64(0)
            while done < count:
                at = (begin + done) % block_size
                num_tokens = min(block_size - at, count - done)
                base = blocks[(begin + done) // block_size] * block_stride + at * token_stride
                v = elements_at(a[9], base + value_offset + head * head_stride, num_bytes)
                scores = floats_at(a[18], index * room + group * head_dim + done)
                _weigh(scores, v, values, num_tokens, token_stride, group, head_dim)
                done += num_tokens
        barrier()
        begin, end = share(num_rows * heads)
        for unit in range(begin, end):
            row, head = unit // heads, unit % heads
            parts = int64_at(a[16], row)
            at = int64_at(a[15], TASK_FIELDS * parts[0])[0]
            out = a[6] + (at * heads + head) * group * head_dim * num_bytes
            partial = a[17] + 4 * head * left
            _put_together(partial, parts[0], parts[1], heads * left, out, group, head_dim, num_bytes)

    return Kernel(body, is_fast=True)
