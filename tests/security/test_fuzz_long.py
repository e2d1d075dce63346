"""tests/security/test_fuzz.py with twenty times as many examples, other ones each time."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1.inference_service_pb2 import GenerateRequest
from kvtransfer.wire import FrameError
from tests.kvtransfer.test_wire import FORMAT, LIMITS, frame_of, read
from tests.security.fuzzing import (
    EXPECTED,
    MANY,
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

pytestmark = pytest.mark.long


@SCHEMA.parametrize()
@MANY
def test_requests_of_the_documents_shape(doors: Served, case: Any) -> None:
    answer = case.call(base_url=doors.url, timeout=20)
    assert answer.status_code in EXPECTED, (answer.status_code, answer.text[:500])


@MANY
@given(path=st.sampled_from(PATHS), body=bodies())
def test_any_json(doors: Served, path: str, body: Any) -> None:
    status, text = posted(doors, path, body)
    assert status in EXPECTED, (status, text)


@MANY
@given(payload=requests().map(GenerateRequest.SerializeToString) | st.binary(max_size=2_000))
def test_any_message(doors: Served, payload: bytes) -> None:
    status, code = asyncio.run(asked(doors.address, payload))
    assert status in TYPED
    assert status is grpc.StatusCode.OK or code, "an error without a code of ours"


@MANY
@given(
    changes=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=6),
    length=st.integers(0, 600),
)
def test_forged_frames(changes: list[tuple[int, int]], length: int) -> None:
    try:
        spec = read(forged(frame_of(), changes, length), FORMAT, LIMITS).spec
    except FrameError:
        return
    assert spec.first_block + spec.num_blocks <= 8
    assert spec.first_layer + spec.num_layers <= 3
