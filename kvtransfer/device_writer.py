"""Moving KV from the payload of a frame into a cache on a device.

Owns the device's copy of a payload, and which of its blocks go which way. Must not know leases, streams of
bytes or time. Where tokens lie on both sides is kvtransfer/scatter.py's knowledge.

A payload is uploaded once, as it came. Whole blocks are spread and converted by a kernel; cut ones, and all
where block sizes differ or there is no kernel, by torch's indexing on the device.

Shape suffixes: N blocks, L layers, T the two of keys and values, H kv heads, S slots of a block, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.kv_cache import KVCache
from engine.model.kv_range import narrowed
from kvtransfer.contract import KvFormat
from kvtransfer.conversion import DTYPES
from kvtransfer.scatter import BlockWriter, block_runs, blocks_of, logical
from kvtransfer.side_stream import SideStream, Stream
from kvtransfer.wire import Frame

if TYPE_CHECKING:
    from engine.kernels.choices import Choices


def writer_of(cache: KVCache, choices: Choices | None = None) -> BlockWriter | DeviceWriter:
    """The writer for a cache, by the device it is on. choices: as of DeviceWriter."""
    return BlockWriter(cache) if cache.device.type == "cpu" else DeviceWriter(cache, choices)


class DeviceWriter:
    """Writes received frames into one cache. Not for use by two threads at once.

    choices: of the engine's kernels; None where it computes without them.

    On a stream of its own, because that of the steps may be a whole step behind. write() sleeps until the
    values are there, so a step that is launched later finds them.
    """

    def __init__(self, cache: KVCache, choices: Choices | None, *, stream: Stream | None = None) -> None:
        self._target_NLTHSD = cache.logical
        self._stream = stream or SideStream(cache.device)
        self._scatter = None if choices is None else _scatter(choices)
        self._room = torch.empty(0, dtype=torch.uint8, device=cache.device)

    def write(
        self, fmt: KvFormat, block_ids: Sequence[int], frame: Frame, *, num_held_tokens: int = 0
    ) -> int:
        """As BlockWriter.write()."""
        spec = frame.spec
        start = spec.first_block * fmt.block_size
        tokens = range(max(start, num_held_tokens), start + spec.num_tokens)
        with self._stream.behind(None):
            values = self._uploaded(frame.payload).view(DTYPES[fmt.dtype])
            source_NLTHSD = logical(values, fmt, frame)
            self._spread(source_NLTHSD, block_ids, frame, tokens)
            return self._num_saturated(source_NLTHSD, slice(tokens.start - start, tokens.stop - start))

    def _uploaded(self, payload: memoryview) -> torch.Tensor:
        if len(self._room) < payload.nbytes:
            self._room = torch.empty(payload.nbytes, dtype=torch.uint8, device=self._room.device)
        return self._room[: payload.nbytes].copy_(torch.from_numpy(np.frombuffer(payload, np.uint8)))

    def _spread(
        self, source_NLTHSD: torch.Tensor, block_ids: Sequence[int], frame: Frame, tokens: range
    ) -> None:
        """As BlockWriter does; values that change their type do so by engine/model/kv_range.py's rule."""
        spec, target_NLTHSD = frame.spec, self._target_NLTHSD
        source_size, target_size = source_NLTHSD.shape[4], target_NLTHSD.shape[4]
        layers = slice(spec.first_layer, spec.first_layer + spec.num_layers)
        for firsts, count in block_runs(tokens, source_size, target_size):
            ids = list(block_ids[blocks_of(firsts, target_size)])
            rows_NLTHSD = source_NLTHSD[blocks_of(firsts, source_size, spec.first_block)]
            if self._scatter is not None and count == source_size == target_size:
                ids_N = torch.tensor(ids, dtype=torch.int32, device=source_NLTHSD.device)
                self._scatter(rows_NLTHSD, ids_N, target_NLTHSD[:, layers])
            else:
                first = firsts.start % source_size
                piece = narrowed(rows_NLTHSD[..., first : first + count, :], target_NLTHSD.dtype)
                first = firsts.start % target_size
                target_NLTHSD[ids, layers, :, :, first : first + count] = piece

    def _num_saturated(self, source_NLTHSD: torch.Tensor, tokens: slice) -> int:
        if self._target_NLTHSD.dtype != torch.float16 or source_NLTHSD.dtype == torch.float16:
            return 0
        excess_NLTHSD = source_NLTHSD.to(torch.float16).isinf() & source_NLTHSD.isfinite()
        return int(excess_NLTHSD.sum(dim=(1, 2, 3, 5)).reshape(-1)[tokens].sum())


def _scatter(choices: Choices) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]:
    # Triton is there only where the engine has kernels.
    from engine.kernels.block_copy import scatter_blocks  # noqa: PLC0415

    return partial(scatter_blocks, choices=choices)
