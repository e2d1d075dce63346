"""Whatever comes to the doors, they answer in their own words, soon, and then go on answering."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import pytest
import schemathesis
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.rpc import CODE_KEY, open_channel
from baton.v1.inference_service_pb2 import GenerateRequest
from tests.fakes import until
from tests.router.http.door import Door, door
from tests.security.openapi import document
from tests.security.test_without_a_key import served

FEW = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# What a client of HTTP meets: answers, its own mistakes, and a server that is full. Never a defect.
EXPECTED = {200, 400, 401, 404, 405, 408, 413, 415, 422, 429, 431, 503}
SCHEMA = schemathesis.openapi.from_dict(document())
TYPED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Served:
    """Both doors on a thread of their own, with a cluster in memory behind them."""

    def __init__(self, folder: Path) -> None:
        self.url = self.address = ""
        self._folder = folder
        self._is_up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._door: Door | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        async with door(self._folder) as self._door, await served(self._door) as server:
            self.url, self.address = self._door.url, server.address
            self._is_up.set()
            await self._stop.wait()
            await until(lambda: self._door is not None and self._door.inference.num_requests == 0)
            await self._door.idle()

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._is_up.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "something that was asked is still held"


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@SCHEMA.parametrize()
@FEW
def test_requests_of_the_documents_shape_are_answered(doors: Served, case: Any) -> None:
    answer = case.call(base_url=doors.url, timeout=20)
    assert answer.status_code in EXPECTED, (answer.status_code, answer.text[:500])
    if answer.status_code >= 400 and case.path not in ("/health", "/ready"):
        error = answer.json()["error"]
        assert error["message"]
        assert "internal error" not in error["message"]


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ["model", "prompt", "messages", "max_tokens", "n", "stop", "stream", "tools", "logprobs", "seed"]


@FEW
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6) | JSON,
)
def test_any_json_is_answered(doors: Served, path: str, body: Any) -> None:
    answer = (
        schemathesis.openapi.from_dict(document())[path]["POST"]
        .Case(body=body)
        .call(base_url=doors.url, timeout=20)
    )
    assert answer.status_code in EXPECTED, (answer.status_code, answer.text[:500])


async def asked(address: str, payload: bytes) -> tuple[grpc.StatusCode, str]:
    """Status and code of Generate, given raw bytes."""
    async with open_channel(address) as channel:
        call = channel.unary_stream("/baton.v1.InferenceService/Generate")(payload, timeout=10)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            trailers = dict(error.trailing_metadata() or ())
            return error.code(), str(trailers.get(CODE_KEY, ""))
    return grpc.StatusCode.OK, ""


def requests() -> st.SearchStrategy[GenerateRequest]:
    """Messages with any of their fields, set to anything of the field's type."""
    numbers = st.integers(-(2**31), 2**31 - 1)
    return st.builds(
        built,
        text=st.text(max_size=40),
        ids=st.lists(st.integers(0, 2**32 - 1), max_size=8),
        by_ids=st.booleans(),
        max_tokens=st.integers(0, 40) | st.just(2**32 - 1),
        temperature=st.floats(width=32),
        top_p=st.floats(width=32),
        top_k=numbers,
        n=st.integers(0, 2**32 - 1) | st.integers(0, 4),
        stops=st.lists(st.text(max_size=5), max_size=20),
        salt=st.text(max_size=300),
    )


def built(
    *, text: str, ids: list[int], by_ids: bool, stops: list[str], salt: str, **others: Any
) -> GenerateRequest:
    request = GenerateRequest(stop=stops, cache_salt=salt)
    if by_ids:
        request.token_ids.ids.extend(ids)
    else:
        request.text = text
    for name, value in others.items():
        try:
            setattr(request, name, value)
        except ValueError:
            hypothesis.reject()
    return request


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
        assert asyncio.run(asked(doors.address, payload)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
        )
    else:
        status, _ = asyncio.run(asked(doors.address, payload))
        assert status in TYPED
    alive, _ = asyncio.run(
        asked(doors.address, GenerateRequest(text="hello", max_tokens=1).SerializeToString())
    )
    assert alive is grpc.StatusCode.OK
