"""Shows one answer: its text as it arrives, then how it went. Knows nothing of how it was asked for."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import AsyncIterable

from baton.answer import Chunk, Summary, Timings
from baton.errors import BatonError
from baton.generation import Generation


async def print_answer(generation: Generation) -> str:
    """Writes the text to standard output as it comes, ends the line, and returns the text."""
    parts = []
    try:
        async with generation:
            async for chunk in generation:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                parts.append(chunk.text)
    except BatonError:
        end_broken_line(parts)
        raise
    sys.stdout.write("\n")
    return "".join(parts)


def end_broken_line(parts: list[str]) -> None:
    """Ends the line of an answer that failed half-way, so that the error gets a line of its own."""
    if parts:
        sys.stdout.write("\n")
        sys.stdout.flush()


async def print_json(generation: Generation) -> None:
    """Writes {"text", "token_ids", "summary"} once the answer is complete."""
    text, token_ids = await _collect(generation)
    answer = {"text": text, "token_ids": token_ids, "summary": dataclasses.asdict(generation.summary)}
    sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")


def describe(summary: Summary) -> str:
    """Two lines for people: how the generation ended, and where the time went."""
    timings = summary.timings
    return (
        f"{summary.num_prompt_tokens} prompt tokens, {summary.num_output_tokens} generated, "
        f"{summary.finish_reason}, seed {summary.seed}\n{_where_time_went(timings)}"
    )


def _where_time_went(timings: Timings) -> str:
    return (
        f"bucket {timings.bucket}: queue {timings.queue_ms:.1f} ms, reserve {timings.reserve_ms:.1f} ms, "
        f"prefill {timings.prefill_ms:.1f} ms ({timings.prefill_worker}), "
        f"transfer {timings.transfer_ms:.1f} ms ({timings.transfer_bytes / 1e6:.2f} MB), "
        f"TTFT {timings.ttft_ms:.1f} ms, ITL {timings.itl_ms:.1f} ms "
        f"({timings.decode_worker or 'not needed'}), total {timings.total_ms:.1f} ms"
    )


async def _collect(chunks: AsyncIterable[Chunk]) -> tuple[str, list[int]]:
    text: list[str] = []
    token_ids: list[int] = []
    async for chunk in chunks:
        text.append(chunk.text)
        token_ids.extend(chunk.token_ids)
    return "".join(text), token_ids
