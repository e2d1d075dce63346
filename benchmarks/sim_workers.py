"""Simulated workers that a real router takes for real ones: their ports, announcements, and process.

    async with sim_workers(FleetSpec(redis_url=..., num_prefill=4, num_decode=4, ...)) as fleet:
        ...

    with SimProcess() as process:
        process.start(FleetSpec(...))

Each worker has a port, an incarnation and a session per router of its own; KV goes from one to the other as
a call, so all workers of a cluster live in one process. SimProcess is that process, asked over a pipe. What
a worker says and when is in benchmarks/sim_prefill.py and benchmarks/sim_decode.py. Knows no router.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Self

from baton.identity import Identity
from baton.ports import WorkerInfo
from baton.registry import Announcement, RedisRegistry
from baton.rpc_server import Registration, RpcServer
from baton.sessions import serving_session
from baton.v1 import common_pb2
from baton.v1.decode_service_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from baton.v1.prefill_service_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server
from benchmarks.child import Child
from benchmarks.sim_costs import SimCosts, SimSizes
from benchmarks.sim_decode import SimDecode
from benchmarks.sim_prefill import SimPrefill

# Announcements outlive every turn of a busy event loop, and are refreshed three times as often.
_TTL_S = 30.0


@dataclass(slots=True)
class SimFleet:
    """The simulated workers of one cluster, by name."""

    prefills: dict[str, SimPrefill] = field(default_factory=dict)
    decodes: dict[str, SimDecode] = field(default_factory=dict)
    infos: dict[str, WorkerInfo] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """What the workers hold, and what they have done so far, in all."""
        prefills, decodes = self.prefills.values(), self.decodes.values()
        return {
            "prefill_attempts": sum(worker.num_attempts for worker in prefills),
            "decode_attempts": sum(worker.num_attempts for worker in decodes),
            "used_blocks": sum(worker.num_used_blocks for worker in decodes),
            "prompts": sum(worker.num_prompts for worker in prefills),
            "tokens": sum(worker.num_tokens for worker in decodes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Which workers to simulate. fingerprint: of the model that the router serves, serialized."""

    redis_url: str = field(repr=False)
    namespace: str
    fingerprint: bytes
    num_prefill: int
    num_decode: int
    costs: SimCosts = field(default_factory=SimCosts)
    sizes: SimSizes = field(default_factory=SimSizes)


@asynccontextmanager
async def sim_workers(spec: FleetSpec) -> AsyncIterator[SimFleet]:
    """Runs the workers in this process, announced, until the block is left."""
    rng, fleet = random.SystemRandom(), SimFleet()
    by_incarnation: dict[int, SimDecode] = {}
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        registry = await stack.enter_async_context(RedisRegistry(spec.redis_url, spec.namespace))
        announced: list[Announcement] = []
        running = [group.create_task(_keep(announced), name="announce")]
        for index in range(spec.num_decode):
            identity = _identity(f"decode-{index}", common_pb2.ROLE_DECODE, spec, rng)
            decode = SimDecode(identity, costs=spec.costs, sizes=spec.sizes, rng=rng)
            fleet.decodes[identity.name] = by_incarnation[identity.incarnation] = decode
            info = await _serving(stack, "decode", decode)
            fleet.infos[identity.name], decode.transfer_address = info, info.address
            running.append(group.create_task(decode.run(), name=f"run-{identity.name}"))
        for index in range(spec.num_prefill):
            identity = _identity(f"prefill-{index}", common_pb2.ROLE_PREFILL, spec, rng)
            prefill = SimPrefill(identity, by_incarnation, costs=spec.costs, sizes=spec.sizes)
            fleet.prefills[identity.name] = prefill
            fleet.infos[identity.name] = await _serving(stack, "prefill", prefill)
            running.append(group.create_task(prefill.run(), name=f"run-{identity.name}"))
        announced += [Announcement(registry, info, _TTL_S) for info in fleet.infos.values()]
        for announcement in announced:
            await announcement.refresh()
        try:
            yield fleet
        finally:
            for task in running:
                task.cancel()
            for announcement in announced:
                await announcement.withdraw()


