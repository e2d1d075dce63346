"""What became of the questions under each kind of fault, and how fast each was noticed and over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.chaos.load import Record
from benchmarks.chaos.recovery import recoveries
from benchmarks.chaos.storm import Strike

ALL = "all"


@dataclass(frozen=True, slots=True)
class Span:
    """Median and maximum of some seconds, and of how many strikes."""

    median_s: float
    max_s: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Span | None:
        """None where there is no value."""
        known = [value for value in values if value is not None]
        return cls(median(known), max(known), len(known)) if known else None

    def __str__(self) -> str:
        return f"{self.median_s:.2f} {self.max_s:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """The questions under one kind of fault; one under several kinds counts for each.

    ok: complete and right.  resumed: those of them that went on elsewhere or were tried again.
    cancelled, expired: ended as their client wanted, and right as far as they went.
    failed: by code.  wrong: of all, those with a token that should not be.
    detection: until somebody knew.  recovery: per strike the longest wait that counts for it, see
    recovery.py.  whole: until what was struck was of use again, the fault's own time included.
    """

    kind: str
    num_strikes: int
    attempted: int
    ok: int
    resumed: int
    cancelled: int
    expired: int
    failed: dict[str, int]
    wrong: int
    detection: Span | None = None
    recovery: Span | None = None
    whole: Span | None = None

    @property
    def num_failed(self) -> int:
        """Questions without the end that they should have had."""
        return sum(self.failed.values())


def summary(
    strikes: Sequence[Strike], records: Sequence[Record], is_right: Callable[[Record], bool]
) -> list[FaultRow]:
    """One row per kind of fault, in the order of their names, and one for all questions."""
    waits = recoveries(strikes, records)
    rows = []
    for kind in sorted({strike.kind for strike in strikes}):
        of_kind = [strike for strike in strikes if strike.kind == kind]
        asked = [record for record in records if any(strike.had(record) for strike in of_kind)]
        of_kind_s = [wait for strike, wait in zip(strikes, waits, strict=True) if strike.kind == kind]
        rows.append(_row(kind, of_kind, asked, of_kind_s, is_right))
    return [*rows, _row(ALL, strikes, records, waits, is_right)]


def _row(
    kind: str,
    strikes: Sequence[Strike],
    asked: Sequence[Record],
    waits_s: Sequence[float | None],
    is_right: Callable[[Record], bool],
) -> FaultRow:
    right = [record for record in asked if is_right(record)]
    count = Counter(record.outcome for record in right)
    return FaultRow(
        kind=kind,
        num_strikes=len(strikes),
        attempted=len(asked),
        ok=count["answered"],
        resumed=sum(record.was_resumed for record in right if record.outcome == "answered"),
        cancelled=count["cancelled"],
        expired=count["expired"],
        failed=dict(
            Counter(record.failure.code for record in asked if _is_failed(record) and record.failure)
        ),
        wrong=len(asked) - len(right),
        detection=Span.of(strike.detected_s for strike in strikes),
        recovery=Span.of(waits_s),
        whole=Span.of(strike.whole_at - strike.begun_at for strike in strikes),
    )


def _is_failed(record: Record) -> bool:
    return record.outcome == "failed"


_COLUMNS = ("strikes", "attempted", "ok", "resumed", "cancelled", "expired", "failed", "wrong")


def format_rows(rows: Sequence[FaultRow]) -> str:
    """The table as it is printed; spans are median and maximum in seconds."""
    spans = "".join(f"{name + ' s':>15}" for name in ("detection", "recovery", "whole"))
    lines = [f"{'fault':28}" + "".join(f"{name:>{len(name) + 2}}" for name in _COLUMNS) + spans]
    for row in rows:
        counts = (
            *(row.num_strikes, row.attempted, row.ok, row.resumed),
            *(row.cancelled, row.expired, row.num_failed, row.wrong),
        )
        cells = [f"{count:>{len(name) + 2}}" for name, count in zip(_COLUMNS, counts, strict=True)]
        known = [f"{span or '-':>15}" for span in map(_text, (row.detection, row.recovery, row.whole))]
        lines.append(f"{row.kind:28}" + "".join(cells) + "".join(known))
    return "\n".join(lines)


def _text(span: Span | None) -> str:
    return str(span) if span is not None else ""
