"""From demand, model and device to numbers of workers, for one case of what devices reach.

Prefill workers are k servers that each compute one prompt at a time; decode workers share answers equally,
and each steps all of its own at once:

    service(S) = prefill FLOP(S) / (peak * share)               prompts wait as in baton.plan.queueing
    step(B)    = max(bytes(B) / (memory's rate * share), FLOP(B) / (peak * prefill's share))
    B          = rate * output * step(B) / workers              Little's law

How many answers there are at once varies: n in all with a probability in proportion to the product of
rate * output * step(i / workers) / i for i = 1 .. n, whatever the distribution of their lengths (generalized
processor sharing; Cohen, "The multiple phase service network with generalized processor sharing", 1979).

A colocated worker does both: a step computes its answers and a chunk of prompts that keeps the gap between
tokens, so it computes prompts (itl - step(B)) / itl of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.plan.costs import ModelCosts
from baton.plan.demand import Demand, Objectives
from baton.plan.profile import DeviceProfile
from baton.plan.queueing import share_within, waits

MAX_WORKERS = 4_096
# Of a device's memory, for weights and KV together; as a worker takes it on a GPU.
MEMORY_SHARE = 0.9
# Answers at once vary like a Poisson number: room for two of its standard deviations.
SPREAD = 2.0
# Of one worker, whatever its gap allows.
_MOST_ANSWERS = 4_096
# Sums are scaled down before they overflow, and end where what is left does not matter.
_LARGE = 1e200
_SMALL = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is needed, and what it does. Times in seconds.

    colocated: workers that do both, for the same objectives; None where none do.
    link_gbps: gigabits per second that a prefill worker's KV fills while it computes.
    is_hidden: whether the profile's link carries that.
    """

    prefill: int
    decode: int
    colocated: int | None
    ttft_mean_s: float
    ttft_share: float
    itl_s: float
    answers_per_worker: float
    kv_gb: float
    kv_room_gb: float
    link_gbps: float
    is_hidden: bool


