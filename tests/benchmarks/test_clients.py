"""What makes a run of another's load client pass or fail; reports are cut down from real ones."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients import aiperf, guidellm, vllm_bench
from benchmarks.clients.__main__ import CLIENTS
from benchmarks.clients.environments import listed
from benchmarks.clients.processes import ProgramError, finish, started
from benchmarks.clients.record import Record
from benchmarks.clients.runs import Answer, Report, Run, Target
from benchmarks.clients.served import Served, Trace, requests_of
from benchmarks.clients.verdict import complaints

ANSWER = Answer(num_prompt_tokens=94, num_output_tokens=16, ttft_ms=300.0, itl_ms=50.0)
SERVED = Served(num_prompt_tokens=94, num_output_tokens=16)
RUN = Run(name="chat", command=("x",), num_requests=3, output_tokens=16, read=lambda folder: GOOD)
GOOD = Report(answers=[ANSWER] * 3)
CANCELS = replace(RUN, cancels=True)
GIVEN_UP = Report(answers=[ANSWER] * 2, num_cancelled=1)
HALF = Served(num_prompt_tokens=94, num_output_tokens=7)


def test_what_was_asked_for_and_served_passes() -> None:
    assert complaints(RUN, GOOD, [SERVED] * 3) == []
    assert complaints(CANCELS, GIVEN_UP, [SERVED, HALF, SERVED]) == []
    # A request that was given up before it was sent is none of the cluster's.
    assert complaints(CANCELS, GIVEN_UP, [SERVED] * 2) == []


@pytest.mark.parametrize(
    ("run", "report", "served", "said"),
    [
        (RUN, replace(GOOD, answers=[ANSWER] * 2, errors=["503"]), [SERVED] * 2, "failed: 503"),
        (RUN, replace(GOOD, answers=[ANSWER] * 2), [SERVED] * 2, "2 of 3 requests were answered or given up"),
        (replace(RUN, num_requests=None), Report(answers=[]), [], "no request was answered"),
        (RUN, GIVEN_UP, [SERVED, SERVED, HALF], "1 requests were given up"),
        (CANCELS, GOOD, [SERVED] * 3, "no request was given up"),
        (CANCELS, GIVEN_UP, [SERVED] * 3, "1 requests that were given up went on to their end"),
        (RUN, GOOD, [SERVED] * 2, "1 answers of 16 tokens to 94 are not the cluster's"),
        (RUN, GOOD, [SERVED] * 4, "the cluster ended 4 requests, 1 without an answer"),
        (
            RUN,
            Report(answers=[ANSWER, ANSWER, replace(ANSWER, num_output_tokens=6)]),
            [SERVED, SERVED, replace(SERVED, num_output_tokens=6)],
            "answers have [6] tokens; 16 were asked for",
        ),
        (
            RUN,
            Report(answers=[ANSWER, ANSWER, replace(ANSWER, ttft_ms=0.0)]),
            [SERVED] * 3,
            "an answer has no time to its first token",
        ),
        (
            RUN,
            Report(answers=[ANSWER, ANSWER, replace(ANSWER, itl_ms=0.0)]),
            [SERVED] * 3,
            "an answer has no time between its tokens",
        ),
    ],
)
def test_what_is_wrong_is_said(run: Run, report: Report, served: list[Served], said: str) -> None:
    assert said in complaints(run, report, served)


def test_an_aiperf_report(tmp_path: Path) -> None:
    def metrics(**values: float) -> dict[str, Any]:
        return {name: {"value": value, "unit": ""} for name, value in values.items()}

    records: list[dict[str, Any]] = [
        {
            "metrics": metrics(
                usage_prompt_tokens=94,
                usage_completion_tokens=16,
                time_to_first_token=300.0,
                inter_token_latency=50.0,
            )
        },
        {"metrics": {}, "error": {"code": 499, "type": "RequestCancellationError", "message": "cancelled"}},
        {"metrics": {}, "error": {"code": 503, "type": "Service Unavailable", "message": "{}"}},
    ]
    folder = tmp_path / "aiperf"
    folder.mkdir()
    (folder / "profile_export.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    summary = {"request_count": {"unit": "requests", "avg": 1.0}, "run_info": {"cli_command": "/secret"}}
    (folder / "profile_export_aiperf.json").write_text(json.dumps(summary))
    report = aiperf.read(tmp_path)
    assert report.answers == [ANSWER]
    assert report.num_cancelled == 1
    assert [json.loads(error)["code"] for error in report.errors] == [503]
    assert report.kept == {"request_count": {"unit": "requests", "avg": 1.0}}


def test_a_guidellm_report(tmp_path: Path) -> None:
    def request(error: str | None) -> dict[str, Any]:
        return {
            "prompt_tokens": 94,
            "output_tokens": 16,
            "time_to_first_token_ms": 300.0,
            "inter_token_latency_ms": 50.0,
            "info": {"error": error},
        }

    requests = {"successful": [request(None)], "incomplete": [request("x")] * 2, "errored": [request("503")]}
    token_count = {"successful": {"mean": 16.0, "median": 16.0, "percentiles": {}}, "errored": {}}
    benchmark = {"requests": requests, "metrics": {"output_token_count": token_count, "text": {}}}
    (tmp_path / "guidellm.json").write_text(json.dumps({"benchmarks": [benchmark]}))
    report = guidellm.read(tmp_path)
    assert (report.answers, report.num_cancelled, report.errors) == ([ANSWER], 2, ["503"])
    assert report.kept == {"output_token_count": {"mean": 16.0, "median": 16.0}}


def test_a_vllm_report(tmp_path: Path) -> None:
    text = {
        "completed": 1,
        "failed": 1,
        "mean_ttft_ms": 300.0,
        "tokenizer_id": "/secret",
        "input_lens": [94, 64],
        "output_lens": [16, 0],
        "ttfts": [0.3, 0.0],
        "itls": [[0.04, 0.06], []],
        "errors": ["", "Service Unavailable"],
    }
    (tmp_path / "vllm.json").write_text(json.dumps(text))
    report = vllm_bench.read(tmp_path)
    assert report.errors == ["Service Unavailable"]
    (answer,) = report.answers
    assert replace(answer, itl_ms=50.0) == ANSWER
    assert answer.itl_ms == pytest.approx(50.0)
    assert report.kept == {"completed": 1, "failed": 1, "mean_ttft_ms": 300.0}


def span(name: str, parent: str | None, own: str, **attributes: int) -> dict[str, Any]:
    counts = {f"baton.{key}": value for key, value in attributes.items()}
    return {"name": name, "parent_id": parent, "span_id": own, "attributes": counts}


SPANS = [
    span("QUEUED", "a", "a1", num_tokens=94),
    span("QUEUED", "b", "b1", num_tokens=12),
    span("DECODING", "a", "a2", num_output_tokens=16),
    span("generate", "b", "b"),
    span("generate", "a", "a"),
    span("QUEUED", "c", "c1", num_tokens=9),
]


def test_requests_are_read_from_spans() -> None:
    assert requests_of(SPANS) == [Served(num_prompt_tokens=12, num_output_tokens=0), SERVED]


def test_a_trace_is_read_run_by_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = Trace(path)
    trace.skip()
    lines = [json.dumps(one) + "\n" for one in SPANS]
    path.write_text("".join(lines[:5]) + lines[5][:9])
    assert len(trace.since(2)) == 2
    path.write_text("".join(lines) + json.dumps(span("generate", "c", "c")) + "\n")
    assert trace.since(1) == [Served(num_prompt_tokens=9, num_output_tokens=0)]


def test_a_program_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="status 3; it said last: no such thing"):
        finish((sys.executable, "-c", "print('no such thing'); exit(3)"), log=tmp_path / "log", timeout_s=20)


def test_a_program_that_takes_too_long_is_said_to(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"longer than 0\.5 s"):
        finish((sys.executable, "-c", "import time; time.sleep(60)"), log=tmp_path / "log", timeout_s=0.5)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    script = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid)"
    log = tmp_path / "log"
    with started((sys.executable, "-c", script), out=log, err=log) as program:
        assert program.wait(20) == 0
        pid = int(log.read_text())
        os.kill(pid, 0)
    # A signal takes effect when it is delivered, and whoever adopts an orphan may be slow to bury it.
    until = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < until


def test_a_failed_run_is_kept_without_folders(tmp_path: Path) -> None:
    record = Record("tiny")
    client = CLIENTS["vllm"]
    target = Target(url="http://127.0.0.1:1", model="tiny", tokenizer="/models/tiny")
    run = client.runs(target)[0]
    reason = f"no report: {tmp_path}/x is missing, /models/tiny too"
    record.add_failure(client, run, reason, target, tmp_path)
    record.add_missing(CLIENTS["aiperf"], "no such version")
    kept = record.publish(None, tmp_path / "results").read_text()
    assert record.complaints == [
        "vllm chat at a rate: no report: RUN_FOLDER/x is missing, $MODEL_FOLDER too",
        "aiperf: cannot be installed: no such version",
    ]
    assert str(tmp_path) not in kept
    assert json.loads(kept)["passed"] is False
    rows = {row["metric"]: row["ours"] for row in json.loads(kept)["rows"]}
    assert rows == {"vllm chat at a rate: answered": 0, "aiperf: installed": None}


@pytest.mark.parametrize("client", CLIENTS.values(), ids=list(CLIENTS))
def test_a_client_is_pinned_with_all_it_needs(client: Any) -> None:
    text = Path(f"benchmarks/clients/{client.name}.txt").read_text()
    assert client.package in listed(client)
    assert len(listed(client)) == len(text.splitlines())
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(listed(client))