async def _keep(announced: list[Announcement]) -> None:
    """One after another: all at once they would want a connection each."""
    while True:
        await asyncio.sleep(_TTL_S / 3)
        for announcement in announced:
            await announcement.refresh()


def _identity(name: str, role: common_pb2.Role.ValueType, spec: FleetSpec, rng: random.Random) -> Identity:
    return Identity.draw(name, role, common_pb2.Fingerprint.FromString(spec.fingerprint), rng)


async def _serving(stack: AsyncExitStack, role: str, worker: SimPrefill | SimDecode) -> WorkerInfo:
    """Serves a worker on a port of its own until the stack is left."""
    server = await stack.enter_async_context(await RpcServer.start([_registration(worker)]))
    await server.set_health(ready=True)
    identity = worker.identity
    return WorkerInfo(name=identity.name, role=role, incarnation=identity.incarnation, address=server.address)


def _registration(worker: SimPrefill | SimDecode) -> Registration:
    add: Callable[..., None]
    if isinstance(worker, SimPrefill):
        add, servicer = add_PrefillServiceServicer_to_server, _PrefillServicer(worker)
        return Registration(name="baton.v1.PrefillService", add=partial(add, servicer))
    return Registration(
        name="baton.v1.DecodeService",
        add=partial(add_DecodeServiceServicer_to_server, _DecodeServicer(worker)),
    )


class _PrefillServicer(PrefillServiceServicer):
    def __init__(self, worker: SimPrefill) -> None:
        self._worker = worker

    async def Session(  # type: ignore[override]  # noqa: N802 - gRPC name
        self, request_iterator: Any, context: Any
    ) -> None:
        async with serving_session(request_iterator, context) as session:
            await self._worker.serve(session)


class _DecodeServicer(DecodeServiceServicer):
    def __init__(self, worker: SimDecode) -> None:
        self._worker = worker

    async def Session(  # type: ignore[override]  # noqa: N802 - gRPC name
        self, request_iterator: Any, context: Any
    ) -> None:
        async with serving_session(request_iterator, context) as session:
            await self._worker.serve(session)


class SimProcess:
    """A process that simulates the workers of any number of clusters, one per namespace; close() it."""

    def __init__(self) -> None:
        self._child = Child(_host)
        self.pid: int = self._child.hear()

    def start(self, spec: FleetSpec) -> dict[str, WorkerInfo]:
        """Starts a cluster's workers; returns them by name once all are announced."""
        infos: dict[str, WorkerInfo] = self._child.ask(spec)
        return infos

    def counts(self, namespace: str) -> dict[str, int]:
        """What the workers of a cluster hold and have done."""
        counts: dict[str, int] = self._child.ask(("counts", namespace))
        return counts

    def stop(self, namespace: str) -> None:
        """Ends a cluster's workers."""
        self._child.ask(("stop", namespace))

    def close(self) -> None:
        """Ends the process and all workers in it. Idempotent."""
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _host(pipe: Connection) -> None:
    asyncio.run(_Host(pipe).run())


class _Host:
    """The process's own end: does what is asked, one thing after another."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._stacks: dict[str, AsyncExitStack] = {}
        self._fleets: dict[str, SimFleet] = {}

    async def run(self) -> None:
        """Until the pipe ends."""
        readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), readable.set)
        self._pipe.send(os.getpid())
        while True:
            await readable.wait()
            readable.clear()
            while self._pipe.poll():
                try:
                    asked = self._pipe.recv()
                except EOFError:
                    await self._stop_all()
                    return
                self._pipe.send(await self._answer(asked))

    async def _answer(self, asked: Any) -> Any:
        match asked:
            case FleetSpec():
                stack = self._stacks[asked.namespace] = AsyncExitStack()
                self._fleets[asked.namespace] = await stack.enter_async_context(sim_workers(asked))
                return self._fleets[asked.namespace].infos
            case ("counts", namespace):
                return self._fleets[namespace].counts()
            case ("stop", namespace):
                del self._fleets[namespace]
                await self._stacks.pop(namespace).aclose()
                return True
        raise ValueError(f"unknown question {asked!r}")

    async def _stop_all(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        for stack in self._stacks.values():
            await stack.aclose()
