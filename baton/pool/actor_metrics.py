"""A worker's figures among Ray's own metrics, and so in the charts of its dashboard.

Runs inside an actor. Labels are names of workers, roles and kinds of events only: a bounded set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ray.util.metrics import Counter, Gauge

from baton.health import WorkerLoad

_GAUGES: Final = {
    "running": "Requests in the batch.",
    "waiting": "Requests in front of the batch.",
    "attempts": "Attempts of all routers.",
    "free_blocks": "KV blocks that nobody uses.",
    "blocks": "KV blocks.",
}


class ActorMetrics:
    """The metrics of one worker; show() sets them."""

    def __init__(self, worker: str, role: str) -> None:
        tags = {"worker": worker, "role": role}
        self._gauges = {
            name: Gauge(f"baton_worker_{name}", text, tuple(tags)) for name, text in _GAUGES.items()
        }
        self._events = Counter("baton_worker_events", "Counts since the worker's start.", (*tags, "kind"))
        for metric in (*self._gauges.values(), self._events):
            metric.set_default_tags(tags)
        self._shown: dict[str, int] = {}

    def show(self, load: WorkerLoad, totals: Mapping[str, int]) -> None:
        """Sets the gauges, and counts what the totals have grown by."""
        values = (
            load.num_running,
            load.num_waiting,
            load.num_attempts,
            load.num_free_blocks,
            load.num_blocks,
        )
        for gauge, value in zip(self._gauges.values(), values, strict=True):
            gauge.set(float(value))
        for kind, total in totals.items():
            grown = total - self._shown.get(kind, 0)
            if grown > 0:
                self._events.inc(float(grown), {"kind": kind})
            self._shown[kind] = total
