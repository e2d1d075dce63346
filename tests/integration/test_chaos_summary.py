"""The summary of a chaos run: which fault a question counts under, and as what."""

from __future__ import annotations

from baton.errors import Unavailable
from tests.integration.chaos_load import Record
from tests.integration.chaos_storm import Row, Strike, format_rows, summary

STRIKES = [Strike("kill", 10.0, 12.0), Strike("cut", 11.0, 13.0), Strike("cut", 20.0, 21.0)]
RIGHT = (5, 6)


def asked(at: float, until: float, **fields: object) -> Record:
    return Record(case=((1,), 2), asked_at=at, ended_at=until, **{"tokens": RIGHT, **fields})


def test_each_question_counts_once_under_each_kind_of_fault_that_it_met() -> None:
    records = [
        asked(0, 9),
        asked(9, 10.5),
        asked(11.5, 20.5, was_retried=True),
        asked(12.5, 12.6, tokens=(), failure=Unavailable("lost")),
        asked(20.2, 20.3, tokens=(5, 7), was_moved=True),
        asked(22, 23),
    ]
    rows = summary(STRIKES, records, lambda record: record.tokens == RIGHT)
    # kind, strikes, attempted, ok, resumed, failed, wrong
    assert rows == [
        Row("cut", 2, 3, 1, 1, 1, 1),
        Row("kill", 1, 2, 2, 1, 0, 0),
        Row("all", 3, 6, 4, 1, 1, 1),
    ]
    assert [line.split() for line in format_rows(rows).splitlines()] == [
        ["fault", "strikes", "attempted", "ok", "resumed", "failed", "wrong"],
        ["cut", "2", "3", "1", "1", "1", "1"],
        ["kill", "1", "2", "2", "1", "0", "0"],
        ["all", "3", "6", "4", "1", "1", "1"],
    ]
