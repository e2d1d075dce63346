"""Answers that cross scale steps between a prefill and a decode worker: every token is a fresh computation's.

The shells of all three roles in one process: over the tattle-tale, whose next token hangs on the step of
every KV value, and over a real model with dynamic NTK, against transformers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.limits import Limits
from baton.models import ModelDir
from tests.cluster import Cluster, cluster
from tests.engine.test_loop_rope import MODELS, STEPS, token_by_token
from tests.engine.tiny_models import save_reference
from tests.fakes import until
from tests.integration.test_families import running
from tests.router.stage import Run

LIMITS = Limits(max_model_len=10_000, vocab_size=10_000, rope_steps=(16, 32, 64, 10_000))


@asynccontextmanager
async def scaled(**settings: object) -> AsyncIterator[Cluster]:
    async with cluster(num_prefill=0, num_decode=0, **settings) as c:
        await c.prefill(limits=LIMITS)
        await c.decode(limits=LIMITS, block_size=6)
        yield c


def outcomes(run: Run) -> list[str]:
    return [attempt.outcome for attempt in run.generation._timeline.explain.attempts]


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
async def test_answers_cross_any_number_of_steps(placement: str) -> None:
    async with scaled(placement=placement) as c:
        runs = [c.stage.generate(n, max_tokens=30, limits=LIMITS) for n in (1, 15, 16, 17, 31, 32, 40)]
        for run, num_outgrown in zip(runs, (1, 2, 2, 1, 1, 1, 1), strict=True):
            assert await run.answer() == c.expected(run)
            assert outcomes(run) == ["OUTGROWN"] * num_outgrown + ["OK"]
        await c.idle()


async def test_short_prompts_after_long_ones_find_no_kv_of_their_step() -> None:
    async with scaled() as c:
        for length in (60, 12, 30, 14, 60):
            run = c.stage.generate(length, max_tokens=8, limits=LIMITS)
            assert await run.answer() == c.expected(run)
        await c.idle()


async def test_a_sibling_of_a_prompt_as_long_as_a_step_shares_its_blocks() -> None:
    async with scaled() as c:
        first = c.stage.generate(32, max_tokens=6, limits=LIMITS)
        link = await first.generation.committed
        assert link is not None
        other = c.stage.generate(32, max_tokens=6, limits=LIMITS, beside=link, sample_index=1)
        assert await first.answer() == await other.answer() == c.expected(first)
        assert outcomes(other) == ["OUTGROWN", "OK"]
        # Its first attempt computed less than a block: of 32 tokens 30 are in full blocks of 6.
        attempt = other.generation._timeline.explain.attempts[0]
        assert attempt.prefill.num_cached_tokens == 30
        await c.idle()


async def test_cancelled_in_any_moment_nothing_is_left() -> None:
    async with scaled() as c:
        for moment in range(0, 120, 3):
            run = c.stage.generate(15, max_tokens=20, limits=LIMITS)
            await until(lambda run=run: bool(run.received()))
            for _ in range(moment):
                await asyncio.sleep(0)
            run.task.cancel()
            assert run.received() == c.expected(run)[: len(run.received())]
        await c.idle()


@pytest.mark.parametrize("name", MODELS)
async def test_tokens_are_those_of_transformers_step_by_step(name: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, **MODELS[name])
    limits = ModelDir.open(tmp_path).limits
    assert limits.rope_steps == STEPS[name]
    async with (
        running(tmp_path, block_size=4, layout="HND") as prefill,
        running(tmp_path, block_size=6, layout="NHD") as decode,
        cluster(num_prefill=0, num_decode=0) as c,
    ):
        await c.prefill(engine=prefill, limits=limits)
        await c.decode(engine=decode, limits=limits)
        runs = [c.stage.generate(length, max_tokens=12, limits=limits) for length in (20, 36, 40, 76)]
        answers = [await run.answer() for run in runs]
        await c.idle()
    for length, answer in zip((20, 36, 40, 76), answers, strict=True):
        prompt = list(range(length))
        assert prompt + answer == token_by_token(reference, name, prompt, 12)
