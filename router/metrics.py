"""What a router tells a collector about its decisions.

Owns names, units and attributes of its instruments. Attributes are bounded: a kind of prediction, a way to
place, a reason.

    baton.router.prediction.error  1  gauge      kind       p90 of |predicted - measured| / measured
    baton.router.regret            s  histogram  placement  TTFT beyond the best place not taken, predicted
    baton.router.placed            1  counter    placement  attempts: remote or local
    baton.router.shed              1  counter    reason     refused: queue, objective, rate, ...
    baton.router.queue.duration    s  histogram  priority   from arrival to placement, of first attempts
    baton.router.queued            s  gauge      bucket     predicted prefill of what waits; 0 is the shortest
    baton.router.requests          -  gauge                 requests in flight
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeter, Observation

from baton.metrics import SECONDS
from router.learning.cost_model import KINDS, CostModel


class RouterMetrics:
    """Of one router; also keeps the totals that `baton status` shows."""

    def __init__(self, meter: Meter | None = None) -> None:
        self._meter = meter = meter or NoOpMeter("baton")
        self._regret_s = meter.create_histogram(
            "baton.router.regret",
            "s",
            "How much sooner the first token was predicted at the best other place",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._placed = meter.create_counter("baton.router.placed", "1", "Attempts that got their workers")
        self._shed = meter.create_counter("baton.router.shed", "1", "Requests refused for want of room")
        self._queue_s = meter.create_histogram(
            "baton.router.queue.duration",
            "s",
            "Wait of requests for their first placement",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self.num_placed = {"remote": 0, "local": 0}
        self.num_shed = 0
        self.num_regrets = 0
        self.sum_regret_ms = 0.0

    def watch(self, costs: CostModel) -> None:
        """Reports how far predictions are off, whenever the collector asks."""

        def errors(_options: CallbackOptions) -> Iterable[Observation]:
            return [Observation(costs.error_p90(kind), {"kind": kind}) for kind in KINDS]

        self._meter.create_observable_gauge(
            "baton.router.prediction.error",
            [errors],
            "1",
            "Relative error that 90 % of the last predictions stay within",
        )

    def watch_load(self, queued_ms: Callable[[], Sequence[float]], num_requests: Callable[[], int]) -> None:
        """Reports what waits, by bucket, and what is in flight: what routers and prefill workers scale by."""

        def queued(_options: CallbackOptions) -> Iterable[Observation]:
            return [Observation(ms / 1000, {"bucket": str(index)}) for index, ms in enumerate(queued_ms())]

        self._meter.create_observable_gauge(
            "baton.router.queued", [queued], "s", "Predicted prefill of the prompts that wait"
        )
        self._meter.create_observable_gauge(
            "baton.router.requests",
            [lambda _options: [Observation(num_requests())]],
            "{request}",
            "Requests in flight",
        )

    def placed(self, placement: str, priority: str, queue_s: float | None) -> None:
        """An attempt got its workers. queue_s: how long it waited, of a first attempt."""
        self.num_placed[placement] += 1
        self._placed.add(1, {"placement": placement})
        if queue_s is not None:
            self._queue_s.record(queue_s, {"priority": priority})

    def regretted(self, placement: str, regret_ms: float) -> None:
        """A first token came; regret_ms is 0 if no other place was predicted to be better."""
        self.num_regrets += 1
        self.sum_regret_ms += regret_ms
        self._regret_s.record(regret_ms / 1000, {"placement": placement})

    def shed(self, reason: str) -> None:
        """A request was refused."""
        self.num_shed += 1
        self._shed.add(1, {"reason": reason})

    @property
    def mean_regret_ms(self) -> float:
        """Over all first tokens."""
        return self.sum_regret_ms / self.num_regrets if self.num_regrets else 0.0
