"""The frame's bytes: known layout, round trip, and refusal of everything malformed."""

from __future__ import annotations

import dataclasses
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.contract import KvFormat
from kvtransfer.wire import HEADER_BYTES, Frame, FrameError, FrameLimits, FrameSpec, decode, encode_header

FORMAT = KvFormat(dtype="bfloat16", layout="NHD", block_size=4, num_layers=3, num_kv_heads=2, head_dim=2)
LIMITS = FrameLimits(num_tokens=30, max_payload_bytes=4096)
SPEC = FrameSpec(index=9, first_block=5, num_blocks=3, num_tokens=10, first_layer=1, num_layers=2)
PAYLOAD = bytes(range(192)) * 2  # 3 blocks x 2 layers x 64 bytes


def frame_of(spec: FrameSpec = SPEC, payload: bytes = PAYLOAD, *, layers_first: bool = False) -> bytes:
    return encode_header(spec, FORMAT, [memoryview(payload)], layers_first=layers_first) + payload


def read(buffer: bytes, fmt: KvFormat, limits: FrameLimits) -> Frame:
    return decode(buffer[:HEADER_BYTES], memoryview(buffer)[HEADER_BYTES:], fmt, limits)


def forged(frame: bytes, offset: int, fields: str, *values: object) -> bytes:
    """The frame with header fields replaced and a digest that fits: what a hostile sender can make."""
    head = bytearray(frame[:44])
    struct.pack_into("<" + fields, head, offset, *values)
    digest = xxhash.xxh3_64(bytes(head) + frame[52:]).intdigest()
    return bytes(head) + struct.pack("<Q", digest) + frame[52:]


def test_the_header_is_what_the_docstring_says() -> None:
    frame = frame_of()
    assert frame[:4] == b"BKVF"
    assert struct.unpack("<HHIIIIHHBBHHHQ", frame[4:44]) == (1, 52, 9, 5, 3, 10, 1, 2, 2, 2, 4, 2, 2, 384)
    assert struct.unpack("<Q", frame[44:52])[0] == xxhash.xxh3_64_intdigest(frame[:44] + PAYLOAD)
    assert frame[52:] == PAYLOAD
    assert HEADER_BYTES == 52


def test_a_bit_beside_the_layout_says_that_layers_come_first() -> None:
    frame = frame_of(layers_first=True)
    assert frame[:29] + frame[30:44] == frame_of()[:29] + frame_of()[30:44]
    assert (frame[29], frame_of()[29]) == (0x82, 0x02)
    assert read(frame, FORMAT, LIMITS) == Frame(SPEC, memoryview(PAYLOAD), layers_first=True)
    assert read(forged(frame_of(), 29, "B", 0x82), FORMAT, LIMITS).layers_first


@st.composite
def frames(draw: st.DrawFn) -> tuple[KvFormat, FrameLimits, FrameSpec, bytes]:
    fmt = KvFormat(
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        layout=draw(st.sampled_from(["HND", "NHD"])),
        block_size=draw(st.integers(1, 33)),
        num_layers=draw(st.integers(1, 4)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 5)),
    )
    num_tokens = draw(st.integers(1, 100))
    num_all = -(-num_tokens // fmt.block_size)
    first_block = draw(st.integers(0, num_all - 1))
    num_blocks = draw(st.integers(1, num_all - first_block))
    first_layer = draw(st.integers(0, fmt.num_layers - 1))
    spec = FrameSpec(
        index=draw(st.integers(0, 2**32 - 1)),
        first_block=first_block,
        num_blocks=num_blocks,
        num_tokens=min(num_tokens - first_block * fmt.block_size, num_blocks * fmt.block_size),
        first_layer=first_layer,
        num_layers=draw(st.integers(1, fmt.num_layers - first_layer)),
    )
    payload = draw(st.randoms(use_true_random=False)).randbytes(spec.payload_bytes(fmt))
    return fmt, FrameLimits(num_tokens=num_tokens, max_payload_bytes=len(payload)), spec, payload


@settings(max_examples=100, deadline=None)
@given(case=frames(), layers_first=st.booleans())
def test_a_frame_round_trips(
    case: tuple[KvFormat, FrameLimits, FrameSpec, bytes], *, layers_first: bool
) -> None:
    fmt, limits, spec, payload = case
    header = encode_header(spec, fmt, [memoryview(payload)], layers_first=layers_first)
    frame = read(header + payload, fmt, limits)
    assert frame.spec == spec
    assert frame.layers_first == layers_first
    assert bytes(frame.payload) == payload


def test_any_single_flipped_bit_is_refused() -> None:
    frame = frame_of()
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            read(bytes(flipped), FORMAT, LIMITS)


def test_a_frame_cut_anywhere_or_continued_is_refused() -> None:
    frame = frame_of()
    for length in range(len(frame)):
        with pytest.raises(FrameError):
            read(frame[:length], FORMAT, LIMITS)
    with pytest.raises(FrameError):
        read(frame + b"\0", FORMAT, LIMITS)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for buffer in (noise, b"BKVF" + noise, frame_of()[:20] + noise):
        with pytest.raises(FrameError):
            read(buffer, FORMAT, LIMITS)


@pytest.mark.parametrize(
    ("offset", "fields", "values", "reason"),
    [
        (0, "4s", (b"BKVG",), "magic"),
        (4, "H", (2,), "magic"),
        (6, "H", (60,), "magic"),
        (12, "I", (8,), "tokens"),
        (12, "I", (2**32 - 1,), "tokens"),
        (16, "I", (0,), "tokens"),
        (16, "I", (2**32 - 1,), "tokens"),
        (20, "I", (9,), "tokens"),
        (20, "I", (11,), "tokens"),
        (24, "H", (2,), "layers"),
        (26, "H", (0,), "layers"),
        (26, "H", (3,), "layers"),
        (26, "H", (1,), "length"),
        (28, "B", (1,), "format"),
        (29, "B", (1,), "format"),
        (29, "B", (0x81,), "format"),
        (29, "B", (0x42,), "format"),
        (30, "H", (0,), "format"),
        (32, "H", (1,), "format"),
        (34, "H", (4,), "format"),
        (36, "Q", (2**64 - 1,), "length"),
    ],
)
def test_a_wrong_field_is_refused_even_with_a_fitting_digest(
    offset: int, fields: str, values: tuple[object, ...], reason: str
) -> None:
    with pytest.raises(FrameError) as caught:
        read(forged(frame_of(), offset, fields, *values), FORMAT, LIMITS)
    assert caught.value.reason == reason


def test_a_payload_above_the_limit_is_refused_before_its_digest_is_computed() -> None:
    with pytest.raises(FrameError) as caught:
        read(frame_of(), FORMAT, dataclasses.replace(LIMITS, max_payload_bytes=383))
    assert caught.value.reason == "size"


def test_one_block_of_one_layer_is_taken_whatever_the_limit() -> None:
    spec = FrameSpec(index=0, first_block=0, num_blocks=1, num_tokens=4, first_layer=0, num_layers=1)
    limits = dataclasses.replace(LIMITS, max_payload_bytes=1)
    assert read(frame_of(spec, bytes(64)), FORMAT, limits).spec == spec
