"""What a pool asks of whoever runs its workers: Ray, or a fake in tests. Ports and values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.errors import BatonError, Unavailable
from baton.health import WorkerHealth, WorkerLoad
from baton.pool.actor import WorkerActor
from baton.pool.placing import Ask, Node, Target


class WorkerLost(Exception):
    """A worker's process is gone, or never came to serve.

    reason: its last words, for people.
    error: what to raise where that is why no worker serves.
    """

    def __init__(self, reason: str, error: type[BatonError] = Unavailable) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Room that is reserved for one worker.

    group: identifier of the reservation.
    address: of the node.
    """

    group: str
    node_id: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What to start.

    settings: of the worker, its name among them; they may hold passwords.
    digest: of the settings, to compare with those of a worker that is found.
    """

    name: str
    role: str
    actor_class: type[WorkerActor]
    settings: Mapping[str, Any] = field(repr=False)
    digest: str
    ask: Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker that serves says of itself once.

    address: host:port as others dial it.
    digest: of the settings it was started with.
    release: that it runs; empty of one that does not say.
    """

    name: str
    pid: int
    address: str
    digest: str
    place: Place
    release: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAnswer:
    """What a worker says when it is asked how it is.

    load: None when it could not find out in time.
    is_draining: it was asked to leave.
    """

    health: WorkerHealth
    load: WorkerLoad | None
    is_draining: bool


class WorkerHandle(Protocol):
    """A worker that was started. Nothing here waits for Ray's control service."""

    @property
    def actor_id(self) -> str:
        """Identifier for people."""

    async def facts(self) -> WorkerFacts:
        """Waits until it serves; raises WorkerLost if it never does."""

    async def ask(self) -> WorkerAnswer | None:
        """How it is; None if it does not answer within ANSWER_WITHIN_S."""

    async def ended(self) -> None:
        """Returns when it has drained and left; raises WorkerLost when it ends otherwise."""

    async def drain(self) -> None:
        """Tells it to leave; ended() says when it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundWorker:
    """A worker of a pool before this one."""

    handle: WorkerHandle
    facts: WorkerFacts


class Runtime(Protocol):
    """Reserves room and runs workers in it.

    Coroutines wait for Ray's control service as long as it is away, and raise WorkerLost if it has ended.
    """

    @property
    def silent_s(self) -> float:
        """How long the control service has not answered, in seconds; 0 while it answers."""

    @property
    def is_gone(self) -> bool:
        """Whether it has ended for good, and nothing can be started any more."""

    async def until_answering(self) -> None:
        """Returns once the control service answers."""

    async def nodes(self) -> Sequence[Node]:
        """The living nodes, by address."""

    async def reserve(self, name: str, ask: Ask, target: Target) -> str:
        """Asks for room for the worker of that name; returns the group at once. Free it in any case."""

    async def node_of(self, group: str) -> str | None:
        """The node on which the group has its room; None while it waits for one."""

    async def free(self, group: str) -> None:
        """Gives the room back; a worker that is in it is killed. Idempotent."""

    async def start_worker(self, spec: WorkerSpec, place: Place) -> WorkerHandle:
        """Starts a worker in its place; facts() waits until it serves."""

    async def kill(self, handle: WorkerHandle) -> None:
        """Ends a worker at once, also one that is stopped. Idempotent."""

    async def find(self, role: str) -> Sequence[FoundWorker]:
        """The workers of that role that an earlier pool left and that serve; what else it left is removed."""
