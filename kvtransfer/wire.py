"""The frame: a fixed binary header, then raw KV bytes.

    offset  bytes  field
         0      4  magic "BKVF"
         4      2  version (1)
         6      2  header length (52)
         8      4  frame index
        12      4  first block, counted in the sender's blocks from the start of the sequence
        16      4  number of blocks
        20      4  number of valid tokens; only the last block may be partial
        24      2  first layer
        26      2  number of layers
        28      1  dtype code
        29      1  layout code, plus 128 if layers come first
        30      2  block size, in tokens
        32      2  number of key/value heads
        34      2  head dim
        36      8  payload length, in bytes
        44      8  xxh3_64 of bytes [0, 44) and the payload

All integers are little endian. The payload is [num_blocks, num_layers, 2,
num_kv_heads, block_size, head_dim] for HND, with heads and tokens swapped for
NHD; element bytes are those of a little-endian machine. Where layers come first,
it is [num_layers, num_blocks, 2, ...]: each frame is in the order in which its
sender found it, and says so.

Owns these bytes and their verification. Must not know caches, leases or torch.
Nothing is allocated for a frame before all its limits are checked.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvtransfer.contract import KvFormat

if sys.byteorder != "little":  # the payload is copied as it lies in memory
    raise ImportError("kvtransfer needs a little-endian machine")

MAGIC = b"BKVF"
VERSION = 1
_FIELDS = struct.Struct("<4sHHIIIIHHBBHHHQ")
_DIGEST = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _DIGEST.size

_DTYPE_CODES = {"float32": 1, "bfloat16": 2, "float16": 3}
_LAYOUT_CODES = {"HND": 1, "NHD": 2}
_LAYERS_FIRST = 128


class FrameError(Exception):
    """A frame that cannot be used; `reason` is a short stable word for counters.

    Never leaves kvtransfer: the receiver asks for the frame again.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSpec:
    """Which part of a sequence's KV a frame carries.

    index: number of the frame within its transfer.
    first_block: in the sender's blocks, counted from the start of the sequence.
    num_tokens: valid tokens from the start of first_block.
    """

    index: int
    first_block: int
    num_blocks: int
    num_tokens: int
    first_layer: int
    num_layers: int

    def payload_bytes(self, fmt: KvFormat) -> int:
        """Bytes of the payload in the sender's format."""
        return self.num_blocks * self.num_layers * fmt.layer_block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """What a receiver is willing to take.

    num_tokens: tokens of the sequence; no block may begin at or after its end.
    max_payload_bytes: largest payload; one block of one layer is always taken.
    """

    num_tokens: int
    max_payload_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A verified frame. `payload` is a view of the buffer it was decoded from.

    layers_first: whether it is [layers, blocks, ...] rather than [blocks, layers, ...].
    """

    spec: FrameSpec
    payload: memoryview
    layers_first: bool = False


def encode_header(
    spec: FrameSpec,
    fmt: KvFormat,
    runs: Sequence[memoryview],
    *,
    layers_first: bool = False,
    has_digest: bool = True,
) -> bytes:
    """The header that goes before a payload in the given format.

    runs: the payload in pieces, in order, each a contiguous view of bytes. Header and payload stay
    apart so that a transport joins them where it needs them, with a single copy.
    """
    num_bytes = sum(run.nbytes for run in runs)
    if num_bytes != spec.payload_bytes(fmt):
        raise AssertionError(f"payload has {num_bytes} bytes, {spec.payload_bytes(fmt)} expected")
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        spec.index,
        spec.first_block,
        spec.num_blocks,
        spec.num_tokens,
        spec.first_layer,
        spec.num_layers,
        _DTYPE_CODES[fmt.dtype],
        _LAYOUT_CODES[fmt.layout] | (_LAYERS_FIRST if layers_first else 0),
        fmt.block_size,
        fmt.num_kv_heads,
        fmt.head_dim,
        num_bytes,
    )
    return fields + _DIGEST.pack(_digest(fields, runs) if has_digest else 0)


def _digest(fields: bytes | memoryview, runs: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64(fields)
    for run in runs:
        digest.update(run)
    return int(digest.intdigest())


def decode(
    header: bytes | memoryview,
    payload: memoryview,
    fmt: KvFormat,
    limits: FrameLimits,
    *,
    has_digest: bool = True,
) -> Frame:
    """Verifies a frame against the announced format and the limits; raises FrameError."""
    view = memoryview(header)
    if len(view) < HEADER_BYTES:
        raise FrameError("truncated", f"a header of {len(view)} bytes is too short")
    spec, layers_first, payload_bytes = _header(view, fmt)
    _check_range(spec, fmt, limits)
    if not payload_bytes == payload.nbytes == spec.payload_bytes(fmt):
        raise FrameError("length", f"frame {spec.index} disagrees with its header about its length")
    (expected,) = _DIGEST.unpack_from(view, _FIELDS.size)
    if has_digest and _digest(view[: _FIELDS.size], (payload,)) != expected:
        raise FrameError("digest", f"frame {spec.index} does not match its digest")
    return Frame(spec, payload, layers_first)


def claimed_bytes(header: bytes) -> int:
    """Length of the payload as an unverified header has it; 0 if it is no header."""
    return int(_FIELDS.unpack_from(header)[-1]) if len(header) >= HEADER_BYTES else 0


def _header(view: memoryview, fmt: KvFormat) -> tuple[FrameSpec, bool, int]:
    """What the frame carries, whether layers come first, and the length of its payload."""
    magic, version, header_bytes, *rest = _FIELDS.unpack_from(view)
    if (magic, version, header_bytes) != (MAGIC, VERSION, HEADER_BYTES):
        raise FrameError("magic", "not a frame of this version")
    index, first_block, num_blocks, num_tokens, first_layer, num_layers, dtype, layout, *sizes, length = rest
    layers_first = bool(layout & _LAYERS_FIRST)
    carried = [dtype, layout & ~_LAYERS_FIRST, *sizes]
    announced = [
        _DTYPE_CODES[fmt.dtype],
        _LAYOUT_CODES[fmt.layout],
        fmt.block_size,
        fmt.num_kv_heads,
        fmt.head_dim,
    ]
    if carried != announced:
        raise FrameError("format", f"frame format {carried} is not the announced {announced}")
    spec = FrameSpec(
        index=index,
        first_block=first_block,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        first_layer=first_layer,
        num_layers=num_layers,
    )
    return spec, layers_first, length


def _check_range(spec: FrameSpec, fmt: KvFormat, limits: FrameLimits) -> None:
    start = spec.first_block * fmt.block_size
    end = min(limits.num_tokens, start + spec.num_blocks * fmt.block_size)
    last_start = start + (spec.num_blocks - 1) * fmt.block_size
    if spec.num_blocks == 0 or last_start >= limits.num_tokens or start + spec.num_tokens != end:
        raise FrameError("tokens", f"frame {spec.index} covers tokens outside the sequence")
    if spec.num_layers == 0 or spec.first_layer + spec.num_layers > fmt.num_layers:
        raise FrameError("layers", f"frame {spec.index} covers layers the model does not have")
    if spec.payload_bytes(fmt) > max(limits.max_payload_bytes, fmt.layer_block_bytes):
        raise FrameError("size", f"frame {spec.index} is larger than {limits.max_payload_bytes} bytes")
