"""A model without weights that tells on its cache: one wrong value changes the very next token.

KV of a token: small integers, exact in every dtype, derived by a hash from the
KV of the token before it, the token and its position. Next token: a hash over all KV
of the sequence in logical order (layer, key or value, head, token, dim), the position
and the request's seed. Nothing else is remembered, so all of it must be in the cache.

Shape suffixes: T tokens, L layers, 2 keys and values, K kv heads, h head dim.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import ForwardBatch, StepOutput
from engine.kv_cache import KVCache

VOCAB = 97
# Any byte to one of -8 .. 8, as the byte of an int8.
_SMALL = bytes((value % 17 - 8) & 0xFF for value in range(256))
# Not a value that any token has: what was never written shows.
POISON = 77


def kv_of(before: bytes, token_id: int, position: int, size: int) -> bytes:
    """KV of one token as int8 in the order [L, 2, K, h]; `before` is that of the token before it."""
    digest = hashlib.shake_128(before + struct.pack("<II", token_id, position)).digest(size)
    return digest.translate(_SMALL)


def next_token(kv_TL2Kh: NDArray[np.int8], position: int, seed: int) -> int:
    """The token at `position`, after a sequence with this KV."""
    logical = kv_TL2Kh.transpose(1, 2, 3, 0, 4).tobytes()
    return zlib.crc32(struct.pack("<IQ", position, seed) + logical) % VOCAB


def answer(
    prompt: Sequence[int],
    max_tokens: int,
    seed: int,
    stop_token_ids: Sequence[int],
    shape: tuple[int, ...],
) -> list[int]:
    """What an undisturbed generation yields, computed from the tokens alone. shape: L, 2, K, h."""
    size = int(np.prod(shape))
    token_ids, kv = list(prompt), [b""]
    for position, token_id in enumerate(prompt):
        kv.append(kv_of(kv[-1], token_id, position, size))
    while len(token_ids) < len(prompt) + max_tokens:
        stored = np.frombuffer(b"".join(kv), np.int8).reshape(-1, *shape)
        token_id = next_token(stored, len(token_ids), seed)
        kv.append(kv_of(kv[-1], token_id, len(token_ids), size))
        token_ids.append(token_id)
        if token_id in stop_token_ids:
            break
    return token_ids[len(prompt) :]


class TattleTaleRunner:
    """A StepRunner over a real cache.

    wait: sleeps for the cost of a batch; what the step writes, it writes after that.
    observe: called before and after each step, when every block must be accounted for.
    """

    last_progress = 0.0

    def __init__(
        self,
        cache: KVCache,
        wait: Callable[[ForwardBatch], Awaitable[None]],
        observe: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._wait = wait
        self._observe = observe
        shape = cache.shape
        self._shape = (shape.num_layers, 2, shape.num_kv_heads, shape.head_dim)
        self._size = int(np.prod(self._shape))
        cache.logical.fill_(POISON)
        self._values = _Values(cache)

    async def execute(self, batch: ForwardBatch) -> StepOutput:
        """Runs one step."""
        self._observe()
        await self._wait(batch)
        for sequence in range(batch.num_sequences):
            self._store(batch, sequence)
        token_ids = [self._sample(batch, index) for index in range(len(batch.logits_rows))]
        self._observe()
        return StepOutput(
            step_id=batch.step_id,
            token_ids=np.array(token_ids, np.int64),
            logprobs=np.full(len(token_ids), -0.5, np.float32),
            finite=np.ones(len(token_ids), np.bool_),
            duration_s=0.0,
        )

    def _store(self, batch: ForwardBatch, sequence: int) -> None:
        first, end = batch.cu_seqlens_q[sequence : sequence + 2]
        start = int(batch.positions[first])
        kv = [b"" if start == 0 else self._read(batch, sequence, start - 1, start).tobytes()]
        for row in range(first, end):
            kv.append(kv_of(kv[-1], int(batch.token_ids[row]), int(batch.positions[row]), self._size))
        stored = np.frombuffer(b"".join(kv[1:]), np.int8).reshape(-1, *self._shape)
        self._values.write(batch.slot_mapping[first:end], stored)

    def _sample(self, batch: ForwardBatch, index: int) -> int:
        row = int(batch.logits_rows[index])
        sequence = int(np.searchsorted(batch.cu_seqlens_q, row, side="right")) - 1
        kv_TL2Kh = self._read(batch, sequence, 0, int(batch.seq_lens[sequence]))
        sampling = batch.sampling
        return next_token(kv_TL2Kh, int(sampling.position[index]), int(sampling.seed[index]))

    def _read(self, batch: ForwardBatch, sequence: int, start: int, end: int) -> NDArray[np.int8]:
        size = self._cache.shape.block_size
        positions = np.arange(start, end)
        slots = batch.block_tables[sequence][positions // size].astype(np.int64) * size + positions % size
        return self._values.read(slots)


class _Values:
    """The cache's memory as small integers; numpy is quicker than torch for a few hundred of them."""

    def __init__(self, cache: KVCache) -> None:
        self._block_size = cache.shape.block_size
        self._is_bfloat16 = cache.shape.dtype == torch.bfloat16
        data = cache.data.view(torch.uint16) if self._is_bfloat16 else cache.data
        memory = data.numpy()
        self._memory = memory.swapaxes(3, 4) if cache.shape.layout == "NHD" else memory

    def read(self, slots: NDArray[np.int64]) -> NDArray[np.int8]:
        blocks, offsets = np.divmod(slots, self._block_size)
        values = self._memory[blocks, :, :, :, offsets]
        if self._is_bfloat16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):
            small = values.astype(np.int8)
        # A corrupted value may be anything; what matters is that it does not become a sound one.
        small[small != values] = POISON
        return small

    def write(self, slots: NDArray[np.int64], values: NDArray[np.int8]) -> None:
        blocks, offsets = np.divmod(slots, self._block_size)
        if self._is_bfloat16:
            self._memory[blocks, :, :, :, offsets] = (values.astype(np.float32).view(np.uint32) >> 16).astype(
                np.uint16
            )
        else:
            self._memory[blocks, :, :, :, offsets] = values
