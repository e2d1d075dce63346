"""Finds room for the workers of one role, one after the other. The rules are in baton/pool/placing.py."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from baton.pool.placing import Ask, Node, Target, choose, is_allowed, why_not
from baton.pool.runtime import Place, Runtime, WorkerLost

# A group on a node with room exists within milliseconds.
_FIRST_LOOKS_S: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
# One that waits does so for an operator.
_LATER_LOOKS_S: Final = 1.0

Report = Callable[[str], None]


class Placer:
    """The room of one role's workers, by their names.

    strategy: one of STRATEGIES.
    """

    def __init__(self, runtime: Runtime, *, strategy: str, ask: Ask) -> None:
        self.ask = ask
        self._runtime = runtime
        self._strategy = strategy
        # Nodes that were chosen count before their groups exist, as the next choice builds on them.
        self._nodes: dict[str, str] = {}

    def adopt(self, name: str, place: Place) -> None:
        """Counts a place that an earlier pool has reserved."""
        self._nodes[name] = place.node_id

    async def free(self, name: str, place: Place) -> None:
        """Gives a worker's place back."""
        await self._runtime.free(place.group)
        self._nodes.pop(name, None)

    async def place(self, name: str, report: Report) -> Place:
        """Reserves room for a worker, waiting for it as long as it takes.

        report: hears why there is none, again and again.
        """
        while True:
            target = self._choose(name, await self._runtime.nodes())
            group = await self._reserve(name, target)
            try:
                place = await self._wait(name, group, target, report)
            except BaseException:
                self._nodes.pop(name, None)
                await self._runtime.free(group)
                raise
            if place is not None:
                return place
            await self._runtime.free(group)

    async def _reserve(self, name: str, target: Target) -> str:
        """Asks for a group. It comes to be also if nobody waits for it any more, and is freed then."""
        reserving = asyncio.ensure_future(self._runtime.reserve(name, self.ask, target))
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            self._nodes.pop(name, None)
            with suppress(WorkerLost):
                await self._runtime.free(await reserving)
            raise

    def _choose(self, name: str, nodes: Sequence[Node]) -> Target:
        """Chooses, and counts the choice."""
        self._nodes.pop(name, None)
        target = choose(self._strategy, self.ask, nodes, self._ours(name))
        if target.node_id is not None:
            self._nodes[name] = target.node_id
        return target

    async def _wait(self, name: str, group: str, target: Target, report: Report) -> Place | None:
        """Waits until the group has a place; None if another choice has become better."""
        for pause_s in _FIRST_LOOKS_S:
            await asyncio.sleep(pause_s)
            node_id = await self._runtime.node_of(group)
            if node_id is not None:
                return await self._take(name, group, node_id)
        while True:
            nodes = await self._runtime.nodes()
            report(why_not(self._strategy, self.ask, nodes, self._ours(name)))
            await asyncio.sleep(_LATER_LOOKS_S)
            node_id = await self._runtime.node_of(group)
            if node_id is not None:
                return await self._take(name, group, node_id)
            if self._choose(name, nodes) != target:
                return None

    async def _take(self, name: str, group: str, node_id: str) -> Place | None:
        """The group's place; None if meanwhile another worker has one that rules it out."""
        addresses = {node.node_id: node.address for node in await self._runtime.nodes()}
        if not is_allowed(self._strategy, node_id, self._ours(name)):
            return None
        self._nodes[name] = node_id
        return Place(group=group, node_id=node_id, address=addresses.get(node_id, ""))

    def _ours(self, name: str) -> Counter[str]:
        """Nodes of all the others."""
        return Counter(node_id for other, node_id in self._nodes.items() if other != name)
