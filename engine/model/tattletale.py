"""A model without weights that tells on its cache: one wrong KV value changes the very next token.

KV of a token: small integers, exact in every dtype, hashed from the KV of the token before it, the
token, its position and its scale step; so each hangs on the whole prefix. Next token: a hash over all KV
of the sequence in logical order (layer, key or value, head, token, dim), the position and the seed.
Nothing else is remembered: whatever a transfer, a block table or a scheduler gets wrong, shows.

Owns these two rules and their runner. A tattle-tale tests what moves KV, never arithmetic.

Shape suffixes: T tokens, L layers, 2 keys and values, K kv heads, h head dim.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import StepOutput
from engine.stored import Stored

if TYPE_CHECKING:
    from engine.batch import ForwardBatch, Int64Array
    from engine.kv_cache import KVCache
    from engine.step_runner import OnLayers

Int8Array = NDArray[np.int8]

# Each byte to one of -8 .. 8, as the byte of an int8. Zero is left out: a cache begins with zeros, and
# the sign of a zero could flip unseen.
_SMALL = bytes((byte % 16 - 8 + (byte % 16 >= 8)) & 0xFF for byte in range(256))
# What stands for everything that no token stores.
_UNSOUND = 0
# Of every token, where it is wanted.
LOGPROB = -0.5


def kv_of(before: bytes, token_id: int, position: int, size: int, rope_step: int = 0) -> bytes:
    """KV of one token: `size` int8 in the order [L, 2, K, h].

    before: that of the token before it; empty for the first.
    """
    digest = hashlib.shake_128(before + struct.pack("<QLL", token_id, position, rope_step)).digest(size)
    return digest.translate(_SMALL)


def next_token(kv_TL2Kh: Int8Array, position: int, seed: int, vocab_size: int) -> int:
    """The token at `position` of a sequence with this KV, below vocab_size; a greedy row's seed is 0."""
    logical = kv_TL2Kh.transpose(1, 2, 3, 0, 4).tobytes()
    return zlib.crc32(struct.pack("<QQ", position, seed) + logical) % vocab_size


class TattleTaleRunner:
    """Runs steps on a real cache, with the input and the output of engine.runner.ModelRunner."""

    def __init__(self, cache: KVCache, vocab_size: int) -> None:
        shape = cache.shape
        self.cache = cache
        self._vocab_size = vocab_size
        self._shape = (shape.num_layers, 2, shape.num_kv_heads, shape.head_dim)
        self._size = math.prod(self._shape)

    def run(self, batch: ForwardBatch, stored: OnLayers | None = None) -> StepOutput:
        """Stores the KV of the batch's tokens and samples its logits_rows; stored: as of ModelRunner."""
        for num_layers in self.store_layers(batch):
            if stored is not None:
                stored(num_layers, Stored(self.cache.written()))
        output = self.sample(batch)
        if not len(batch.logits_rows):
            # Nothing was read back that would have waited for the device.
            self.cache.synchronize()
        return output

    def store_layers(self, batch: ForwardBatch) -> Iterator[int]:
        """Stores the KV of the batch's tokens layer by layer; yields after each how many hold it."""
        values_TL2Kh = self._kv(batch)
        blocks, offsets = self._places(batch.slot_mapping)
        for layer in range(self.cache.shape.num_layers):
            values_T2Kh = torch.from_numpy(values_TL2Kh[:, layer]).to(self.cache.device)
            self.cache.layer(layer)[blocks, :, :, offsets] = values_T2Kh.to(self.cache.shape.dtype)
            yield layer + 1

    def sample(self, batch: ForwardBatch) -> StepOutput:
        """What the step yields, once all layers are stored."""
        token_ids = self._sample(batch)
        return StepOutput(
            step_id=batch.step_id,
            token_ids=np.array(token_ids, np.int64),
            logprobs=np.where(batch.sampling.want_logprobs, np.float32(LOGPROB), np.float32(0)),
            finite=np.ones(len(token_ids), np.bool_),
        )

    def warm_up(self) -> None:
        """Nothing is initialised late here."""

    def _kv(self, batch: ForwardBatch) -> Int8Array:
        """[T, L, 2, K, h]: KV of the batch's tokens, from what the cache has of the ones before."""
        starts = batch.positions[batch.cu_seqlens_q[:-1]]
        sequences = np.arange(batch.num_sequences)
        before_TL2Kh = self._read(self._slots(batch, sequences, np.maximum(starts - 1, 0)))
        token_ids, positions = batch.token_ids.tolist(), batch.positions.tolist()
        bounds = batch.cu_seqlens_q.tolist()
        steps = [0] * len(token_ids) if batch.rope_steps is None else batch.rope_steps.tolist()
        kv: list[bytes] = []
        for sequence, (first, end) in enumerate(pairwise(bounds)):
            row = before_TL2Kh[sequence].tobytes() if positions[first] else b""
            for index in range(first, end):
                row = kv_of(row, token_ids[index], positions[index], self._size, steps[index])
                kv.append(row)
        return np.frombuffer(b"".join(kv), np.int8).reshape(-1, *self._shape)

    def _sample(self, batch: ForwardBatch) -> list[int]:
        if not len(batch.logits_rows):
            return []
        sequences = np.searchsorted(batch.cu_seqlens_q, batch.logits_rows, side="right") - 1
        lengths = batch.positions[batch.logits_rows] + 1
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        kv_TL2Kh = self._read(self._slots(batch, np.repeat(sequences, lengths), positions))
        sampling = batch.sampling
        seeds = np.where(sampling.temperature > 0, sampling.seed, 0)
        contexts = zip(np.split(kv_TL2Kh, ends[:-1]), sampling.position, seeds, strict=True)
        return [next_token(kv, position, seed, self._vocab_size) for kv, position, seed in contexts]

    def _slots(self, batch: ForwardBatch, sequences: Int64Array, positions: Int64Array) -> Int64Array:
        size = self.cache.shape.block_size
        return batch.block_tables[sequences, positions // size].astype(np.int64) * size + positions % size

    def _read(self, slots_T: Int64Array) -> Int8Array:
        blocks, offsets = self._places(slots_T)
        stored = self.cache.logical[blocks, :, :, :, offsets].float().cpu().numpy()
        with np.errstate(invalid="ignore"):
            values_TL2Kh = stored.astype(np.int8)
        # A damaged value may be anything; what matters is that it does not pass for a sound one.
        values_TL2Kh[values_TL2Kh != stored] = _UNSOUND
        return values_TL2Kh

    def _places(self, slots_T: Int64Array) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, offsets = np.divmod(slots_T, self.cache.shape.block_size)
        device = self.cache.device
        return torch.from_numpy(blocks).to(device), torch.from_numpy(offsets).to(device)