class Planner:
    """One case: the shares of peak and memory that are reached."""

    def __init__(
        self, costs: ModelCosts, profile: DeviceProfile, demand: Demand, objectives: Objectives, case: int
    ) -> None:
        self._costs = costs
        self._demand = demand
        self._objectives = objectives
        self._profile = profile
        self._flops = 1e12 * profile.peak_tflops * profile.prefill[case]
        self._bytes = 1e9 * profile.memory_gbps * profile.decode[case]
        self._services = [self.prefill_s(length) for length in demand.prompts]
        self._context = demand.mean_prompt + demand.output / 2
        room = 1e9 * profile.memory_gb * MEMORY_SHARE - costs.stored_bytes
        if room <= 0:
            raise ConfigError(
                f"the weights take {costs.stored_bytes / 1e9:.1f} GB, and {profile.name} has "
                f"{profile.memory_gb:g} GB; a worker is one device: take a larger one, or a smaller model",
                field="device",
            )
        self._room = room

    def plan(self) -> Plan:
        """Raises ConfigError, naming the objective, if no number of workers meets it."""
        decode = self.decode_workers()
        prefill = self.prefill_workers()
        probability, wait = self._waits(prefill)
        batch = self.batch(decode)
        per_token, mean = self._costs.kv_bytes_per_token, sum(self._services) / len(self._services)
        link = 8 * per_token * self._demand.mean_prompt / mean / 1e9
        return Plan(
            prefill=prefill,
            decode=decode,
            colocated=self.colocated_workers(),
            ttft_mean_s=probability * wait + mean + self.step_s(batch),
            ttft_share=self._share(prefill),
            itl_s=self.step_s(batch),
            answers_per_worker=batch,
            kv_gb=batch * self._context * per_token / 1e9,
            kv_room_gb=self._room / 1e9,
            link_gbps=link,
            is_hidden=link <= self._profile.gbps_link,
        )

    def prefill_s(self, num_tokens: float) -> float:
        """Of one prompt alone, at least one reading of the weights that its tokens choose."""
        floor = self._costs.decode_bytes(num_tokens, 0) / self._bytes
        return max(self._costs.prefill_flops(num_tokens) / self._flops, floor)

    def step_s(self, batch: float) -> float:
        """Of one decode step."""
        costs = self._costs
        return max(
            costs.decode_bytes(batch, self._context) / self._bytes,
            costs.decode_flops(batch, self._context) / self._flops,
        )

    def prefill_workers(self) -> int:
        """The fewest by which the share of first tokens comes in time."""
        fewest = max(1, math.ceil(self._demand.rate * sum(self._services) / len(self._services)))
        best = self._share_without_waits()
        if best < self._objectives.share:
            raise ConfigError(
                f"ttft is {1000 * self._objectives.ttft_s:g} ms, in which {best:.0%} of the prompts can be "
                "computed at all on this device; allow more, or ask for a smaller share",
                field="ttft",
            )
        return next(k for k in range(fewest, MAX_WORKERS + 1) if self._share(k) >= self._objectives.share)

    def decode_workers(self) -> int:
        """The fewest that keep the gap between tokens and have room for the KV."""
        if self.step_s(1) > self._objectives.itl_s:
            raise ConfigError(
                f"itl is {1000 * self._objectives.itl_s:g} ms, and one answer alone has a token every "
                f"{1000 * self.step_s(1):.1f} ms on this device; ask for more",
                field="itl",
            )
        most = self._largest_batch()
        wanted = self._demand.rate * self._demand.output * self.step_s(most)
        for workers in range(max(1, math.ceil(wanted / most)), MAX_WORKERS + 1):
            batch = self.batch(workers)
            if math.isinf(batch) or not self._has_room(batch):
                continue
            if self.gap_share(workers, most) >= self._objectives.share:
                return workers
        raise ConfigError(f"more than {MAX_WORKERS} decode workers would be needed", field="rate")

    def batch(self, workers: int) -> float:
        """Answers at once on each of so many workers, by Little's law; infinite where they cannot keep up."""
        wanted = self._demand.rate * self._demand.output / workers
        low, high = 0.0, 1.0
        while high <= 1e6 and wanted * self.step_s(high) > high:
            high *= 2
        if high > 1e6:
            return math.inf
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if wanted * self.step_s(middle) > middle else (low, middle)
        return high

    def colocated_workers(self) -> int | None:
        """The fewest that do both with the same gap between tokens; None if there is no number."""
        itl = self._objectives.itl_s
        idlest = 1 - self.step_s(self._demand.rate * self._demand.output * itl / MAX_WORKERS) / itl
        if idlest <= 0 or self._share_without_waits(slowed=1 / idlest) < self._objectives.share:
            return None
        for workers in range(1, MAX_WORKERS + 1):
            batch = self._demand.rate * self._demand.output * itl / workers
            spare = 1 - self.step_s(batch) / itl
            if spare <= 0 or not self._has_room(batch):
                continue
            if self._share(workers, slowed=1 / spare) >= self._objectives.share:
                return workers
        return None

    def gap_share(self, workers: int, most: int) -> float:
        """Of answers that begin where fewer than `most` run: their tokens come in time from the start."""
        wanted = self._demand.rate * self._demand.output
        term, within, beyond, steps = 1.0, 1.0, 0.0, [self.step_s(size) for size in range(1, most + 1)]
        for count in range(1, most * workers):
            term *= wanted * steps[(count - 1) // workers] / count
            within += term
            if within > _LARGE:
                term, within = term / _LARGE, within / _LARGE
        count = most * workers
        while term > _SMALL * (within + beyond):
            ratio = wanted * self.step_s(math.ceil(count / workers)) / count
            if ratio >= 1 and count > 2 * most * workers:
                return 0.0
            term *= ratio
            beyond += term
            count += 1
        return within / (within + beyond)

    def _largest_batch(self) -> int:
        """Answers whose step keeps the gap between tokens; one alone does."""
        fits, too_many = 1, 2
        while self.step_s(too_many) <= self._objectives.itl_s and too_many < _MOST_ANSWERS:
            fits, too_many = too_many, 2 * too_many
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            is_kept = self.step_s(middle) <= self._objectives.itl_s
            fits, too_many = (middle, too_many) if is_kept else (fits, middle)
        return fits

    def _has_room(self, batch: float) -> bool:
        most = batch + SPREAD * math.sqrt(batch)
        return (
            most * (self._demand.mean_prompt + self._demand.output) * self._costs.kv_bytes_per_token
            <= self._room
        )

    def _waits(self, workers: int, slowed: float = 1.0) -> tuple[float, float]:
        services = [slowed * service for service in self._services]
        mean = sum(services) / len(services)
        variance = sum((service - mean) ** 2 for service in services) / len(services)
        return waits(self._demand.rate, mean, variance / mean**2, workers)

    def _share(self, workers: int, slowed: float = 1.0) -> float:
        """Of first tokens that come in time."""
        return self._share_after(*self._waits(workers, slowed), slowed)

    def _share_without_waits(self, slowed: float = 1.0) -> float:
        """The most that any number of workers comes to."""
        return self._share_after(0.0, 0.0, slowed)

    def _share_after(self, probability: float, wait: float, slowed: float) -> float:
        limit = self._objectives.ttft_s - min(self._objectives.itl_s, self.step_s(1))
        within = [share_within(limit - slowed * service, probability, wait) for service in self._services]
        return sum(within) / len(within)


def break_even(
    costs: ModelCosts, profile: DeviceProfile, demand: Demand, objectives: Objectives, case: int = 1
) -> float | None:
    """Mean prompt length from which on the split needs no more devices than colocated workers.

    None if it needs more at the longest that can be served. Everything else stays as it is. Looked for
    between a sixteenth of the prompts and sixteen times them, in steps of a fifth: workers are whole numbers,
    so that the split may need one more at a length between two steps.
    """
    pays_from = None
    for power in range(15, -16, -1):
        scaled = demand.scaled(1.2**power)
        try:
            found = Planner(costs, profile, scaled, objectives, case).plan()
        except ConfigError:
            continue
        if found.colocated is not None and found.prefill + found.decode > found.colocated:
            break
        pays_from = scaled.mean_prompt
    return pays_from
