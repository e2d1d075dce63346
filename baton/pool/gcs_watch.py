"""Whether Ray's control service, the GCS, answers: asked over its own port, by the standard health service.

Ray's client would wait as long as the service is away, on a thread. Must not import Ray.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.logs import get_logger
from baton.rpc import OpenChannel

ASK_EVERY_S: Final = 1.0
ANSWER_WITHIN_S: Final = 1.0
# One late answer of a busy machine is not a silence.
SILENT_AFTER_MISSES: Final = 2
# A port that refuses for this long has no process behind it.
GONE_AFTER_MISSES: Final = 10

log = get_logger(__name__)


class GcsWatch:
    """Asks every second while run() runs.

    address: host:port of the GCS.
    is_ours: it belongs to a local Ray, and nobody starts it again.
    """

    def __init__(self, address: str, opener: OpenChannel, *, is_ours: bool) -> None:
        self._address = address
        self._opener = opener
        self._is_ours = is_ours
        self._num_misses = 0
        self._num_refusals = 0
        self._missed_since_s = 0.0
        # Set once it has ended for good.
        self.gone = asyncio.Event()
        self._answering = asyncio.Event()
        self._answering.set()

    @property
    def silent_s(self) -> float:
        """How long it has not answered, in seconds; 0 while it does."""
        if self._num_misses < SILENT_AFTER_MISSES:
            return 0.0
        return asyncio.get_running_loop().time() - self._missed_since_s

    async def until_answering(self) -> None:
        """Returns while it answers."""
        await self._answering.wait()

    async def run(self) -> None:
        """Until cancelled."""
        async with self._opener(self._address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                asked_s = asyncio.get_running_loop().time()
                status = await self._ask(stub)
                self._heard(status, asked_s)
                await asyncio.sleep(ASK_EVERY_S)

    async def _ask(self, stub: Any) -> grpc.StatusCode:
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_WITHIN_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def _heard(self, status: grpc.StatusCode, asked_s: float) -> None:
        """Any answer will do, a refusal to tell among them."""
        if status not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            if self._num_misses >= SILENT_AFTER_MISSES:
                log.info("ray control service is back", silent_s=round(self.silent_s, 1))
            self._num_misses = self._num_refusals = 0
            self._answering.set()
            return
        if self._num_misses == 0:
            self._missed_since_s = asked_s
        self._num_misses += 1
        self._num_refusals = self._num_refusals + 1 if status is grpc.StatusCode.UNAVAILABLE else 0
        if self._num_misses == SILENT_AFTER_MISSES:
            self._answering.clear()
            log.warning("ray control service does not answer; workers go on, none is started")
        if self._is_ours and self._num_refusals == GONE_AFTER_MISSES:
            self.gone.set()
            log.error("ray control service has ended; workers go on as long as they live")
