"""FramePlan: how the KV of one sequence is cut into frames.

Owns the arithmetic only. Must not know caches, the wire format's bytes, or time.

A frame carries whole blocks of the sender in all layers or in some, whatever fills
max_frame_bytes best. A single block of a single layer is the smallest frame, whatever
its size.
Blocks that lie wholly inside the tokens the receiver already holds do not
travel.

The last chunk of a prompt is cut by layers while it is still computed:

    chunk     1           2           3 (last)
    layer 0   [  frame  ] [  frame  ] [ frame ]
          1   [    1    ] [    2    ] [   3   ]
          2   [         ] [         ] [ frame ]
          3   [         ] [         ] [   4   ]

A frame then has at most a tenth of the layers, so that it waits for no more than these:
they may all have been launched on a device that is still at the first. If it fits, it has
no fewer, so that a message's fixed cost stays small. What is left when the last layer is
computed is about a tenth of one chunk.
"""

from __future__ import annotations

from baton.limits import blocks_needed
from kvtransfer.contract import KvFormat
from kvtransfer.wire import FrameSpec

MAX_FRAME_BYTES = 1 << 20
# Of a chunk that is sent by layers.
MAX_LAYER_GROUPS = 10
# How many groups of layers above the fewest are tried, for frames that are better filled.
_MORE_GROUPS = 3


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
        self._max_frame_bytes = max_frame_bytes
        self._end_block = blocks_needed(num_tokens, fmt.block_size)
        # Blocks before it are cut, and of those from it on the layers before _next_layer.
        self._next_block = num_held_tokens // fmt.block_size
        self._next_layer = 0
        if num_held_tokens == num_tokens:
            self._next_block = self._end_block
        self.frames: list[FrameSpec] = []

    @property
    def is_complete(self) -> bool:
        """Whether every block has been cut into frames."""
        return self._next_block == self._end_block

    def advance(self, num_computed_tokens: int, num_stored_layers: int = 0) -> list[FrameSpec]:
        """The further frames that can be sent now.

        num_computed_tokens: leading tokens whose KV is there in all layers. Only whole blocks of
            them are cut, until the sequence is complete; then the partial last one too.
        num_stored_layers: leading layers in which the KV of all tokens of the sequence is there.
        """
        num_before = len(self.frames)
        if self._next_layer == 0:
            self._cut_blocks(num_computed_tokens)
        if num_computed_tokens >= self._num_tokens:
            self._cut_layers(self._format.num_layers)
        else:
            for end_layer in self._group_ends(num_stored_layers):
                self._cut_layers(end_layer)
        return self.frames[num_before:]

    def _cut_blocks(self, num_computed_tokens: int) -> None:
        end_block = num_computed_tokens // self._format.block_size
        if num_computed_tokens >= self._num_tokens:
            end_block = self._end_block
        if end_block > self._next_block:
            self._cut(self._next_block, end_block, 0, self._format.num_layers)
            self._next_block = end_block

    def _group_ends(self, num_stored_layers: int) -> list[int]:
        """The ends of the groups of layers that are full; the last one is, whatever its size."""
        num_layers = self._format.num_layers
        group = -(-num_layers // MAX_LAYER_GROUPS)
        ends = range(self._next_layer + group, num_stored_layers + 1, group)
        is_last_full = num_stored_layers == num_layers and self._next_layer < num_layers
        return sorted({*ends, num_layers} if is_last_full else ends)

    def _cut_layers(self, end_layer: int) -> None:
        """Cuts layers up to that one, of all blocks that are left."""
        if not self.is_complete:
            self._cut(self._next_block, self._end_block, self._next_layer, end_layer)
            self._next_layer = end_layer
        if end_layer == self._format.num_layers:
            self._next_block = self._end_block

    def _cut(self, first_block: int, end_block: int, first_layer: int, end_layer: int) -> None:
        """Cuts a rectangle of blocks and layers into frames, as few as max_frame_bytes allows."""
        num_frame_blocks, num_frame_layers = self._frame_size(
            end_block - first_block, end_layer - first_layer
        )
        for block in range(first_block, end_block, num_frame_blocks):
            num_blocks = min(num_frame_blocks, end_block - block)
            for layer in range(first_layer, end_layer, num_frame_layers):
                self._add(block, num_blocks, layer, min(num_frame_layers, end_layer - layer))

    def _frame_size(self, num_blocks: int, num_layers: int) -> tuple[int, int]:
        """(blocks, layers) of a frame, so that the rectangle takes the fewest frames.

        A frame holds so many (block, layer) cells. With all layers it may hold a block and a half, of which
        the half is lost; with a third of the layers it holds four of such thirds.
        """
        num_cells = max(1, self._max_frame_bytes // self._format.layer_block_bytes)
        least = -(-num_layers // num_cells)
        sizes = []
        for num_groups in range(least, min(num_layers, least + _MORE_GROUPS) + 1):
            layers = -(-num_layers // num_groups)
            blocks = min(num_blocks, max(1, num_cells // layers))
            num_frames = -(-num_blocks // blocks) * -(-num_layers // layers)
            sizes.append((num_frames, num_groups, blocks, layers))
        _, _, blocks, layers = min(sizes)
        return blocks, layers

    def _add(self, first_block: int, num_blocks: int, first_layer: int, num_layers: int) -> None:
        start = first_block * self._format.block_size
        end = min(self._num_tokens, start + num_blocks * self._format.block_size)
        self.frames.append(
            FrameSpec(
                index=len(self.frames),
                first_block=first_block,
                num_blocks=num_blocks,
                num_tokens=end - start,
                first_layer=first_layer,
                num_layers=num_layers,
            )
        )
