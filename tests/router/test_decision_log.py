from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.prefix_keys import PrefixKeys
from baton.v1 import common_pb2, route_explain_pb2
from router.config import RouterConfig
from router.decision_log import FLUSH_RECORDS, DecisionLog
from router.learning.cost_model import CostModel
from router.offline.recording import Recording

CONFIG = RouterConfig(name="router-3", model="tiny", bucket_edges=(100, 200), itl_objective_ms=77.0)


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def join_workers(log: DecisionLog, now: float) -> None:
    sizes = {"num_blocks": 50, "block_size": 16, "chunk_tokens": 128, "max_batch_tokens": 256}
    log.worker_joined(now, name="prefill-0", role=common_pb2.ROLE_PREFILL, incarnation=7, **sizes)
    seats = {"mixed_tokens": 64, "max_running": 8}
    log.worker_joined(now, name="decode-0", role=common_pb2.ROLE_DECODE, incarnation=8, **sizes, **seats)


def want(log: DecisionLog, now: float, *, tenant: str = "", prefix: dict | None = None) -> int:
    return log.request(
        now,
        num_prompt_tokens=40,
        max_tokens=16,
        tenant=tenant,
        priority=common_pb2.PRIORITY_HIGH,
        ttft_objective_ms=620.0,
        prefix=prefix or {},
    )


def end(log: DecisionLog, now: float, number: int, *, tokens: int = 4, ttft_ms: float | None = 50.0) -> None:
    log.ended(
        now,
        number,
        outcome="OK" if tokens else "UNAVAILABLE",
        num_output_tokens=tokens,
        ttft_ms=ttft_ms,
        itl_ms=9.5,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        prefill=common_pb2.PrefillTimes(compute_ms=44.0, num_computed_tokens=24, num_cached_tokens=16),
        transfer_tail_ms=3.0,
        num_attempts=1,
    )


def test_what_was_logged_can_be_replayed(tmp_path) -> None:
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(str(path), config=CONFIG, now=100.0)
    join_workers(log, 100.5)
    keys = PrefixKeys(b"", block_size=16)
    number = want(log, 101.0, prefix={16: keys.keys(range(40))})
    end(log, 102.0, number)
    log.costs(103.0, CostModel(), {7: "prefill-0"})
    log.close()

    found = Recording.read(path)
    assert [(w.name, w.role, w.num_blocks, w.mixed_tokens) for w in found.workers] == [
        ("decode-0", "decode", 50, 64),
        ("prefill-0", "prefill", 50, 0),
    ]
    (request,), (measured,) = found.requests, found.measured
    assert (request.arrived_at, request.num_prompt_tokens, request.num_output_tokens) == (1.0, 40, 4)
    assert (request.priority, request.ttft_objective_ms, request.prefix) == ("high", 620.0, {16: (1, 2)})
    assert (measured.ttft_ms, measured.itl_ms, measured.compute_ms) == (50.0, 9.5, 44.0)
    assert (measured.num_computed_tokens, measured.num_cached_tokens) == (24, 16)
    assert found.settings["bucket_edges"] == [100, 200]
    assert found.settings["itl_objective_ms"] == 77.0
    # What a model that has seen nothing predicts.
    for name in ("", "prefill-0"):
        assert found.costs["prefill", name] == pytest.approx((30.0, 1.0, 0.0), abs=1e-4)


