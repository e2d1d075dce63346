"""Shows answers: one as it arrives, several as they end, then how it went. Knows nothing of how they
were asked for."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence

from baton.answer import Answer, PromptToken, Summary, Timings
from baton.errors import BatonError
from baton.generation import Generation


async def print_answers(generation: Generation, n: int) -> None:
    """Writes one answer as it comes, or each of several under its number as it ends.

    What there is of an answer that fails or is interrupted is written too.
    """
    if n == 1:
        await _print_live(generation)
        return
    open_texts = dict.fromkeys(range(n), "")
    try:
        async with generation:
            async for chunk in generation:
                open_texts[chunk.index] += chunk.text
                if chunk.finish_reason:
                    _print_numbered(chunk.index, open_texts.pop(chunk.index))
    finally:
        for index, text in open_texts.items():
            if text:
                _print_numbered(index, text)


def _print_numbered(index: int, text: str) -> None:
    sys.stdout.write(f"[{index}] {text}\n")
    sys.stdout.flush()


async def _print_live(generation: Generation) -> None:
    parts: list[str] = []
    try:
        async with generation:
            async for chunk in generation:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                parts.append(chunk.text)
    except (BatonError, asyncio.CancelledError):
        end_broken_line(parts)
        raise
    sys.stdout.write("\n")


def end_broken_line(parts: list[str]) -> None:
    """Ends the line of an answer that broke off half-way, so that the error gets a line of its own."""
    if parts:
        sys.stdout.write("\n")
        sys.stdout.flush()


async def print_json(generation: Generation) -> None:
    """Writes {"answers", "prompt_logprobs", "summary"} once the answers are complete."""
    answers = await generation.answers()
    sys.stdout.write(as_json(answers, generation.prompt_logprobs, generation.summary) + "\n")


def as_json(answers: Sequence[Answer], prompt: Sequence[PromptToken | None], summary: Summary) -> str:
    """Everything there is of a generation, as one JSON object."""
    shown = {
        "answers": [dataclasses.asdict(answer) for answer in answers],
        "prompt_logprobs": [token and dataclasses.asdict(token) for token in prompt],
        "summary": dataclasses.asdict(summary),
    }
    return json.dumps(shown, ensure_ascii=False)


def describe(summary: Summary) -> str:
    """Three lines for people: how the generation ended, where the time went, and how to see more of that."""
    reasons = ", ".join(choice.finish_reason for choice in summary.choices)
    return (
        f"{summary.num_prompt_tokens} prompt tokens ({summary.num_cached_tokens} cached), "
        f"{summary.num_output_tokens} generated, {reasons}, seed {summary.seed}\n"
        f"{_where_time_went(summary.timings)}\n"
        f"more: baton explain {shlex.quote(summary.request_id)}"
    )


def _where_time_went(timings: Timings) -> str:
    return (
        f"bucket {timings.bucket}: queue {timings.queue_ms:.1f} ms, reserve {timings.reserve_ms:.1f} ms, "
        f"prefill {timings.prefill_ms:.1f} ms ({timings.prefill_worker}), "
        f"transfer {timings.transfer_ms:.1f} ms ({timings.transfer_bytes / 1e6:.2f} MB), "
        f"TTFT {timings.ttft_ms:.1f} ms, ITL {timings.itl_ms:.1f} ms "
        f"({timings.decode_worker or 'not needed'}), total {timings.total_ms:.1f} ms"
    )
