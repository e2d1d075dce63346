"""The table of a chaos run: which fault a question counts under, as what, and how long it took."""

from __future__ import annotations

from dataclasses import replace

from baton.errors import Unavailable
from benchmarks.chaos.load import Case, Record
from benchmarks.chaos.recovery import recoveries
from benchmarks.chaos.storm import Strike
from benchmarks.chaos.summary import FaultRow, Span, format_rows, summary

RIGHT = (5, 6)
VICTIM = "decode-0"


def strike(kind: str, begun_at: float, whole_at: float, **fields: float) -> Strike:
    times = {"lifted_at": begun_at, "answers_at": whole_at, **fields}
    return Strike(kind=kind, edge=(VICTIM, VICTIM), begun_at=begun_at, whole_at=whole_at, **times)


def asked(at: float, until: float, **fields: object) -> Record:
    case = Case(prompt=(1,), max_tokens=2)
    return Record(case=case, asked_at=at, ended_at=until, **{"tokens": RIGHT, **fields})


STRIKES = [strike("kill", 10, 12, detected_s=0.5), strike("cut", 11, 13), strike("cut", 20, 21)]


def test_each_question_counts_once_under_each_kind_of_fault_that_it_met() -> None:
    records = [
        asked(0, 9),
        asked(9, 10.5),
        asked(11.5, 20.5, was_retried=True),
        asked(12.5, 12.6, tokens=(), outcome="failed", failure=Unavailable("lost")),
        asked(20.2, 20.3, tokens=(5, 7), was_moved=True),
        asked(20.2, 20.4, tokens=(5,), outcome="cancelled"),
        asked(22, 23),
    ]
    rows = summary(STRIKES, records, lambda record: record.tokens == RIGHT[: len(record.tokens)])
    counts = [
        (row.kind, row.num_strikes, row.attempted, row.ok, row.resumed, row.cancelled, row.failed, row.wrong)
        for row in rows
    ]
    lost = {"UNAVAILABLE": 1}
    assert counts == [
        ("cut", 2, 4, 1, 1, 1, lost, 1),
        ("kill", 1, 2, 2, 1, 0, {}, 0),
        ("all", 3, 7, 4, 1, 1, lost, 1),
    ]
    assert [row.detection for row in rows] == [None, Span(0.5, 0.5, 1), Span(0.5, 0.5, 1)]
    assert [row.whole for row in rows] == [Span(1.5, 2, 2), Span(2, 2, 1), Span(2, 2, 3)]


def test_recovery_is_the_longest_gap_of_what_was_struck() -> None:
    hit = {"places": frozenset({VICTIM}), "was_retried": True}
    struck = strike("stop", 10, 14, lifted_at=13)
    gaps = [
        # From the last token before to the first one after, though others are longer.
        (asked(1, 30, arrivals=(2, 9, 9.5, 11.75, 12, 20), **hit), 8),
        (asked(1, 30, arrivals=(2, 9, 9.5, 11.75, 12, 12.5), **hit), 2.25),
        # Without a token yet: from the strike, or a later question, to the first or to the end.
        (asked(1, 30, arrivals=(14, 14.5), **hit), 4),
        (asked(11, 30, arrivals=(14, 14.5), **hit), 3),
        (asked(1, 17, tokens=(), **hit), 7),
        # Its tokens came before, or it was elsewhere, or nothing of it was lost.
        (asked(1, 30, arrivals=(2, 9), **hit), None),
        (asked(1, 30, arrivals=(9, 14), places=frozenset({"decode-1"}), was_retried=True), None),
        (asked(1, 30, arrivals=(9, 14), places=frozenset({VICTIM})), None),
    ]
    assert [recoveries([struck], [record]) for record, _ in gaps] == [[gap] for _, gap in gaps]
    [row, _] = summary([struck], [record for record, _ in gaps[1:4]], lambda _record: True)
    assert row.recovery == Span(4, 4, 1)


def test_a_wait_counts_for_one_fault_only() -> None:
    hit = {"places": frozenset({VICTIM, "router-0"}), "was_retried": True}
    stop, cut, kill = (
        strike("stop", 10, 14, lifted_at=13),
        strike("cut", 12, 12.5),
        strike("kill", 12.3125, 14),
    )
    link = replace(cut, kind="cut link", edge=("router-0", VICTIM))
    other = replace(kill, edge=("router-1", VICTIM))
    # What began last before a wait is its cause; tokens that were under way come a little after it.
    assert recoveries([stop, kill], [asked(1, 30, arrivals=(9.9375, 12.25, 13.5), **hit)]) == [2.3125, 1.25]
    # Where all began later, the first is the cause; of a link both ends must have been the answer's.
    assert recoveries([kill, link, other], [asked(1, 30, arrivals=(11, 15), **hit)]) == [None, 4, None]
    assert recoveries([stop, cut], [asked(1, 30, arrivals=(2, 12.0625, 15), **hit)]) == [10.0625, 2.9375]


def test_the_table_has_a_line_per_fault() -> None:
    row = FaultRow(
        kind="kill decode",
        num_strikes=2,
        attempted=9,
        ok=5,
        resumed=1,
        cancelled=1,
        expired=1,
        failed={"UNAVAILABLE": 1},
        wrong=1,
        recovery=Span(0.25, 0.5, 2),
    )
    heads, cells = (line.split() for line in format_rows([row]).splitlines())
    assert [heads[:9], cells] == [
        ["fault", "strikes", "attempted", "ok", "resumed", "cancelled", "expired", "failed", "wrong"],
        ["kill", "decode", "2", "9", "5", "1", "1", "1", "1", "1", "-", "0.25", "0.50", "-"],
    ]
