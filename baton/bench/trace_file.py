"""Requests of a trace file: time, prompt tokens, output tokens.

Reads CSV with a header, and JSON lines, either gzipped or not. Columns are known by the names that public
traces give them: Mooncake's (timestamp in milliseconds, input_length, output_length, hash_ids), Azure's
(TIMESTAMP, ContextTokens, GeneratedTokens), or plain ones. The project ships no trace; where they come from
is in benchmarks/README.md.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One request.

    at_s: seconds after the first.
    hash_ids: a name for each block of the prompt, the same name for the same text after the same text; empty
        where the trace does not say what prompts share.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


# The name of a time's column says its unit.
TIMES: dict[str, Callable[[Any], float]] = {
    "time_s": float,
    "t_ms": lambda value: float(value) / 1000,
    "timestamp": lambda value: float(value) / 1000,
    "TIMESTAMP": lambda value: datetime.fromisoformat(value).replace(tzinfo=UTC).timestamp(),
}
PROMPTS = ("input_tokens", "input_length", "ContextTokens")
OUTPUTS = ("output_tokens", "output_length", "GeneratedTokens")


def read_trace(path: Path) -> list[TraceEntry]:
    """The requests of a file, in order of time; those without a prompt or an output token are left out.

    Raises ValueError naming the file and the column that is missing or the line that is wrong.
    """
    found = [entry for entry in _entries(path) if entry.num_prompt_tokens and entry.num_output_tokens]
    if not found:
        raise ValueError(f"{path} has no requests")
    found.sort(key=lambda entry: entry.at_s)
    first = found[0].at_s
    return [replace(entry, at_s=entry.at_s - first) for entry in found]


def _entries(path: Path) -> Iterator[TraceEntry]:
    for number, row in enumerate(_rows(path), start=1):
        time, prompt, output = (_column(path, row, names) for names in (TIMES, PROMPTS, OUTPUTS))
        try:
            entry = TraceEntry(
                at_s=TIMES[time](row[time]),
                num_prompt_tokens=int(row[prompt]),
                num_output_tokens=int(row[output]),
                hash_ids=tuple(map(int, row.get("hash_ids") or ())),
            )
            _check(entry)
            yield entry
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, request {number}: {error}") from None


def _check(entry: TraceEntry) -> None:
    if not math.isfinite(entry.at_s):
        raise ValueError("its time is no number")
    if min(entry.num_prompt_tokens, entry.num_output_tokens) < 0:
        raise ValueError("it has less than no tokens")


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: it is no JSON object")
        yield row


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    is_zipped = path.suffix == ".gz"
    with gzip.open(path, "rt", encoding="utf-8") if is_zipped else path.open(encoding="utf-8") as file:
        if ".jsonl" in path.suffixes:
            yield from _json_lines(path, file)
        else:
            yield from csv.DictReader(file)


def _column(path: Path, row: Mapping[str, Any], names: Mapping[str, Any] | tuple[str, ...]) -> str:
    for name in names:
        if name in row:
            return name
    raise ValueError(f"{path} has none of the columns {', '.join(names)}; it has {', '.join(row)}")
