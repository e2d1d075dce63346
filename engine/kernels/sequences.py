"""Sequences of a packed batch as attention kernels read them: a few small arrays on the device.

Shape suffixes: B sequences, M blocks per table.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.batch import ForwardBatch, Int32Array, Int64Array
from engine.upload import uploaded

# Of an H100 or H200, where there is no device to ask.
_ASSUMED_PROCESSORS = 132


@functools.cache
def num_processors_of(device: torch.device) -> int:
    """Multiprocessors or compute units."""
    if device.type != "cuda":
        return _ASSUMED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Some sequences of one step, all with new tokens.

    starts: [B] int32, first row of the packed batch.  lengths: [B] int32, new tokens.
    seq_lens: [B] int32, tokens of context including the new ones.
    block_tables: [B, M] int32; entries beyond a sequence's blocks mean nothing.
    max_length, max_seq_len: the largest of each, known without asking the device.
    num_processors: of the device that computes them.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    max_length: int
    max_seq_len: int
    num_processors: int
    _host_lengths: Int64Array
    _host_seq_lens: Int64Array
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: ForwardBatch, members: Int64Array, device: torch.device) -> Sequences:
        """members: [B] sequences of the batch, at least one."""
        return cls.of_arrays(
            batch.cu_seqlens_q[members],
            np.diff(batch.cu_seqlens_q)[members],
            batch.seq_lens[members],
            batch.block_tables[members],
            device,
        )

    @classmethod
    def of_arrays(
        cls,
        starts: Int32Array,
        lengths: Int32Array,
        seq_lens: Int32Array,
        block_tables: Int32Array,
        device: torch.device,
        *,
        num_processors: int | None = None,
    ) -> Sequences:
        """Arrays as the fields of the same name, on the host.  num_processors: None: the device's."""

        def to(array: Int32Array) -> torch.Tensor:
            return uploaded(np.ascontiguousarray(array, np.int32), device)

        return cls(
            starts=to(starts),
            lengths=to(lengths),
            seq_lens=to(seq_lens),
            block_tables=to(block_tables),
            max_length=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            num_processors=num_processors or num_processors_of(device),
            _host_lengths=lengths.astype(np.int64),
            _host_seq_lens=seq_lens.astype(np.int64),
        )

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self._host_lengths)

    def tiles(self, rows: int) -> torch.Tensor:
        """[tiles, 2] int32: the sequence of each tile of new tokens and its first one there, counted from 0.

        A tile has `rows` tokens of one sequence, or the rest. Those with the most context come first, because
        they take longest. Computed once per step and tile size.
        """
        if rows not in self._tiles:
            counts = -(-self._host_lengths // rows)
            sequences = np.repeat(np.arange(len(counts)), counts)
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            cached = (self._host_seq_lens - self._host_lengths)[sequences]
            order = np.argsort(-(cached + within * rows), kind="stable")
            table = np.stack([sequences[order], within[order] * rows], axis=1).astype(np.int32)
            self._tiles[rows] = uploaded(table, self.starts.device)
        return self._tiles[rows]
