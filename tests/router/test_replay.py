from __future__ import annotations

import json
import subprocess
import sys

import pytest

from baton.v1 import common_pb2
from router.config import RouterConfig
from router.decision_log import DecisionLog
from router.learning.cost_model import CostModel
from router.replay import POLICIES, main


@pytest.fixture
def log_path(tmp_path) -> str:
    path = str(tmp_path / "decisions.jsonl")
    log = DecisionLog(path, config=RouterConfig(model="tiny"), now=0.0)
    sizes = {"num_blocks": 500, "block_size": 16, "chunk_tokens": 128, "max_batch_tokens": 256}
    for role, seats in ((common_pb2.ROLE_PREFILL, {}), (common_pb2.ROLE_DECODE, {"mixed_tokens": 64})):
        for index in range(2):
            name = f"worker-{role}-{index}"
            log.worker_joined(0.0, name=name, role=role, incarnation=10 * role + index, **sizes, **seats)
    for index in range(20):
        number = log.request(
            0.1 * index,
            num_prompt_tokens=600 if index % 5 == 0 else 60,
            max_tokens=8,
            tenant="",
            priority=common_pb2.PRIORITY_NORMAL,
            ttft_objective_ms=1000.0,
            prefix={16: []},
        )
        log.ended(
            0.1 * index,
            number,
            outcome="OK",
            num_output_tokens=4,
            ttft_ms=123.0,
            itl_ms=45.0,
            prefill_worker=f"worker-{common_pb2.ROLE_PREFILL}-0",
            decode_worker=f"worker-{common_pb2.ROLE_DECODE}-0",
            prefill=common_pb2.PrefillTimes(compute_ms=60.0),
            transfer_tail_ms=1.0,
            num_attempts=1,
        )
    log.costs(3.0, CostModel(), {}, is_last=True)
    log.close()
    return path


def run(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["router.replay", *arguments])
    main()
    return capsys.readouterr().out


def test_all_policies_stand_side_by_side(monkeypatch, capsys, log_path) -> None:
    lines = run(monkeypatch, capsys, log_path).splitlines()
    assert lines[0].startswith("20 requests in 2 s, 2 prefill and 2 decode workers")
    assert [line.split()[0] for line in lines[4:]] == ["recorded", *POLICIES]
    # All prompts were computed by one of two workers.
    assert lines[4].split() == [
        "recorded",
        "123",
        "123",
        "123",
        *"---",
        *["123"] * 3,
        "45.0",
        "100.0%",
        "2.00",
    ]


def test_json_has_the_figures_of_the_policies_asked_for(monkeypatch, capsys, log_path) -> None:
    out = run(monkeypatch, capsys, log_path, "--policy", "round-robin", "--policy", "recorded", "--json")
    found = json.loads(out)
    assert (found["num_requests"], found["num_left_out"]) == (20, 0)
    assert [row["policy"] for row in found["policies"]] == ["round-robin", "recorded"]
    assert found["policies"][1]["ttft_ms"]["<128"] == {"50": 123.0, "90": 123.0, "99": 123.0}


def test_a_replay_repeats_exactly(monkeypatch, capsys, log_path) -> None:
    first, second = (run(monkeypatch, capsys, log_path, "--seed", "4") for _ in range(2))
    assert first == second


def test_a_log_that_is_none_is_wrong_usage(tmp_path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "router.replay", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"error: {tmp_path / 'none'} cannot be read")
