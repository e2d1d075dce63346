"""What routers say of their workers while these are struck: what is lost is known, and when it was said."""

from __future__ import annotations

import asyncio

import grpc.aio

from baton.v1.admin_service_pb2 import (
    GetClusterStatusRequest,
    GetClusterStatusResponse,
    PairState,
    WorkerStatus,
)
from baton.v1.admin_service_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from benchmarks.chaos.sight import Sight

GUARD_S = 20.0
DECODE = ("decode-0", "decode-0")
PAIR = ("prefill-0", "decode-0")


class Router(AdminServiceServicer):
    """Says what it is told to, and counts how often it was asked."""

    def __init__(self) -> None:
        self.workers: list[WorkerStatus] = []
        self.num_asked = 0

    async def GetClusterStatus(  # noqa: N802 - gRPC name
        self, request: GetClusterStatusRequest, context: object
    ) -> GetClusterStatusResponse:
        del request, context
        self.num_asked += 1
        return GetClusterStatusResponse(workers=self.workers)

    async def say(self, *workers: WorkerStatus) -> None:
        """Returns once whoever asks has heard it."""
        self.workers = list(workers)
        # The first of these may have been under way, and the third is asked once the second was heard.
        heard_at = self.num_asked + 3
        while self.num_asked < heard_at:
            await asyncio.sleep(0.005)


def decode(pid: int, state: str = "ready") -> WorkerStatus:
    return WorkerStatus(name="decode-0", state=state, pid=pid)


def prefill(transport: str) -> WorkerStatus:
    return WorkerStatus(
        name="prefill-0", state="ready", pid=7, pairs=[PairState(worker="decode-0", transport=transport)]
    )


async def test_what_a_router_has_lost_is_known_and_since_when() -> None:
    router, server = Router(), grpc.aio.server()
    add_AdminServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(GUARD_S), Sight({"router-0": f"127.0.0.1:{port}"}) as sight:

            def lost_at(edge: tuple[str, str], since: float) -> float | None:
                return sight.lost_at(edge, ["router-0"], since)

            await router.say(prefill("shm"), decode(1))
            began_at = clock()
            await router.say(prefill("shm"), decode(1, "lost"))
            lost = lost_at(DECODE, began_at)
            assert lost is not None
            assert began_at < lost < clock()
            # One that is back is no loss, and neither is one that comes.
            back_at = clock()
            await router.say(prefill("shm"), decode(1))
            assert lost_at(DECODE, back_at) is None
            # Another process of its name is one, though the name was there all the time.
            await router.say(prefill("shm"), decode(2))
            assert lost_at(DECODE, back_at) is not None
            assert lost_at(PAIR, began_at) is None
            await router.say(prefill(""), decode(2))
            assert lost_at(PAIR, began_at) is not None
            assert lost_at(DECODE, began_at) == lost
            assert sight.lost_at(DECODE, ["router-1"], 0.0) is None
    finally:
        await server.stop(None)
