"""Trace files in the forms in which they are published."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from baton.bench.trace_file import TraceEntry, read_trace

MILLISECONDS = "t_ms,input_tokens,output_tokens\n500,4808,10\n2000,110,27\n"
# A clock's reading, with more digits than microseconds have.
CLOCK = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:05.4799600,110,27\n"
)
LINES = (
    '{"timestamp": 500, "input_length": 4808, "output_length": 10, "hash_ids": [0, 1]}\n'
    '{"timestamp": 2000, "input_length": 110, "output_length": 27, "hash_ids": [0]}\n'
)
SECONDS = "time_s,input_tokens,output_tokens\n0.5,4808,10\n2.0,110,27\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.csv", MILLISECONDS), ("a.csv", CLOCK), ("a.jsonl", LINES), ("a.csv", SECONDS)],
    ids=["milliseconds", "clock", "json-lines", "seconds"],
)
def test_all_forms_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")

    first, second = read_trace(path)

    assert replace(first, hash_ids=()) == TraceEntry(at_s=0.0, num_prompt_tokens=4808, num_output_tokens=10)
    assert second.at_s == pytest.approx(1.5)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (110, 27)


def test_what_prompts_share_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(LINES, encoding="utf-8")

    assert [entry.hash_ids for entry in read_trace(path)] == [(0, 1), (0,)]


def test_a_file_may_be_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES.encode()))

    assert [entry.num_prompt_tokens for entry in read_trace(path)] == [4808, 110]


def test_requests_are_put_in_order_and_empty_ones_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("t_ms,input_tokens,output_tokens\n900,7,1\n0,0,5\n100,5,2\n200,6,0\n", encoding="utf-8")

    assert [(e.at_s, e.num_prompt_tokens) for e in read_trace(path)] == [(0.0, 5), (0.8, 7)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("when,input_tokens,output_tokens\n1,2,3\n", "none of the columns time_s"),
        ("t_ms,input_tokens,output_tokens\n1,2,3\n1,many,3\n", "request 2"),
        ("t_ms,input_tokens,output_tokens\n", "no requests"),
    ],
    ids=["column", "value", "empty"],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ValueError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"t_ms": 0, "input_tokens": 1, "output_tokens": 1}\n\n{', "a.jsonl, line 3: "),
        ("[1, 2]", "line 1: it is no JSON object"),
        ('{"t_ms": NaN, "input_tokens": 1, "output_tokens": 1}', "request 1: its time is no number"),
        ('{"t_ms": 0, "input_tokens": -5, "output_tokens": 1}', "request 1: it has less than no tokens"),
    ],
)
def test_what_is_wrong_with_a_line_is_named_with_its_place(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_trace(path)
