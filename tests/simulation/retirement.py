"""Planned ends: a node drains within its grace time, leaves, and comes back; and what must hold meanwhile.

Owns who is leaving. Reads messages and ledgers; what draining is, the real shells know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation.net import Connection
from tests.simulation.nodes import Node, WorkerNode
from tests.simulation.virtual_loop import NOBODY, State

if TYPE_CHECKING:
    from tests.simulation.cluster import SimCluster

HANDED_OVER = "a draining worker handed an answer over"
REFUSED = "a draining worker refused an attempt"
# What ends in its own time, with the process if need be: a step, and transfers to a peer that is silent.
IN_ITS_OWN_TIME = frozenset({"blocks_fenced", "blocks_used", "slots_held", "transfers", "writes"})


class Retirements:
    """The nodes of one cluster that are leaving.

    left: called with the name of a node that has left, outside of any process.
    """

    def __init__(self, cluster: SimCluster, left: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._left = left
        self._leaving: set[Node] = set()
        # Attempts that reached a prefill worker after it had begun to drain.
        self._late: dict[bytes, None] = {}
        # When the router of a session has read that its worker drains.
        self._told: dict[int, float] = {}

    def begin(self, name: str, grace_s: float, away_s: float) -> None:
        """A running node drains, unless it does so already; it is back away_s seconds after it has left."""
        node = self._cluster.nodes[name]
        if node.process.state is State.RUNNING and node not in self._leaving:
            self._leaving.add(node)
            node.retire(grace_s, partial(self._ended, node, away_s))

    def is_leaving(self, name: str) -> bool:
        """Whether the node there drains."""
        return self._cluster.nodes[name] in self._leaving

    def read(self, connection: Connection, from_caller: bool, message: Any) -> None:
        """A process read a message."""
        if connection.kind not in ("prefill", "decode"):
            return
        kind = message.WhichOneof("message")
        if from_caller and kind == "prefill" and self.is_leaving(connection.names[1]):
            self._late[message.prefill.attempt_id] = None
        elif not from_caller and kind == "heartbeat" and message.heartbeat.is_draining:
            self._told.setdefault(connection.number, self._cluster.now())

    def sent(self, connection: Connection, message: Any) -> None:
        """A router sends a command; raises AssertionError if it places on a worker that it knows to leave."""
        if connection.kind == "decode" and message.WhichOneof("message") == "reserve":
            told_at = self._told.get(connection.number, self._cluster.now())
            # What was placed at the very moment it heard of it may still be asked for.
            assert told_at >= self._cluster.now(), f"{connection.names} places on a worker that drains"

    def answered(self, connection: Connection, message: Any) -> None:
        """A server sends a message: raises AssertionError if a node that is leaving takes something new."""
        name = connection.names[1]
        if connection.kind not in ("prefill", "decode") or not self.is_leaving(name):
            return
        match message.WhichOneof("message"):
            case "reserve_result":
                assert not message.reserve_result.HasField("lease"), f"{name} reserves though it is leaving"
                self._note(message.reserve_result.refusal.failure.code, REFUSED)
            case "token":
                is_late = message.token.attempt_id in self._late
                assert not is_late, f"{name} computes a prompt that came as it was leaving"
            case "ended":
                is_late = message.ended.attempt_id in self._late
                self._note(message.ended.failure.code, REFUSED if is_late else HANDED_OVER)
            case "failed":
                self._note(message.failed.failure.code, HANDED_OVER)

    def _note(self, code: str, point: str) -> None:
        if code == "DRAINING":
            self._cluster.sometimes.hit(point)

    def _ended(self, node: Node, away_s: float) -> None:
        """The node is done: it holds nothing, and its process ends."""
        held = {what: count for what, count in node.ledger().items() if count and what not in IN_ITS_OWN_TIME}
        if held and isinstance(node, WorkerNode):
            self._cluster.fail(f"{node.name} left with {held}")
        loop = self._cluster.loop
        loop.call_soon(self._gone, node, context=NOBODY)
        loop.call_later(away_s, self._back, node, context=NOBODY)

    def _gone(self, node: Node) -> None:
        self._leaving.discard(node)
        if self._cluster.nodes[node.name] is node:
            self._cluster.sometimes.hit("a node left as it was told to")
            self._left(node.name)

    def _back(self, node: Node) -> None:
        if self._cluster.nodes[node.name] is node:
            self._cluster.restart(node.name)
