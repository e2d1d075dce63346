from __future__ import annotations

import json

import pytest

from baton.errors import ConfigError
from router.offline.recording import Recording

HEAD = {"t": 0, "kind": "log", "format": "baton-decisions", "version": 1, "router": "r", "settings": {}}
SIZES = {
    "num_blocks": 10,
    "block_size": 16,
    "chunk_tokens": 128,
    "max_batch_tokens": 256,
    "mixed_tokens": 0,
    "max_running": 0,
}
COSTS = [
    {"t": 9, "kind": "costs", "of": kind, "worker": "", "coefficients": [1.0]}
    for kind in ("prefill", "transfer", "step")
]


def joined(name: str, role: str = "decode") -> dict:
    return {"t": 0, "kind": "worker", "name": name, "role": role, **SIZES}


def gone(name: str) -> dict:
    return {"t": 0, "kind": "gone", "name": name}


def wanted(number: int) -> dict:
    return {
        "t": float(number),
        "kind": "request",
        "id": number,
        "prompt_tokens": 8,
        "max_tokens": 4,
        "tenant": 1,
        "weight": 1.0,
        "priority": "normal",
        "ttft_objective_ms": 500.0,
        "prefix": {},
    }


def ended(number: int, tokens: int = 1) -> dict:
    return {
        "t": float(number),
        "kind": "ended",
        "id": number,
        "outcome": "OK",
        "output_tokens": tokens,
        "ttft_ms": 5.0,
        "itl_ms": 0.0,
        "prefill_worker": "p",
        "decode_worker": "d",
        "prefill": None,
        "transfer_tail_ms": 0.0,
        "attempts": 1,
    }


@pytest.fixture
def read(tmp_path):
    def read(*lines: dict | str) -> Recording:
        path = tmp_path / "log"
        texts = [line if isinstance(line, str) else json.dumps(line, separators=(",", ":")) for line in lines]
        path.write_text("\n".join(texts) + "\n")
        return Recording.read(path)

    return read


def test_requests_without_an_answer_are_left_out_and_counted(read) -> None:
    found = read(HEAD, joined("d"), *map(wanted, (1, 2, 3)), ended(1), ended(2, tokens=0), *COSTS)
    assert [request.number for request in found.requests] == [1]
    assert found.num_left_out == 2


def test_workers_that_were_there_for_half_of_the_requests_are_the_fleet(read) -> None:
    found = read(
        *(HEAD, joined("stays"), joined("leaves-early"), wanted(1), ended(1), gone("leaves-early")),
        *(joined("comes-later"), wanted(2), ended(2), joined("half"), wanted(3), wanted(4), ended(3)),
        *(joined("too-late"), *COSTS),
    )
    assert [worker.name for worker in found.workers] == ["comes-later", "half", "stays"]


def test_the_last_costs_count(read) -> None:
    later = {"t": 9, "kind": "costs", "of": "step", "worker": "", "coefficients": [4.0, 5.0]}
    found = read(HEAD, joined("d"), wanted(1), ended(1), *COSTS, later)
    assert found.costs["step", ""] == (4.0, 5.0)


def test_a_torn_last_line_is_passed_over(read) -> None:
    found = read(HEAD, joined("d"), wanted(1), ended(1), *COSTS, '{"t":9,"kind":"req')
    assert len(found.requests) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], 'does not begin with a "log" record'),
        ([wanted(1)], 'does not begin with a "log" record'),
        ([HEAD, "no json", wanted(1)], "line 2: not JSON"),
        ([HEAD, "[1]", wanted(1)], "line 2: not a record"),
        ([HEAD | {"version": 2}], "of format 'baton-decisions', version 2; this program reads"),
        ([HEAD, joined("d"), wanted(1), *COSTS], "no request that got an answer"),
        ([HEAD, joined("p", "prefill"), wanted(1), ended(1), *COSTS], "no decode worker"),
        (
            [HEAD, joined("d"), wanted(1), ended(1), *COSTS[:2]],
            "no fitted costs of step: record a longer run",
        ),
    ],
    ids=["empty", "headless", "torn", "list", "version", "unanswered", "no decode worker", "no costs"],
)
def test_what_cannot_be_replayed_is_refused_by_name(read, lines, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*lines)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Recording.read(tmp_path / "none")
