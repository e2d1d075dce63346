"""FramePlan: how the KV of one sequence is cut into frames.

Owns the arithmetic only. Must not know caches, the wire format's bytes, or time.

A frame carries whole blocks of the sender: as many blocks of all layers as fit
into max_frame_bytes, or, when a single block does not fit, some of its layers.
A single block of a single layer is the smallest frame, whatever its size.
Blocks that lie wholly inside the tokens the receiver already holds do not
travel.
"""

from __future__ import annotations

from baton.limits import blocks_needed
from kvtransfer.contract import KvFormat
from kvtransfer.wire import FrameSpec

MAX_FRAME_BYTES = 1 << 20


class FramePlan:
    """Cuts one sequence into consecutively numbered frames as its tokens are computed.

    num_tokens: tokens whose KV the receiver must have in the end.
    num_held_tokens: leading tokens it already has.
    """

    def __init__(
        self,
        fmt: KvFormat,
        *,
        num_tokens: int,
        num_held_tokens: int = 0,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        if not 0 <= num_held_tokens <= num_tokens:
            raise ValueError(f"num_held_tokens is {num_held_tokens}, outside 0..{num_tokens}")
        self._format = fmt
        self._num_tokens = num_tokens
        self._next_block = num_held_tokens // fmt.block_size
        if num_held_tokens == num_tokens:
            self._next_block = blocks_needed(num_tokens, fmt.block_size)
        self._num_frame_layers = min(fmt.num_layers, max(1, max_frame_bytes // fmt.layer_block_bytes))
        self._num_frame_blocks = max(1, max_frame_bytes // (fmt.num_layers * fmt.layer_block_bytes))
        self.frames: list[FrameSpec] = []

    @property
    def is_complete(self) -> bool:
        """Whether every block has been cut into frames."""
        return self._next_block == blocks_needed(self._num_tokens, self._format.block_size)

    def advance(self, num_computed_tokens: int) -> list[FrameSpec]:
        """The further frames that can be sent once that many tokens are computed.

        Only whole blocks, until the sequence is complete; then the partial last one too.
        """
        if num_computed_tokens >= self._num_tokens:
            end_block = blocks_needed(self._num_tokens, self._format.block_size)
        else:
            end_block = num_computed_tokens // self._format.block_size
        num_before = len(self.frames)
        while self._next_block < end_block:
            num_blocks = min(self._num_frame_blocks, end_block - self._next_block)
            self._cut(num_blocks)
            self._next_block += num_blocks
        return self.frames[num_before:]

    def _cut(self, num_blocks: int) -> None:
        start = self._next_block * self._format.block_size
        end = min(self._num_tokens, start + num_blocks * self._format.block_size)
        for first_layer in range(0, self._format.num_layers, self._num_frame_layers):
            self.frames.append(
                FrameSpec(
                    index=len(self.frames),
                    first_block=self._next_block,
                    num_blocks=num_blocks,
                    num_tokens=end - start,
                    first_layer=first_layer,
                    num_layers=min(self._num_frame_layers, self._format.num_layers - first_layer),
                )
            )