def test_equal_prefixes_have_equal_numbers_and_others_do_not(tmp_path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(str(path), config=CONFIG, now=0.0)
    first, second = ([*range(32), *tail] for tail in (range(100, 116), range(200, 216)))
    for token_ids in (first, second, first):
        want(log, 0.0, prefix={16: PrefixKeys(b"", block_size=16).keys(token_ids)})
    log.close()
    assert [record["prefix"]["16"] for record in records(path)[1:]] == [[[1, 3]], [[1, 2], [4, 1]], [[1, 3]]]


def test_neither_tenants_nor_prefix_keys_stand_in_it(tmp_path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(str(path), config=CONFIG, now=0.0)
    keys = PrefixKeys(b"", block_size=16).keys(range(16))
    for tenant in ("canary-tenant", "other", "canary-tenant"):
        want(log, 0.0, tenant=tenant, prefix={16: keys})
    log.close()
    assert [record["tenant"] for record in records(path)[1:]] == [1, 2, 1]
    text = path.read_bytes()
    for secret in (b"canary-tenant", keys[0], keys[0].hex().encode()):
        assert secret not in text


def test_candidates_have_the_fields_of_the_message(tmp_path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(str(path), config=CONFIG, now=0.0)
    candidate = route_explain_pb2.Candidate(
        prefill_worker="p", decode_worker="d", score_ms=1.23456, chosen=True
    )
    log.placed(2.0, 5, attempt=2, candidates=[candidate])
    log.close()
    (placed,) = records(path)[1:]
    assert (placed["t"], placed["kind"], placed["id"], placed["attempt"]) == (2.0, "placed", 5, 2)
    assert set(placed["candidates"][0]) == set(route_explain_pb2.Candidate.DESCRIPTOR.fields_by_name)
    assert placed["candidates"][0]["score_ms"] == 1.235


def test_without_a_path_nothing_is_written_and_numbers_are_given_all_the_same(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = DecisionLog("", config=CONFIG, now=0.0)
    assert not log.is_on
    assert [want(log, 0.0), want(log, 0.0)] == [1, 2]
    end(log, 1.0, 1)
    log.costs(1.0, CostModel(), {})
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_records_are_written_many_at_a_time(tmp_path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(str(path), config=CONFIG, now=0.0)
    for _ in range(FLUSH_RECORDS - 2):
        log.worker_gone(0.0, name="w")
    assert path.stat().st_size == 0
    log.worker_gone(0.0, name="w")
    assert len(records(path)) == FLUSH_RECORDS
    # Or when some time has passed.
    log.worker_gone(0.5, name="w")
    assert len(records(path)) == FLUSH_RECORDS
    log.worker_gone(1.5, name="w")
    assert len(records(path)) == FLUSH_RECORDS + 2


def test_costs_are_noted_now_and_then_and_at_the_end(tmp_path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(str(path), config=CONFIG, now=0.0)
    for tenth in range(250):
        log.costs(tenth / 10, CostModel(), {})
    log.costs(25.0, CostModel(), {}, is_last=True)
    log.close()
    times = [record["t"] for record in records(path) if record.get("of") == "prefill"]
    assert times == [0.0, 10.0, 20.0, 25.0]


def test_a_full_disk_ends_the_log_with_one_warning_and_nothing_else(caplog) -> None:
    log = DecisionLog("/dev/full", config=CONFIG, now=0.0)
    for _ in range(3 * FLUSH_RECORDS):
        want(log, 0.0)
    log.close()
    assert not log.is_on
    assert sum("decision log stopped" in record.getMessage() for record in caplog.records) == 1


def test_a_file_that_cannot_be_opened_is_refused_at_the_start(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be written") as refused:
        DecisionLog(str(tmp_path / "no" / "log"), config=CONFIG, now=0.0)
    assert refused.value.field == "decision_log"


def test_a_run_that_was_killed_does_not_spoil_the_next(tmp_path) -> None:
    path = tmp_path / "log"
    killed = DecisionLog(str(path), config=CONFIG, now=0.0)
    end(killed, 0.0, want(killed, 0.0))
    killed.close()
    os.truncate(path, path.stat().st_size - 5)

    log = DecisionLog(str(path), config=CONFIG, now=50.0)
    join_workers(log, 50.0)
    for arrived_at in (51.0, 52.0):
        end(log, arrived_at + 1, want(log, arrived_at))
    log.costs(53.0, CostModel(), {})
    log.close()
    assert [request.arrived_at for request in Recording.read(path).requests] == [1.0, 2.0]
