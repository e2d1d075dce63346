"""What tests of the doors throw at them: strategies, and both doors on a thread of their own.

Owns no judgement; tests/security/test_fuzz.py says what an answer may be.
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from pathlib import Path
from typing import Any

import grpc
import httpx
import hypothesis
import schemathesis
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from baton.rpc import CODE_KEY, open_channel
from baton.v1.inference_service_pb2 import GenerateRequest
from tests.fakes import until
from tests.router.http.door import Door, door
from tests.security.openapi import BODIES, document
from tests.security.test_without_a_key import served

FEW = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# Making one of a schema of that size takes longer than asking.
FEWER = settings(FEW, max_examples=10)
# Other ones each time.
MANY = settings(FEW, max_examples=500, derandomize=False)
# What a client of HTTP meets: answers, its own mistakes, and a server that is full. Never a defect.
EXPECTED = {200, 400, 401, 404, 405, 408, 413, 415, 422, 429, 431, 503}
SCHEMA = schemathesis.openapi.from_dict(document())
PATHS = [*BODIES]
# Of a frame's digest: kvtransfer/wire.py.
DIGEST_AT, DIGEST_END = 44, 52
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


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ["model", "prompt", "messages", "max_tokens", "n", "stop", "stream", "tools", "logprobs", "seed"]


def bodies() -> st.SearchStrategy[Any]:
    """Objects with names that there are, of any JSON, or any JSON instead."""
    return st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6) | JSON


def posted(doors: Served, path: str, body: Any) -> tuple[int, str]:
    """Status and text of the answer to that body, with NaN and infinities as Python writes them."""
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    answer = httpx.post(doors.url + path, content=content, headers=headers, timeout=20)
    return answer.status_code, answer.text[:500]


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


def forged(frame: bytes, changes: list[tuple[int, int]], length: int) -> bytes:
    """A frame with those bytes changed, cut to that length, and a digest that fits: by who knows the format.

    changes: (offset, value) of each; offsets wrap.
    """
    made = bytearray(frame[:length].ljust(DIGEST_END, b"\0"))
    for offset, value in changes:
        made[offset % len(made)] = value
    digest = xxhash.xxh3_64_intdigest(bytes(made[:DIGEST_AT]) + bytes(made[DIGEST_END:]))
    made[DIGEST_AT:DIGEST_END] = struct.pack("<Q", digest)
    return bytes(made)
