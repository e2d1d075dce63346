"""What a decision log holds, read back: workers, requests, what became of them, fitted costs.

Owns the reading of the format that router/decision_log.py writes. It knows no policy.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from router.decision_log import FORMAT, VERSION
from router.learning.cost_model import KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWorker:
    """A worker: role "prefill" or "decode", sizes as its engine's settings have them."""

    name: str
    role: str
    num_blocks: int
    block_size: int
    chunk_tokens: int
    max_batch_tokens: int
    mixed_tokens: int = 0
    max_running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """An answer that was wanted, and how long it became.

    arrived_at: seconds since the run began.
    prefix: numbers of the full blocks of its prompt, by block size; equal numbers are equal prefixes.
    """

    number: int
    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    tenant: str = ""
    weight: float = 1.0
    priority: str = "normal"
    ttft_objective_ms: float = 0.0
    prefix: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an answer, measured or simulated.

    ttft_ms: None if it got no token.  itl_ms: mean gap between tokens; 0 for an answer of one token.
    prefill_worker: computed its prompt.  compute_ms: its share of the steps that did.
    """

    request: RecordedRequest
    ttft_ms: float | None
    itl_ms: float
    prefill_worker: str
    decode_worker: str
    compute_ms: float
    num_computed_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One run of a router.

    settings: of the router that matter to a replay.
    workers: those that were there for at least half of the requests.
    requests: those that ended with a token, by arrival.  measured: what became of them, in the same order.
    costs: fitted coefficients by (kind, worker's name); the name "" is the fleet.
    num_left_out: requests without a token, refused, failed, cancelled or still running, and further answers
        to one prompt.
    """

    settings: Mapping[str, Any]
    workers: tuple[RecordedWorker, ...]
    requests: tuple[RecordedRequest, ...]
    measured: tuple[Outcome, ...]
    costs: Mapping[tuple[str, str], tuple[float, ...]]
    num_left_out: int

    @classmethod
    def read(cls, path: Path) -> Recording:
        """The last run in a log.

        Raises ConfigError, naming what is wrong, for a file that is no such log or cannot be replayed.
        """
        records = _last_run(path)
        settings = _settings(path, records[0])
        wanted = {record["id"]: record for record in records if record["kind"] == "request"}
        ended = {record["id"]: record for record in records if record["kind"] == "ended"}
        answered = [
            number
            for number, request in wanted.items()
            # Further answers to a prompt start where its KV is: nothing that a policy could place otherwise.
            if not request.get("sample_index") and ended.get(number, {}).get("output_tokens")
        ]
        answered.sort(key=lambda number: float(wanted[number]["t"]))
        requests = [_request(wanted[number], ended[number]) for number in answered]
        found = cls(
            settings=settings,
            workers=tuple(_workers(records)),
            requests=tuple(requests),
            measured=tuple(_measured(request, ended[request.number]) for request in requests),
            costs=_costs(records),
            num_left_out=len(wanted) - len(requests),
        )
        _refuse_useless(path, found)
        return found


def _last_run(path: Path) -> list[dict[str, Any]]:
    """The records of the last run; the last line of a run that was killed may be torn."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="LOG") from None
    run: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            if number < len(lines) and b'"kind":"log"' not in lines[number]:
                raise ConfigError(f"{path}, line {number}: not JSON", field="LOG") from None
            continue
        if not isinstance(record, dict) or "kind" not in record:
            raise ConfigError(f"{path}, line {number}: not a record of a decision log", field="LOG")
        if record["kind"] == "log":
            run = []
        run.append(record)
    if not run or run[0]["kind"] != "log":
        raise ConfigError(f'{path} does not begin with a "log" record', field="LOG")
    return run


def _settings(path: Path, head: Mapping[str, Any]) -> Mapping[str, Any]:
    if head.get("format") != FORMAT or head.get("version") != VERSION:
        raise ConfigError(
            f"{path} is of format {head.get('format')!r}, version {head.get('version')!r}; "
            f"this program reads {FORMAT!r}, version {VERSION}",
            field="LOG",
        )
    settings: Mapping[str, Any] = head["settings"]
    return settings


def _workers(records: list[dict[str, Any]]) -> Iterator[RecordedWorker]:
    """Those that were there for at least half of the requests, as they last were."""
    here: dict[str, dict[str, Any]] = {}
    known: dict[str, dict[str, Any]] = {}
    num_requests, seen = 0, Counter[str]()
    for record in records:
        if record["kind"] == "worker":
            here[record["name"]] = known[record["name"]] = record
        elif record["kind"] == "gone":
            here.pop(record["name"], None)
        elif record["kind"] == "request":
            num_requests += 1
            seen.update(here.keys())
    names = RecordedWorker.__dataclass_fields__
    for name, record in sorted(known.items()):
        if 2 * seen[name] >= num_requests:
            yield RecordedWorker(**{key: record[key] for key in names})


def _request(wanted: Mapping[str, Any], ended: Mapping[str, Any]) -> RecordedRequest:
    return RecordedRequest(
        number=wanted["id"],
        arrived_at=wanted["t"],
        num_prompt_tokens=wanted["prompt_tokens"],
        num_output_tokens=ended["output_tokens"],
        max_tokens=wanted["max_tokens"],
        tenant=str(wanted["tenant"]),
        weight=wanted["weight"],
        priority=wanted["priority"],
        ttft_objective_ms=wanted["ttft_objective_ms"],
        prefix={int(size): _numbers(runs) for size, runs in wanted["prefix"].items()},
    )


def _numbers(runs: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(range(first, first + count) for first, count in runs))


def _measured(request: RecordedRequest, ended: Mapping[str, Any]) -> Outcome:
    prefill = ended["prefill"] or {}
    return Outcome(
        request=request,
        ttft_ms=ended["ttft_ms"],
        itl_ms=ended["itl_ms"],
        prefill_worker=ended["prefill_worker"],
        decode_worker=ended["decode_worker"],
        compute_ms=prefill.get("compute_ms", 0.0),
        num_computed_tokens=prefill.get("num_computed_tokens", 0),
        num_cached_tokens=prefill.get("num_cached_tokens", 0),
    )


def _costs(records: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, ...]]:
    """The last that were noted."""
    return {
        (record["of"], record["worker"]): tuple(record["coefficients"])
        for record in records
        if record["kind"] == "costs"
    }


def _refuse_useless(path: Path, found: Recording) -> None:
    if not found.requests:
        raise ConfigError(f"{path} holds no request that got an answer", field="LOG")
    if not any(worker.role == "decode" for worker in found.workers):
        raise ConfigError(f"{path} holds no decode worker", field="LOG")
    missing = [kind for kind in KINDS if (kind, "") not in found.costs]
    if missing:
        raise ConfigError(
            f"{path} holds no fitted costs of {', '.join(missing)}: record a longer run, and end it in an "
            "orderly way",
            field="LOG",
        )
