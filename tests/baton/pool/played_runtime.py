"""A runtime without Ray: nodes with slots, and workers that do as they are told."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.health import WorkerHealth, WorkerLoad
from baton.pool.health_watch import ANSWER_WITHIN_S
from baton.pool.placing import NODE_ID_LABEL, Ask, Node, Target
from baton.pool.runtime import (
    FoundWorker,
    Place,
    WorkerAnswer,
    WorkerFacts,
    WorkerHandle,
    WorkerLost,
    WorkerSpec,
)

WELL = WorkerHealth(is_ready=True, is_alive=True)
LOAD = WorkerLoad(num_attempts=1, num_running=1, num_waiting=0, num_free_blocks=1, num_blocks=2)


class PlayedWorker:
    """Serves start_s after its start. drain_s: how long it takes to leave; None for ever."""

    def __init__(
        self, facts: WorkerFacts, *, start_s: float, drain_s: float | None, broken: WorkerLost | None
    ) -> None:
        self.actor_id = f"actor-{facts.pid}"
        self.is_silent = False
        self.health = WELL
        self.num_drains = 0
        self.is_killed = False
        self._facts = facts
        self._drain_s = drain_s
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start = asyncio.create_task(self._begin(start_s, broken))

    async def _begin(self, start_s: float, broken: WorkerLost | None) -> None:
        await asyncio.sleep(start_s)
        if broken is not None:
            raise broken

    async def facts(self) -> WorkerFacts:
        await asyncio.shield(self._start)
        return self._facts

    async def ask(self) -> WorkerAnswer | None:
        if self.is_silent:
            await asyncio.sleep(ANSWER_WITHIN_S)
            return None
        return WorkerAnswer(health=self.health, load=LOAD, is_draining=self.num_drains > 0)

    async def ended(self) -> None:
        await asyncio.shield(self._end)

    async def drain(self) -> None:
        self.num_drains += 1
        if self._drain_s is not None:
            asyncio.get_running_loop().call_later(self._drain_s, self.leave)

    def leave(self) -> None:
        """As after a drain or a signal."""
        if not self._end.done():
            self._end.set_result(None)

    def die(self, reason: str = "it was killed") -> None:
        if not self._end.done():
            self._end.set_exception(WorkerLost(reason))
            self._end.exception()


@dataclass
class PlayedRuntime:
    """slots: free slots by node."""

    slots: dict[str, int] = field(default_factory=lambda: {"n1": 8})
    start_s: float = 1.0
    drain_s: float | None = 0.5
    broken: WorkerLost | None = None
    silent_s: float = 0.0
    reserve_s: float = 0.0
    is_gone: bool = False
    workers: dict[str, PlayedWorker] = field(default_factory=dict)
    groups: dict[str, tuple[Target, str | None]] = field(default_factory=dict)
    left: list[FoundWorker] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def until_answering(self) -> None:
        await self.answering.wait()

    async def nodes(self) -> Sequence[Node]:
        return [
            Node(
                node_id=name,
                address=name,
                labels={NODE_ID_LABEL: name},
                free={"slot": free},
                total={"slot": 8},
            )
            for name, free in sorted(self.slots.items())
        ]

    async def reserve(self, name: str, ask: Ask, target: Target) -> str:
        await asyncio.sleep(self.reserve_s)
        group = f"{name}/{next(self.ids)}"
        self.groups[group] = (target, None)
        return group

    async def node_of(self, group: str) -> str | None:
        target, node = self.groups[group]
        if node is None:
            fits = [
                name
                for name, free in self.slots.items()
                if free and name not in target.avoided and target.node_id in (None, name)
            ]
            if fits:
                node = fits[0]
                self.slots[node] -= 1
                self.groups[group] = (target, node)
        return node

    async def free(self, group: str) -> None:
        _, node = self.groups.pop(group, (None, None))
        if node is not None:
            self.slots[node] += 1

    async def start_worker(self, spec: WorkerSpec, place: Place) -> WorkerHandle:
        pid = next(self.ids)
        facts = WorkerFacts(name=spec.name, pid=pid, address=f"a:{pid}", digest=spec.digest, place=place)
        worker = PlayedWorker(facts, start_s=self.start_s, drain_s=self.drain_s, broken=self.broken)
        self.workers[spec.name] = worker
        self.log.append(f"start {spec.name}")
        return worker

    async def kill(self, handle: WorkerHandle) -> None:
        assert isinstance(handle, PlayedWorker)
        handle.is_killed = True

    async def find(self, role: str) -> Sequence[FoundWorker]:
        return self.left
