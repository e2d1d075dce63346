"""What a policy of placement is in a replay: it keeps those who wait, and says who goes where next.

Policies that decide by one request at a time derive from LinePolicy and say choose().
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from router.offline.job import Job
from router.offline.recording import RecordedRequest
from router.offline.simulated_worker import SimulatedWorker, Step

# (what is placed, who computes its prompt, who generates its tokens); the two may be the same worker.
Placed = tuple[RecordedRequest, SimulatedWorker, SimulatedWorker]
Place = tuple[SimulatedWorker, SimulatedWorker]


class Fleet(Protocol):
    """What a policy sees of the fleet."""

    @property
    def now(self) -> float:
        """Virtual time in seconds."""

    @property
    def prefills(self) -> Sequence[SimulatedWorker]:
        """Those that compute prompts; may be none."""

    @property
    def decodes(self) -> Sequence[SimulatedWorker]:
        """Those that generate tokens; at least one."""


class Witness:
    """What a policy is told of; nothing has to be made of it."""

    def placed(self, job: Job, fleet: Fleet) -> None:
        """What next() said was done."""

    def stepped(self, worker: SimulatedWorker, step: Step, fleet: Fleet) -> None:
        """A worker has computed a step."""

    def sampled(self, job: Job, fleet: Fleet) -> None:
        """A request has its first token."""

    def committed(self, job: Job, tail_ms: float, fleet: Fleet) -> None:
        """Its KV has arrived, tail_ms after that."""

    def ended(self, job: Job, fleet: Fleet) -> None:
        """It has its last token."""


class Policy(Witness, ABC):
    """One way to place requests, for one run."""

    name: str

    @abstractmethod
    def add(self, request: RecordedRequest, fleet: Fleet) -> None:
        """A request has arrived; it waits."""

    @abstractmethod
    def next(self, fleet: Fleet) -> Placed | None:
        """Takes out who is placed now; None if nobody can or should be. Asked until it says so."""


class LinePolicy(Policy):
    """Requests wait in the order of their arrival, and nobody overtakes."""

    def __init__(self) -> None:
        self._line: deque[RecordedRequest] = deque()

    def add(self, request: RecordedRequest, fleet: Fleet) -> None:
        """To the end of the line."""
        del fleet
        self._line.append(request)

    def next(self, fleet: Fleet) -> Placed | None:
        """The head of the line, if it has a place."""
        if not self._line:
            return None
        place = self.choose(self._line[0], fleet)
        return None if place is None else (self._line.popleft(), *place)

    @abstractmethod
    def choose(self, request: RecordedRequest, fleet: Fleet) -> Place | None:
        """Who computes its prompt and who generates its tokens; None if it is to wait."""


def with_room(request: RecordedRequest, workers: Sequence[SimulatedWorker]) -> list[SimulatedWorker]:
    """The decode workers that can hold the request to its end."""
    num_tokens = request.num_prompt_tokens + request.num_output_tokens
    return [worker for worker in workers if worker.has_room(num_tokens)]
