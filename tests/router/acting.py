"""Played workers that act by themselves, on virtual time: they compute, decode, report, and fail as told.

Owns what a worker's side of the protocol is to a router; it computes nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.errors import Draining, Overloaded, Unavailable
from baton.failure import to_failure
from baton.limits import blocks_needed
from baton.v1 import common_pb2, decode_service_pb2, prefill_service_pb2
from tests.fakes import MemorySession
from tests.router.stage import NOBODY, PlayedDecode, PlayedPrefill, Stage, info_of
from tests.simulation.virtual_loop import VirtualLoop

ResultT = TypeVar("ResultT")

BLOCK_SIZE = 16
HEARTBEAT_S = 0.25
DRAINING = to_failure(Draining("it is about to leave"))


def virtually(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs it on virtual time; raises what a callback raised."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(main)
        loop.run_until_complete(loop.shutdown_asyncgens())
        assert loop.errors == []
        return result
    finally:
        loop.close()


def acting(doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task of a worker; a defect in it fails the test."""
    task = asyncio.create_task(doing)

    def look(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            context = {"message": "a worker failed", "exception": task.exception()}
            asyncio.get_running_loop().call_exception_handler(context)

    task.add_done_callback(look)
    return task


@dataclass(kw_only=True)
class Manners:
    """How workers act. Times in seconds; the others are odds, per attempt and leg."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    token_s: float = 0.0001
    transfer_s: float = 0.01
    step_s: float = 0.02
    refuses: float = 0.0
    fails: float = 0.0
    gives_way: float = 0.0

    def happens(self, odds: float) -> bool:
        return self.rng.random() < odds


def token_at(index: int) -> int:
    """The token of that index in any answer."""
    return 100 + index


class ActingDecode(PlayedDecode):
    """A decode worker. reserved: when it was asked, and for which attempts.

    is_draining: it refuses what comes.  left: set while no router has a session with it.
    """

    def __init__(self, name: str, incarnation: int, num_blocks: int, manners: Manners) -> None:
        super().__init__(name, incarnation, num_blocks)
        self.reserved: list[tuple[float, bytes]] = []
        self.is_draining = False
        self.left = asyncio.Event()
        self._manners = manners
        self._held: dict[bytes, common_pb2.Sequence] = {}
        self._sizes: dict[bytes, int] = {}
        self._tasks: dict[bytes, asyncio.Task[None]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - sum(blocks_needed(size + 1, BLOCK_SIZE) for size in self._sizes.values())

    async def serve(self, session: MemorySession) -> None:
        self.left.clear()
        beating = asyncio.create_task(self._beat(session))
        try:
            await super().serve(session)
        finally:
            beating.cancel()
            for attempt_id in list(self._held):
                self._drop(attempt_id)
            self.left.set()

    def drain(self) -> None:
        """Refuses what comes from now on, and says so."""
        self.is_draining = True
        self.send(heartbeat=self._load())

    def hand_over(self) -> None:
        """Ends all it has."""
        for attempt_id in list(self._held):
            self._drop(attempt_id)
            self.send(failed=decode_service_pb2.DecodeFailed(attempt_id=attempt_id, failure=DRAINING))

    def hear(self, message: Any) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                self._reserve(message.reserve)
            case "release":
                self._drop(message.release.attempt_id)
            case "abort_if_uncommitted":
                attempt_id = message.abort_if_uncommitted.attempt_id
                if attempt_id in self._tasks:
                    self.committed(attempt_id)
                else:
                    self._drop(attempt_id)
                    self.gone(attempt_id)

    def commit(self, attempt_id: bytes, num_tokens: int) -> bool:
        """KV of that many tokens has come; False if its lease is gone."""
        if attempt_id not in self._held:
            return False
        self.committed(attempt_id)
        self._sizes[attempt_id] = num_tokens
        self._tasks[attempt_id] = acting(self._decode(attempt_id))
        return True

    def _reserve(self, command: Any) -> None:
        attempt_id, sequence = command.attempt_id, command.sequence
        self.reserved.append((asyncio.get_running_loop().time(), attempt_id))
        blocks = blocks_needed(len(sequence.token_ids) + 1, BLOCK_SIZE)
        result = decode_service_pb2.ReserveResult(attempt_id=attempt_id, num_free_blocks=self.num_free_blocks)
        if self.is_draining:
            result.refusal.failure.CopyFrom(DRAINING)
            self.send(reserve_result=result)
            return
        if blocks > self.num_free_blocks or self._manners.happens(self._manners.refuses):
            result.refusal.failure.CopyFrom(to_failure(Overloaded("full", retry_after_s=0.05)))
            self.send(reserve_result=result)
            return
        self._held[attempt_id] = sequence
        self._sizes[attempt_id] = len(sequence.token_ids)
        result.lease.lease_id = b"L" * 16
        result.num_free_blocks = self.num_free_blocks
        self.send(reserve_result=result)
        if command.compute_locally:
            self.committed(attempt_id)
            self._tasks[attempt_id] = acting(self._compute(attempt_id))

    async def _compute(self, attempt_id: bytes) -> None:
        await asyncio.sleep(self._sizes[attempt_id] * self._manners.token_s)
        self.send(prompt_computed=decode_service_pb2.PromptComputed(attempt_id=attempt_id))
        await self._decode(attempt_id)

    async def _decode(self, attempt_id: bytes) -> None:
        manners, sequence = self._manners, self._held[attempt_id]
        most = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        while self._sizes[attempt_id] < most:
            await asyncio.sleep(manners.step_s)
            if manners.happens(manners.fails / 10):
                self._drop(attempt_id)
                failure = to_failure(Unavailable("it failed"))
                self.send(failed=decode_service_pb2.DecodeFailed(attempt_id=attempt_id, failure=failure))
                return
            must_grow = (self._sizes[attempt_id] + 1) % BLOCK_SIZE == 0
            if (must_grow and not self.num_free_blocks) or manners.happens(manners.gives_way / 10):
                self._drop(attempt_id)
                self.send(preempted=decode_service_pb2.Preempted(attempt_id=attempt_id))
                return
            start = self._sizes[attempt_id] - sequence.num_prompt_tokens
            self._sizes[attempt_id] += 1
            event = self.token(attempt_id, start, token_at(start), end=self._sizes[attempt_id] == most)
            if event.finish_reason:
                self._drop(attempt_id)
                self._step(event)
                return
            self._step(event)

    def _step(self, event: Any) -> None:
        self.send(step=decode_service_pb2.StepEvents(tokens=[event], num_free_blocks=self.num_free_blocks))

    def _drop(self, attempt_id: bytes) -> None:
        self._held.pop(attempt_id, None)
        self._sizes.pop(attempt_id, None)
        task = self._tasks.pop(attempt_id, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _beat(self, session: MemorySession) -> None:
        while not session.closed:
            session.send(self.up(heartbeat=self._load()))
            await asyncio.sleep(HEARTBEAT_S)

    def _load(self) -> decode_service_pb2.DecodeWorkerHeartbeat:
        return decode_service_pb2.DecodeWorkerHeartbeat(
            num_free_blocks=self.num_free_blocks,
            num_running=len(self._tasks),
            num_leases=len(self._held) - len(self._tasks),
            num_context_tokens=sum(self._sizes[attempt_id] for attempt_id in self._tasks),
            is_draining=self.is_draining,
        )


class ActingPrefill(PlayedPrefill):
    """A prefill worker, which computes all prompts at once. decodes: where KV goes, by incarnation.

    is_draining: it refuses what comes.  left: set while no router has a session with it.
    """

    def __init__(
        self, name: str, incarnation: int, budget: int, manners: Manners, decodes: dict[int, ActingDecode]
    ) -> None:
        super().__init__(name, incarnation, budget, NOBODY)
        self.is_draining = False
        self.left = asyncio.Event()
        self._manners = manners
        self._decodes = decodes
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self._costs: dict[bytes, int] = {}

    async def serve(self, session: MemorySession) -> None:
        self.left.clear()
        beating = asyncio.create_task(self._beat(session))
        try:
            await super().serve(session)
        finally:
            beating.cancel()
            self._costs.clear()
            for task in self._tasks.values():
                task.cancel()
            self._tasks.clear()
            self.left.set()

    def drain(self) -> None:
        """Refuses what comes from now on, and says so."""
        self.is_draining = True
        self.send(heartbeat=self._load())

    def hand_over(self) -> None:
        """Ends all it has."""
        for attempt_id, task in list(self._tasks.items()):
            task.cancel()
            self._over(attempt_id, failure=DRAINING)

    def hear(self, message: Any) -> None:
        match message.WhichOneof("message"):
            case "prefill":
                command = message.prefill
                self._costs[command.attempt_id] = command.cost_tokens
                if self.is_draining:
                    self._over(command.attempt_id, failure=DRAINING)
                    return
                self._tasks[command.attempt_id] = acting(self._prefill(command))
            case "cancel":
                task = self._tasks.pop(message.cancel.attempt_id, None)
                if task is not None:
                    task.cancel()
                    self._over(message.cancel.attempt_id, cancelled=True)
            case _:
                super().hear(message)

    async def _prefill(self, command: Any) -> None:
        manners, sequence, attempt_id = self._manners, command.sequence, command.attempt_id
        num_tokens = len(sequence.token_ids)
        await asyncio.sleep(num_tokens * manners.token_s)
        if manners.happens(manners.fails / 2):
            self._over(attempt_id, failure=to_failure(Unavailable("it failed")))
            return
        start = num_tokens - sequence.num_prompt_tokens
        is_last = start + 1 == sequence.sampling.max_tokens
        self.grant(self._costs.pop(attempt_id))
        self.send(token=self.token(attempt_id, start, token_at(start), end=is_last))
        if is_last:
            self._over(attempt_id, finished=True)
            return
        await asyncio.sleep(manners.transfer_s)
        decode = self._decodes.get(command.target.incarnation)
        is_lost = decode is None or manners.happens(manners.fails / 2)
        if is_lost or not decode.commit(attempt_id, num_tokens + 1):  # type: ignore[union-attr]
            self._over(attempt_id, failure=to_failure(Unavailable("nobody took it")))
            return
        self._over(attempt_id, committed=True)

    def _over(self, attempt_id: bytes, **outcome: Any) -> None:
        self._tasks.pop(attempt_id, None)
        if attempt_id in self._costs:
            self.grant(self._costs.pop(attempt_id))
        self.ended(attempt_id, **outcome)

    async def _beat(self, session: MemorySession) -> None:
        while not session.closed:
            session.send(self.up(heartbeat=self._load()))
            await asyncio.sleep(HEARTBEAT_S)

    def _load(self) -> prefill_service_pb2.PrefillWorkerHeartbeat:
        return prefill_service_pb2.PrefillWorkerHeartbeat(
            num_free_blocks=self.num_blocks, is_draining=self.is_draining
        )


@dataclass
class Company:
    """Acting workers on a stage."""

    stage: Stage
    manners: Manners = field(default_factory=Manners)
    decodes: dict[int, ActingDecode] = field(default_factory=dict)

    async def prefill(self, name: str, *, budget: int = 4096, num_blocks: int = 1000) -> ActingPrefill:
        number = next(self.stage.numbers)
        worker = ActingPrefill(name, number, budget, self.manners, self.decodes)
        worker.num_blocks = num_blocks
        await self.stage.enter(worker, "prefill")
        return worker

    async def decode(self, name: str, *, num_blocks: int = 64) -> ActingDecode:
        worker = ActingDecode(name, next(self.stage.numbers), num_blocks, self.manners)
        self.decodes[worker.identity.incarnation] = worker
        await self.stage.enter(worker, "decode")
        return worker

    async def leave(self, worker: ActingPrefill | ActingDecode, *, grace_s: float) -> None:
        """A worker drains, hands over what is left after the grace time, and is gone once it is left."""
        role = "prefill" if isinstance(worker, ActingPrefill) else "decode"
        worker.drain()
        self.stage.registry.announce(info_of(worker, role, draining=True))
        try:
            async with asyncio.timeout(grace_s):
                await worker.left.wait()
        except TimeoutError:
            worker.hand_over()
            await worker.left.wait()
        self.stage.kill(worker.identity.name)
