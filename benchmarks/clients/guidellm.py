"""guidellm: its commands and its reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.clients.runs import Answer, Client, Report, Run, Target

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 16
LONG_OUTPUT_TOKENS = 32
NUM_REQUESTS = 20
SECONDS = 8
REPORT = "guidellm.json"
KEPT = (
    "request_totals",
    "prompt_token_count",
    "output_token_count",
    "time_to_first_token_ms",
    "inter_token_latency_ms",
    "output_tokens_per_second",
)
STATISTICS = ("mean", "median", "min", "max", "count")


def runs(target: Target) -> list[Run]:
    """Chats by two at a time, completions at a rate, and chats that are given up when time is up."""
    count = f"kind=max_requests,count={NUM_REQUESTS}"
    return [
        _run(target, "chat", "kind=concurrent,streams=2", count),
        _run(target, "completions at a rate", "kind=constant,rate=2", count, endpoint="/v1/completions"),
        _run(
            target,
            "chat with cancellation",
            "kind=concurrent,streams=4",
            f"kind=max_duration,seconds={SECONDS}",
            output_tokens=LONG_OUTPUT_TOKENS,
        ),
    ]


def _run(
    target: Target,
    name: str,
    profile: str,
    constraint: str,
    *,
    endpoint: str = "/v1/chat/completions",
    output_tokens: int = OUTPUT_TOKENS,
) -> Run:
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={output_tokens}"
    command = (
        *("guidellm", "run"),
        *("--backend", f"kind=openai_http,target={target.url},request_format={endpoint}"),
        *("--profile", profile, "--constraint", constraint),
        *("--tokenizer", f"kind=hf_auto,model={target.tokenizer}", "--data", data),
        *("--output", f"kind=json,path={REPORT}", "--disable-console-interactive"),
    )
    cancels = "max_duration" in constraint
    return Run(
        name=name,
        command=command,
        num_requests=None if cancels else NUM_REQUESTS,
        output_tokens=output_tokens,
        cancels=cancels,
        read=read,
    )


def read(folder: Path) -> Report:
    """The only benchmark of the report: its requests by how they ended, and its metrics."""
    (benchmark,) = json.loads((folder / REPORT).read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    return Report(
        answers=[_answer(request) for request in requests["successful"]],
        num_cancelled=len(requests["incomplete"]),
        errors=[str(request["info"]["error"]) for request in requests["errored"]],
        kept={name: _short(benchmark["metrics"][name]) for name in KEPT if name in benchmark["metrics"]},
    )


def _answer(request: dict[str, Any]) -> Answer:
    # Null is what the client could not tell.
    return Answer(
        num_prompt_tokens=request["prompt_tokens"] or 0,
        num_output_tokens=request["output_tokens"] or 0,
        ttft_ms=request["time_to_first_token_ms"] or 0.0,
        itl_ms=request["inter_token_latency_ms"] or 0.0,
    )


def _short(metric: dict[str, Any]) -> dict[str, Any]:
    completed = metric.get("successful")
    if not isinstance(completed, dict):
        return metric
    return {name: completed[name] for name in STATISTICS if name in completed}


GUIDELLM = Client(name="guidellm", package="guidellm", variables={"HF_HUB_OFFLINE": "1"}, runs=runs)
