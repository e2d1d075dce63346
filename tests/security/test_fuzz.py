"""Whatever comes to the doors and to the parser of frames, they answer in their own words, soon, and go on.

tests/security/test_fuzz_long.py has the same with more examples.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from baton.v1.inference_service_pb2 import GenerateRequest
from kvtransfer.wire import FrameError
from tests.kvtransfer.test_wire import FORMAT, LIMITS, frame_of, read
from tests.security.fuzzing import (
    EXPECTED,
    FEW,
    FEWER,
    PATHS,
    SCHEMA,
    TYPED,
    Served,
    asked,
    bodies,
    forged,
    posted,
    requests,
)

GOOD = GenerateRequest(text="hello", max_tokens=1).SerializeToString()


@SCHEMA.parametrize()
@FEWER
def test_requests_of_the_documents_shape_are_answered(doors: Served, case: Any) -> None:
    answer = case.call(base_url=doors.url, timeout=20)
    assert answer.status_code in EXPECTED, (answer.status_code, answer.text[:500])
    if answer.status_code >= 400 and case.path not in ("/health", "/ready"):
        error = answer.json()["error"]
        assert error["message"]
        assert "internal error" not in error["message"]


@FEW
@given(path=st.sampled_from(PATHS), body=bodies())
def test_any_json_is_answered(doors: Served, path: str, body: Any) -> None:
    status, text = posted(doors, path, body)
    assert status in EXPECTED, (status, text)


@FEW
@given(request=requests())
def test_any_message_is_answered_with_a_typed_status(doors: Served, request: GenerateRequest) -> None:
    status, code = asyncio.run(asked(doors.address, request.SerializeToString()))
    assert status in TYPED
    assert status is grpc.StatusCode.OK or code, "an error without a code of ours"


@FEW
@given(payload=st.binary(max_size=200))
def test_bytes_that_are_no_message_end_the_call_and_nothing_else(doors: Served, payload: bytes) -> None:
    try:
        GenerateRequest.FromString(payload)
    except DecodeError:
        expected = {(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")}
    else:
        expected = {(status, code) for status in TYPED for code in ("", "INVALID_REQUEST", "UNKNOWN_MODEL")}
    assert asyncio.run(asked(doors.address, payload)) in expected
    assert asyncio.run(asked(doors.address, GOOD)) == (grpc.StatusCode.OK, "")


@FEW
@given(
    changes=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=6),
    length=st.integers(0, 600),
)
def test_a_forged_frame_is_refused_or_within_its_bounds(changes: list[tuple[int, int]], length: int) -> None:
    frame = forged(frame_of(), changes, length)
    tracemalloc.start()
    try:
        spec = read(frame, FORMAT, LIMITS).spec
    except FrameError:
        spec = None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # Whatever length it claims, no memory is taken for it.
    assert peak < 64 * 1024
    # 30 tokens in blocks of 4, and 3 layers.
    assert spec is None or spec.first_block + spec.num_blocks <= 8
    assert spec is None or spec.first_layer + spec.num_layers <= 3
