"""A storm's world in memory and on virtual time: a process that dies never says another word.

Owns the network between the sides. Frames and commits call the receivers directly.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import torch

from kvtransfer.contract import Peer, Ticket, TransferTarget
from kvtransfer.receiver import KvReceiver
from tests.fakes import KvNetwork, NetworkWriter
from tests.kvtransfer.storm import Storm, StormSpec
from tests.kvtransfer.storm_receiver import ReceiverSide
from tests.kvtransfer.storm_sender import SenderSide, StormTransport
from tests.simulation.virtual_loop import Process, State, VirtualLoop


class SenderNetwork(KvNetwork):
    """One sender's connections. cut() is what receivers see once it is dead."""

    def __init__(self, receivers: dict[str, KvReceiver[Any]]) -> None:
        super().__init__()
        self.receivers = receivers
        self._writers: set[NetworkWriter] = set()

    @asynccontextmanager
    async def open(self, ticket: Ticket, target: TransferTarget) -> AsyncIterator[NetworkWriter]:
        async with super().open(ticket, target) as writer:
            self._writers.add(writer)
            try:
                yield writer
            finally:
                self._writers.discard(writer)

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()


class MemoryWorld:
    """See storm.World."""

    def __init__(self, spec: StormSpec, loop: VirtualLoop) -> None:
        self._rules = spec.rules
        self._loop = loop
        self._rng = random.Random(spec.seed)
        self._receivers: dict[str, KvReceiver[Any]] = {}
        self._processes: dict[int, Process] = {}
        self._networks: dict[int, SenderNetwork] = {}

    async def add_receiver(self, side: ReceiverSide) -> None:
        self._receivers[side.address] = side.receiver

    async def remove_receiver(self, side: ReceiverSide) -> None:
        del self._receivers[side.address]

    def add_sender(self, side: SenderSide) -> None:
        self._processes[side.incarnation] = Process(side.name)
        network = self._networks[side.incarnation] = SenderNetwork(self._receivers)
        side.equip(StormTransport(network, self._travel), self._rules.stall_timeout_s)

    async def pair(self, sender: SenderSide, receiver: ReceiverSide) -> None:
        await asyncio.sleep(10 * self._rules.pace_s * self._rng.random())
        await sender.transport.inner.pair(
            Peer(worker=receiver.name, incarnation=receiver.incarnation, address=receiver.address)
        )

    async def kill_sender(self, side: SenderSide) -> None:
        """Its receivers notice some time later."""
        self._processes[side.incarnation].kill()
        self._loop.call_later(self._rng.random(), self._networks[side.incarnation].cut)
        await asyncio.sleep(0.1 * self._rng.random())

    def spawn(self, side: SenderSide, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        process = self._processes[side.incarnation]
        process.living()
        return process.spawn(coroutine, side.name)

    def pause(self, side: SenderSide, seconds: float) -> bool:
        """A process that is stopped and does not know it."""
        process = self._processes[side.incarnation]
        if process.state is not State.RUNNING:
            return False
        process.pause()
        side.paused_until = self._loop.time() + seconds
        self._loop.call_later(seconds, self._go_on, process)
        return True

    def _go_on(self, process: Process) -> None:
        if process.state is State.PAUSED:
            process.resume(self._loop)

    async def settle(self) -> list[str]:
        """What the living have left running."""
        await asyncio.sleep(5.0)
        living = [process for process in self._processes.values() if process.state is not State.DEAD]
        return [f"{name} still runs" for process in living for name in process.living()]

    async def _travel(self) -> None:
        """Some of the time, what is sent takes time."""
        if self._rng.random() < 0.4:
            await asyncio.sleep(self._rules.pace_s * self._rng.random())

    async def dissolve(self) -> None:
        """Ends what the dead have left, so that nothing runs after the storm."""
        for process in self._processes.values():
            process.resume(self._loop)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def storm_in_memory(spec: StormSpec) -> Storm:
    """Runs a storm from beginning to end; deterministic."""
    torch.set_num_threads(1)
    gc.disable()
    loop = VirtualLoop()

    async def run() -> Storm:
        world = MemoryWorld(spec, loop)
        storm = Storm(spec, world)
        await storm.run()
        await world.dissolve()
        return storm

    try:
        storm = loop.run_until_complete(run())
    finally:
        loop.close()
        gc.enable()
    storm.defects += loop.errors
    return storm
