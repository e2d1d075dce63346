"""A storm's world over real servers on the loopback interface: streams, slots, threads and real time.

Owns servers, arenas and clients. A receiver that dies stops its server; a sender that dies has its
connections closed under it, so that it says to nobody that it is quiet.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.rpc_server import Registration, RpcServer
from kvtransfer.contract import Peer
from kvtransfer.sender_thread import SenderThread
from kvtransfer.transports.arena import Arena
from kvtransfer.transports.client import ClientConfig, KvClient
from kvtransfer.transports.service import SERVICE_NAME, KvService
from tests.kvtransfer.stage import identity
from tests.kvtransfer.storm import Storm, StormSpec
from tests.kvtransfer.storm_receiver import ReceiverSide
from tests.kvtransfer.storm_sender import SenderSide, StormTransport

# Fewer than the writes at once would like to have: some get none.
NUM_SLOTS = 14
MAX_PER_WRITE = 4


@dataclass(slots=True)
class _Serving:
    server: RpcServer
    service: KvService
    arena: Arena


class WireWorld:
    """See storm.World. transport: "grpc", "shm" or "nixl"."""

    def __init__(self, spec: StormSpec, transport: str, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._spec = spec
        self._transport = transport
        self._folder = folder
        self._rng = random.Random(spec.seed)
        self._serving: dict[int, _Serving] = {}
        self._senders: dict[int, SenderSide] = {}
        self._clients: dict[int, KvClient] = {}
        self._threads: list[SenderThread] = []
        self._tasks: dict[int, set[asyncio.Task[Any]]] = {}
        self._watch = asyncio.create_task(self._watch_lag())

    async def _watch_lag(self) -> None:
        """A machine that has no time for this process stops it: deadlines may pass, and are excused."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(0.02)
            if loop.time() - began > 0.3 * self._spec.rules.stall_timeout_s:
                self.counts["lags"] += 1
                for sender in self._senders.values():
                    sender.paused_until = loop.time()

    async def add_receiver(self, side: ReceiverSide) -> None:
        arena = Arena(
            NUM_SLOTS,
            self._spec.max_frame_bytes,
            folder=self._folder,
            rng=self._rng,
            name=f"{side.name}-{side.incarnation:016x}",
            max_per_write=MAX_PER_WRITE,
        )
        service = KvService(side.receiver, identity(side.name, side.incarnation), arena)
        server = await RpcServer.start([Registration(name=SERVICE_NAME, add=service.add_to)])
        self._serving[side.incarnation] = _Serving(server, service, arena)

    async def remove_receiver(self, side: ReceiverSide) -> None:
        serving = self._serving.pop(side.incarnation)
        await serving.server.stop()
        serving.arena.close()
        self._count(serving)
        for client in self._clients.values():
            await client.part(side.incarnation)

    def add_sender(self, side: SenderSide) -> None:
        config = ClientConfig(
            transport=self._transport, shm_folder=self._folder, max_frame_bytes=side.max_frame_bytes
        )
        client = self._clients[side.incarnation] = KvClient(
            identity(side.name, side.incarnation),
            side.reader.format,
            offload=self._offload(side),
            memory=side.reader.memory,
            config=config,
        )
        self._tasks[side.incarnation] = set()
        self._senders[side.incarnation] = side
        transport = StormTransport(client, self._travel, only_headers=self._transport == "nixl")
        side.equip(transport, self._spec.rules.stall_timeout_s)

    def _offload(self, side: SenderSide) -> Any:
        """A thread for one sender; for the other the event loop, after a moment in which much may happen."""
        if side.incarnation % 2:
            self._threads.append(SenderThread())
            return self._threads[-1]

        async def later(function: Callable[[], Any]) -> Any:
            await asyncio.sleep(0.002 * self._rng.random())
            return function()

        return later

    async def pair(self, sender: SenderSide, receiver: ReceiverSide) -> None:
        serving = self._serving[receiver.incarnation]
        pairing = await sender.transport.inner.pair(
            Peer(worker=receiver.name, incarnation=receiver.incarnation, address=serving.server.address)
        )
        self.counts[f"paired by {pairing.transport}"] += 1

    async def kill_sender(self, side: SenderSide) -> None:
        client = self._clients.pop(side.incarnation)
        await client.close()
        tasks = self._tasks.pop(side.incarnation)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def spawn(self, side: SenderSide, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine, name=side.name)
        tasks = self._tasks.get(side.incarnation, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def pause(self, side: SenderSide, seconds: float) -> bool:
        return False

    async def settle(self) -> list[str]:
        """Waits for the streams' ends, which are known at the sender first; all slots are free then."""
        found = []
        for incarnation, serving in self._serving.items():
            slots = serving.arena.slots
            try:
                async with asyncio.timeout(5.0):
                    while slots.num_held:
                        await asyncio.sleep(0.005)
            except TimeoutError:
                found.append(f"receiver {incarnation} has {slots.num_held} slots held")
            # Every sender that died is back and has been met again.
            if slots.num_free != NUM_SLOTS:
                found.append(
                    f"receiver {incarnation}: {slots.num_free} free, {slots.num_held} held, "
                    f"{slots.num_quarantined} quarantined, {slots.num_retired} retired of {NUM_SLOTS} slots"
                )
        return found

    async def _travel(self) -> None:
        await asyncio.sleep(0)

    def _count(self, serving: _Serving) -> None:
        self.counts.update(serving.service.counters)

    async def close(self) -> list[str]:
        """Ends everything; what runs all the same."""
        self._watch.cancel()
        for client in self._clients.values():
            self.counts.update(client.counters)
            await client.close()
        for serving in self._serving.values():
            self._count(serving)
            await serving.server.stop()
            serving.arena.close()
        for thread in self._threads:
            thread.close()
        await asyncio.sleep(0.01)
        # gRPC's server leaves a task of its own behind.
        left = [str(task) for task in asyncio.all_tasks() if "AioServer" not in str(task)]
        left.remove(str(asyncio.current_task()))
        return left


async def storm_over(transport: str, spec: StormSpec, folder: Path) -> Storm:
    """Runs a storm from beginning to end."""
    torch.set_num_threads(1)
    world = WireWorld(spec, transport, folder)
    storm = Storm(spec, world)
    await storm.run()
    storm.defects += await world.close()
    storm.counts += world.counts
    return storm
