"""What the transfer layer tells a collector.

Owns names, units and attributes of its instruments. Attributes are bounded: a transport, the outcome
of a transfer, a part of it.

    baton.kv.pair.duration          s    histogram  transport             from the first try to a usable pair
    baton.kv.transfer.duration      s    histogram  transport, outcome    from the first frame to the answer
    baton.kv.transfer.part          s    histogram  transport, part       parts of the same transfer
    baton.kv.transfer.failed        1    counter    transport, outcome    transfers that came to no outcome
    baton.kv.transfer.size          By   counter    transport             payload of the same transfers
    baton.kv.transfer.hidden        1    histogram  transport             share sent when all was computed
    baton.kv.sender.total           1    counter    kind                  resends, frames from a stage, ...
    baton.kv.receiver.total         1    counter    kind                  frames, refused writes, ...
    baton.kv.slots                  1    gauge      state                 free, held, quarantined, retired
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields

from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeter, Observation

from baton.errors import BatonError
from baton.metrics import SECONDS, SHARES
from kvtransfer.contract import Gone
from kvtransfer.sender import TransferOutcome
from kvtransfer.transfer_times import TransferTimes

Totals = Callable[[], Mapping[str, int]]


class SendMetrics:
    """Of a prefill worker."""

    def __init__(self, meter: Meter | None = None) -> None:
        meter = meter or NoOpMeter("baton")
        self._pair_s = meter.create_histogram(
            "baton.kv.pair.duration",
            "s",
            "Time until a decode worker could be reached",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._duration_s = meter.create_histogram(
            "baton.kv.transfer.duration",
            "s",
            "From the first frame of a transfer to its outcome",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._part_s = meter.create_histogram(
            "baton.kv.transfer.part",
            "s",
            "Where the time of a transfer went; parts overlap",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._hidden = meter.create_histogram(
            "baton.kv.transfer.hidden",
            "1",
            "Share of the bytes that were sent before the last token was computed",
            explicit_bucket_boundaries_advisory=SHARES,
        )
        self._failed = meter.create_counter("baton.kv.transfer.failed", "1", "Transfers without an outcome")
        self._size = meter.create_counter("baton.kv.transfer.size", "By", "Payload sent, resends included")

    def paired(self, transport: str, duration_s: float) -> None:
        """A decode worker can be reached."""
        self._pair_s.record(duration_s, {"transport": transport})

    def transferred(self, transport: str, result: TransferOutcome) -> None:
        """A transfer came to an outcome; bytes and seconds are those of the same attempt."""
        gone = result.outcome if isinstance(result.outcome, Gone) else None
        outcome = "committed" if gone is None else f"gone_{gone.reason.name.lower()}"
        self._duration_s.record(result.duration_s, {"transport": transport, "outcome": outcome})
        self._size.add(result.num_bytes, {"transport": transport})
        self._hidden.record(result.hidden_share, {"transport": transport})
        for part in fields(TransferTimes):
            attributes = {"transport": transport, "part": part.name.removesuffix("_s")}
            self._part_s.record(getattr(result.times, part.name), attributes)

    def failed(self, transport: str, error: BatonError) -> None:
        """A transfer came to no outcome."""
        self._failed.add(1, {"transport": transport, "outcome": error.code.lower()})


def observe_totals(meter: Meter, name: str, totals: Totals) -> None:
    """A counter of every total, read when metrics are collected; `name` is "sender" or "receiver"."""

    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(count, {"kind": kind}) for kind, count in dict(totals()).items()]

    meter.create_observable_counter(f"baton.kv.{name}.total", [observe], "1")


def observe_slots(meter: Meter, counts: Totals) -> None:
    """A gauge of the arena's slots by state."""

    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(count, {"state": state}) for state, count in dict(counts()).items()]

    meter.create_observable_gauge("baton.kv.slots", [observe], "1")
