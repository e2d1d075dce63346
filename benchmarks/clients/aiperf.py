"""aiperf: its commands and its reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.clients.runs import Answer, Client, Report, Run, Target

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 16
LONG_OUTPUT_TOKENS = 160
NUM_REQUESTS = 20
FOLDER = "aiperf"
KEPT = (
    "request_count",
    "error_request_count",
    "time_to_first_token",
    "inter_token_latency",
    "request_latency",
    "output_token_throughput",
    "usage_prompt_tokens",
    "usage_completion_tokens",
    "osl_mismatch_count",
)
STATISTICS = ("unit", "avg", "min", "p50", "p90", "p99", "max")
CANCELLED = "RequestCancellationError"


def runs(target: Target) -> list[Run]:
    """Chats by two at a time, completions at a rate, and chats of which four in ten are given up."""
    return [
        _run(target, "chat", "chat", ("--concurrency", "2")),
        _run(target, "completions at a rate", "completions", ("--request-rate", "2")),
        _run(
            target,
            "chat with cancellation",
            "chat",
            (
                *("--concurrency", "4"),
                *("--request-cancellation-rate", "40", "--request-cancellation-delay", "0.5"),
            ),
            output_tokens=LONG_OUTPUT_TOKENS,
        ),
    ]


def _run(
    target: Target, name: str, endpoint: str, load: tuple[str, ...], output_tokens: int = OUTPUT_TOKENS
) -> Run:
    command = (
        *("aiperf", "profile", "--model", target.model, "--url", target.url),
        *("--endpoint-type", endpoint, "--streaming", "--tokenizer", target.tokenizer),
        *load,
        *("--request-count", str(NUM_REQUESTS), "--random-seed", "1"),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(output_tokens), "--output-tokens-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{output_tokens}"),
        *("--use-server-token-count", "--no-gpu-telemetry", "--ui", "none"),
        *("--output-artifact-dir", FOLDER),
    )
    return Run(
        name=name,
        command=command,
        num_requests=NUM_REQUESTS,
        output_tokens=output_tokens,
        cancels="--request-cancellation-rate" in load,
        read=read,
    )


def read(folder: Path) -> Report:
    """One record for each request, and a summary."""
    lines = (folder / FOLDER / "profile_export.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    summary = json.loads((folder / FOLDER / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    cancelled = [record for record in records if (record.get("error") or {}).get("type") == CANCELLED]
    errors = [record["error"] for record in records if record.get("error") and record not in cancelled]
    return Report(
        answers=[_answer(record["metrics"]) for record in records if not record.get("error")],
        num_cancelled=len(cancelled),
        errors=[json.dumps(error) for error in errors],
        kept={name: _short(summary[name]) for name in KEPT if name in summary},
    )


def _answer(metrics: dict[str, Any]) -> Answer:
    # A figure that is not there is one that the client could not tell: no answer that it counts.
    value = {name: metric["value"] for name, metric in metrics.items()}
    return Answer(
        num_prompt_tokens=value.get("usage_prompt_tokens", 0),
        num_output_tokens=value.get("usage_completion_tokens", 0),
        ttft_ms=value.get("time_to_first_token", 0.0),
        itl_ms=value.get("inter_token_latency", 0.0),
    )


def _short(metric: dict[str, Any]) -> dict[str, Any]:
    return {name: metric[name] for name in STATISTICS if name in metric}


# In offline mode it takes names of a hub's cache only, no folders; it asks no hub about a folder.
AIPERF = Client(name="aiperf", package="aiperf", variables={}, runs=runs)
