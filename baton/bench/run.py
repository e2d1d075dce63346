"""One run: warm-up, then the load, then the figures. Knows no option of the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile

from baton.bench.closed_loop import repeat
from baton.bench.open_loop import offer
from baton.bench.outcome import Outcome, Planned
from baton.bench.prompts import Prompts
from baton.bench.report import Report
from baton.bench.slo import Slo
from baton.bench.target import Bounds, Target
from baton.bench.trace_file import TraceEntry

WARM_UP = "warm-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to send, and when.

    concurrency: callers of a closed loop. rate: requests/s of an open loop, or None. trace: requests to
    replay in place of both, or (). speed: of the trace's clock. num_requests, seconds: whichever comes first
    ends the run; at least one is given, unless there is a trace. num_warm_up: requests before, not measured.
    """

    prompts: Prompts
    concurrency: int
    rate: float | None = None
    trace: tuple[TraceEntry, ...] = ()
    speed: float = 1.0
    num_requests: int | None = None
    seconds: float | None = None
    num_warm_up: int = 0
    bounds: Bounds = field(default_factory=Bounds)
    slo: Slo | None = None

    @property
    def is_closed(self) -> bool:
        """Whether callers wait for their answers."""
        return self.rate is None and not self.trace

    def due(self) -> Iterator[Planned]:
        """The requests, in the order in which they are sent."""
        if self.trace:
            requests = self.prompts.replayed(self.trace, speed=self.speed)
        else:
            requests = self.prompts.drawn() if self.rate is None else self.prompts.arriving(self.rate)
        if self.seconds is not None and not self.is_closed:
            seconds = self.seconds
            requests = takewhile(lambda request: request.at_s < seconds, requests)
        return islice(requests, self.num_requests)


class Run:
    """A run that can be looked at while it goes on, and reports what there is when it is cut short."""

    def __init__(self, target: Target, plan: Plan) -> None:
        self._target = target
        self._plan = plan
        self._began_s: float | None = None
        self._ended_s = 0.0
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        """Warms up, then measures; returns when every request has ended."""
        plan, deadline_s = self._plan, self._plan.bounds.deadline_s
        if plan.num_warm_up:
            warm = islice(plan.prompts.drawn(WARM_UP), plan.num_warm_up)
            await repeat(self._target, warm, concurrency=plan.concurrency, deadline_s=deadline_s)
        self._began_s = asyncio.get_running_loop().time()
        if not plan.is_closed:
            await offer(self._target, plan.due(), plan.bounds, self._see)
            return
        await repeat(
            self._target,
            plan.due(),
            concurrency=plan.concurrency,
            deadline_s=deadline_s,
            seconds=plan.seconds,
            seen=self._see,
        )

    def described(self) -> str:
        """How far it is."""
        if self._began_s is None:
            return "warming up"
        of = "" if self._plan.num_requests is None else f" of {self._plan.num_requests}"
        failed = sum(bool(outcome.failure) for outcome in self.outcomes)
        return f"{len(self.outcomes)}{of} requests ended" + (f", {failed} failed" if failed else "")

    def report(self) -> Report:
        """The figures of what has ended so far."""
        began_s = self._ended_s if self._began_s is None else self._began_s
        return Report(
            outcomes=tuple(self.outcomes),
            duration_s=max(0.0, self._ended_s - began_s),
            slo=self._plan.slo,
        )

    def _see(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._ended_s = asyncio.get_running_loop().time()
