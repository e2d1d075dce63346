"""The sweep: all sides at one rate, then a search for the goodput of those that matter, taking turns.

    screen   every side has one window per round at the middle rate, in a cluster of its own
    search   ours, the best controls of the screen, and the unchunked ones, all running: each round every side
             has a window at the middle rate, then those whose goodput is sought go on by bisection

A round has one seed: all sides get the same requests. Sides take turns within a round.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from baton.bench.open_loop import offer
from baton.bench.target import Bounds, Target
from benchmarks.attainment import Objectives, Window
from benchmarks.goodput_sides import Side, running
from benchmarks.rate_search import RateSearch
from benchmarks.workload import Workload

# Measured on two cores: a cluster's start, warm-up and end; and what is in flight when a window has ended.
START_S = 12.0
DRAIN_S = 6.0
# Fewer seconds have too few requests to tell nine tenths from eight.
SHORTEST_WINDOW_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What to measure. rate: the middle one, requests/s. rates: the ladder, rising.

    num_finalists: controls whose goodput is sought.
    """

    products: tuple[Side, ...]
    controls: tuple[Side, ...]
    rate: float
    rates: tuple[float, ...]
    rounds: int
    window_s: float
    num_finalists: int
    seed: int
    bounds: Bounds
    objectives: Objectives


def window_s(
    minutes: float,
    *,
    num_products: int,
    controls: Sequence[Side],
    finalists: int,
    rounds: int,
    num_probes: int,
) -> float:
    """How long a window may be for all of them to fit into so many minutes, in seconds.

    Raises ValueError if that is too short to say anything.
    """
    num_searched = num_products + min(finalists, len(controls))
    num_unchunked = sum(side.is_unchunked for side in controls)
    num_screened = len(controls) if len(controls) > 1 else 0
    num_windows = num_screened + rounds * (num_searched * num_probes + num_unchunked)
    num_starts = num_screened + num_searched + num_unchunked
    left_s = 60 * minutes - START_S * num_starts - DRAIN_S * num_windows
    found = left_s / num_windows
    if found < SHORTEST_WINDOW_S:
        needed = (num_windows * (SHORTEST_WINDOW_S + DRAIN_S) + START_S * num_starts) / 60
        raise ValueError(
            f"{num_windows} windows need {needed:.1f} minutes at least; take fewer rounds or sides"
        )
    return found


@dataclass(slots=True)
class Sweep:
    """One run of a plan. windows: all that were measured. goodputs: by side, one value per round."""

    plan: SweepPlan
    workload: Workload
    model: str
    folder: Path
    report: Callable[[str], None] = print
    windows: list[Window] = field(default_factory=list)
    goodputs: dict[str, list[float]] = field(default_factory=dict)

    async def run(self) -> None:
        """Screens and searches."""
        plan = self.plan
        if len(plan.controls) > 1:
            for side in plan.controls:
                async with running(side, self.model, self.folder, self.workload) as target:
                    await self._measure(side, target, plan.rate, 0)
        finalists = best_controls(self.windows, plan.controls, plan.num_finalists)
        watched = [side for side in plan.controls if side.is_unchunked and side not in finalists]
        async with self._all_running([*plan.products, *finalists, *watched]) as targets:
            for number in range(1, plan.rounds + 1):
                # Each goes first as often as the others.
                for side in watched if number % 2 else watched[::-1]:
                    await self._measure(side, targets[side.name], plan.rate, number)
                await self._search([*plan.products, *finalists], targets, number)

    @asynccontextmanager
    async def _all_running(self, sides: Sequence[Side]) -> AsyncIterator[dict[str, Target]]:
        async with AsyncExitStack() as stack:
            yield {
                side.name: await stack.enter_async_context(
                    running(side, self.model, self.folder, self.workload)
                )
                for side in sides
            }

    async def _search(self, sides: Sequence[Side], targets: dict[str, Target], number: int) -> None:
        searches = {side.name: RateSearch(self.plan.rates) for side in sides}
        while any(search.next_rate for search in searches.values()):
            for side in sides:
                search = searches[side.name]
                if search.next_rate is None:
                    continue
                found = await self._measure(side, targets[side.name], search.next_rate, number)
                search.record(attained=found.is_attained)
        for name, search in searches.items():
            self.goodputs.setdefault(name, []).append(search.goodput)
            if search.is_at_top or not search.goodput:
                end = "highest" if search.is_at_top else "lowest"
                self.report(f"{name}: goodput is beyond the {end} rate; choose another --rate or --step")

    async def _measure(self, side: Side, target: Target, rate: float, number: int) -> Window:
        plan = self.plan
        requests = self.workload.window(rate, plan.window_s, plan.seed + number)
        outcomes = await offer(target, requests, plan.bounds)
        found = Window(
            side=side.name,
            rate=rate,
            round_number=number,
            outcomes=tuple(outcomes),
            objectives=plan.objectives,
            deadline_s=plan.bounds.deadline_s,
        )
        self.windows.append(found)
        self.report(line(found))
        return found


def best_controls(windows: Sequence[Window], controls: Sequence[Side], count: int) -> list[Side]:
    """The controls with the least strain in the screen, best first; all of them without a screen."""
    strains = {
        side.name: median(window.strain for window in windows if window.side == side.name)
        for side in controls
        if any(window.side == side.name for window in windows)
    }
    return sorted(controls, key=lambda side: strains.get(side.name, 0.0))[:count]


def line(window: Window) -> str:
    """One window, for the terminal."""
    worst, ttft = window.itl_ms(100), window.ttft_ms(90)
    return (
        f"{window.side:<38} {window.rate:5.2f}/s {window.num_met:>3} of {len(window.outcomes):>3} met, "
        f"strain {window.strain:5.2f}, ttft p90 {ttft or 0:6.0f} ms, worst itl {worst or 0:6.0f} ms"
    )
