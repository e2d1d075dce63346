"""A router that a test plays, on the other end of one worker's session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from baton.errors import BatonError
from baton.identity import Identity
from baton.sampling import SamplingParams
from baton.v1 import common_pb2, decode_service_pb2, prefill_service_pb2
from tests.fakes import FINGERPRINT, GUARD_S, MemorySession

PrefillDown = prefill_service_pb2.PrefillServiceSessionRequest
DecodeDown = decode_service_pb2.DecodeServiceSessionRequest


def sequence(prompt: Sequence[int], outputs: Sequence[int] = (), **fields: Any) -> common_pb2.Sequence:
    remaining_ms, age_ms = fields.pop("remaining_ms", 0), fields.pop("age_ms", 0)
    params = SamplingParams(temperature=0, **({"max_tokens": 5} | fields))
    return common_pb2.Sequence(
        request_id="r",
        token_ids=[*prompt, *outputs],
        num_prompt_tokens=len(prompt),
        sampling=params.to_proto(),
        remaining_ms=remaining_ms,
        age_ms=age_ms,
    )


class PlayedRouter:
    def __init__(self, session: MemorySession, serving: asyncio.Task[None], down: Any) -> None:
        self.session = session
        self.serving = serving
        self._down = down
        self._incoming = aiter(session)
        # What any() met on its way.
        self.cache_changes: list[common_pb2.CacheChanges] = []

    def send(self, **message: Any) -> None:
        self.session.send(self._down(**message))

    async def any(self) -> Any:
        """The next message, heartbeats left out, and what the prefix cache holds."""
        async with asyncio.timeout(GUARD_S):
            while True:
                message = await anext(self._incoming)
                match message.WhichOneof("message"):
                    case "heartbeat":
                        pass
                    case "cache_changes":
                        self.cache_changes.append(message.cache_changes)
                    case _:
                        return message

    async def next(self, kind: str) -> Any:
        """The next message as by any(), which must be of that kind."""
        message = await self.any()
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def heartbeat(self) -> Any:
        async with asyncio.timeout(GUARD_S):
            while True:
                message = await anext(self._incoming)
                match message.WhichOneof("message"):
                    case "heartbeat":
                        return message.heartbeat
                    case "cache_changes":
                        self.cache_changes.append(message.cache_changes)

    async def leave(self) -> None:
        self.session.cut()
        async with asyncio.timeout(GUARD_S):
            await asyncio.wait([self.serving])

    async def refused(self) -> BaseException | None:
        """What the worker's end of the session raised."""
        async with asyncio.timeout(GUARD_S):
            await asyncio.wait([self.serving])
        return self.serving.exception()


@asynccontextmanager
async def routing(worker: Any, down: Any, name: str = "router-0") -> AsyncIterator[PlayedRouter]:
    """Opens a session with a worker whose steps the caller runs."""
    ours, theirs = MemorySession.pair("worker", name)
    serving = asyncio.create_task(worker.serve(theirs), name=f"serve-{name}")
    router = PlayedRouter(ours, serving, down)
    hello = Identity(name=name, role=common_pb2.ROLE_ROUTER, incarnation=9, fingerprint=FINGERPRINT).hello()
    router.send(hello=hello)
    try:
        yield router
    finally:
        ours.cut()
        await asyncio.wait([serving])
        with suppress(BatonError, asyncio.CancelledError):
            serving.result()


@asynccontextmanager
async def stepping(worker: Any) -> AsyncIterator[None]:
    """Runs a worker's steps."""
    task = asyncio.create_task(worker.run(), name="steps")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
