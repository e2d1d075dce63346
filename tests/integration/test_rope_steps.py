"""Answers that cross scale steps between a prefill and a decode worker: every token is a fresh computation's.

The shells of all three roles in one process: over the tattle-tale, whose next token hangs on the step of
every KV value, and over a real model with dynamic NTK, against transformers.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.errors import DeadlineExceeded, InvalidRequest
from baton.limits import Limits
from baton.models import ModelDir
from baton.sampling import Grammar
from prefill_worker.worker import PrefillWorker
from tests.cluster import Cluster, cluster
from tests.engine.test_loop_rope import MODELS, STEPS, token_by_token
from tests.engine.tiny_models import reference_logits, save_reference
from tests.fakes import until
from tests.integration.test_families import running
from tests.router.stage import Run, failure
from tests.router.tiny_text import EOS, byte_tokenizer, ids_of

LIMITS = Limits(max_model_len=10_000, vocab_size=10_000, rope_steps=(16, 32, 64, 10_000))


@asynccontextmanager
async def scaled(**settings: object) -> AsyncIterator[Cluster]:
    async with cluster(num_prefill=0, num_decode=0, **settings) as c:
        await c.prefill(limits=LIMITS)
        await c.decode(limits=LIMITS, block_size=6)
        yield c


def expected(c: Cluster, run: Run) -> list[int]:
    return c.expected(run, rope_steps=LIMITS.rope_steps)


def outcomes(run: Run) -> list[str]:
    return [attempt.outcome for attempt in run.generation._timeline.explain.attempts]


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
async def test_answers_cross_any_number_of_steps(placement: str) -> None:
    async with scaled(placement=placement) as c:
        runs = [c.stage.generate(n, max_tokens=30, limits=LIMITS) for n in (1, 15, 16, 17, 31, 32, 40)]
        for run, num_outgrown in zip(runs, (1, 2, 2, 1, 1, 1, 1), strict=True):
            assert await run.answer() == expected(c, run)
            assert outcomes(run) == ["OUTGROWN"] * num_outgrown + ["OK"]
        await c.idle()


async def test_short_prompts_after_long_ones_find_no_kv_of_their_step() -> None:
    async with scaled() as c:
        for length in (60, 12, 30, 14, 60):
            run = c.stage.generate(length, max_tokens=8, limits=LIMITS)
            assert await run.answer() == expected(c, run)
        await c.idle()


async def test_a_sibling_of_a_prompt_as_long_as_a_step_shares_its_blocks() -> None:
    async with scaled() as c:
        first = c.stage.generate(32, max_tokens=6, limits=LIMITS)
        link = await first.generation.committed
        assert link is not None
        other = c.stage.generate(32, max_tokens=6, limits=LIMITS, beside=link, sample_index=1)
        assert await first.answer() == await other.answer() == expected(c, first)
        assert outcomes(other) == ["OUTGROWN", "OK"]
        # Its first attempt computed less than a block: of 32 tokens 30 are in full blocks of 6.
        attempt = other.generation._timeline.explain.attempts[0]
        assert attempt.prefill.num_cached_tokens == 30
        await c.idle()


def how_far(run: Run) -> tuple[int, str]:
    """Number of the attempt under way, and what it has come to last."""
    attempt = run.generation._timeline.explain.attempts[-1]
    stages = ("committed", "first_token", "reserved", "placed")
    reached = next((stage for stage in stages if attempt.HasField(f"{stage}_at_ms")), "queued")
    return attempt.number, "ended" if run.task.done() else reached


async def test_cancelled_in_any_moment_nothing_is_left() -> None:
    met: Counter[tuple[int, str]] = Counter()
    async with scaled() as c:
        for moment in range(60):
            # As long as a step: it is committed and has outgrown it at once.
            run = c.stage.generate(16, max_tokens=20, limits=LIMITS)
            await until(lambda run=run: bool(run.received()))
            for _ in range(moment):
                await asyncio.sleep(0)
            met[how_far(run)] += 1
            run.task.cancel()
            assert run.received() == expected(c, run)[: len(run.received())]
        await c.idle()
    assert met.keys() >= {(2, "reserved"), (2, "first_token"), (2, "committed"), (3, "reserved")}
    assert sum(count for (_, stage), count in met.items() if stage == "ended") < 10


async def test_an_answer_that_no_prefill_worker_can_hold_any_more_is_served_by_the_decode_worker() -> None:
    async with cluster(num_prefill=0, num_decode=0, placement="disaggregated") as c:
        # Room for 24 tokens: prompts fit, and what is computed anew behind the borders at 32 and 64 does not.
        await c.prefill(limits=LIMITS, num_blocks=6, block_size=4)
        await c.decode(limits=LIMITS, num_blocks=40, block_size=6)
        for length, num_local in ((10, 2), (20, 2)):
            run = c.stage.generate(length, max_tokens=60, limits=LIMITS)
            assert await run.answer() == expected(c, run)
            places = [attempt.candidates[0] for attempt in run.generation._timeline.explain.attempts]
            is_local = [place.prefill_worker == place.decode_worker for place in places]
            assert is_local == [False] * (len(places) - num_local) + [True] * num_local
            assert [attempt.num_candidates for attempt in run.generation._timeline.explain.attempts] == (
                [1] * (len(places) - num_local) + [2] * num_local
            )
        assert isinstance(await failure(c.stage.generate(25, limits=LIMITS)), InvalidRequest)
        await c.idle()


async def test_the_last_decode_worker_ends_what_it_has_before_it_leaves_whatever_its_scale() -> None:
    async with cluster(num_prefill=0, num_decode=0) as c:
        await c.prefill(limits=LIMITS)
        decode = await c.decode(limits=LIMITS, block_size=6)
        runner: Any = decode._engine.runner
        runner.may_run.clear()
        runs = [c.stage.generate(length, max_tokens=30, limits=LIMITS) for length in (12, 16)]
        # The prompt that is as long as a step has outgrown it at once; between two attempts it is with its
        # router, and the worker has nothing of it to end.
        at_worker = {(2, stage) for stage in ("reserved", "first_token", "committed")}
        await until(lambda: all(run.received() for run in runs) and how_far(runs[1]) in at_worker)
        await until(lambda: runner.num_waiting == 1)
        draining = asyncio.create_task(decode.drain(30.0))
        await until(lambda: not c.stage.fleet.decode_links())
        runner.may_run.set()
        for run in runs:
            assert await run.answer() == expected(c, run)
        assert [outcomes(run) for run in runs] == [["OK"], ["OUTGROWN", "OK"]]
        c.stage.kill("decode-0")
        await draining


async def test_a_deadline_passes_while_an_answer_is_computed_anew() -> None:
    async with scaled() as c:
        prefill = c.workers["prefill-0"]
        assert isinstance(prefill, PrefillWorker)
        runner: Any = prefill._engine.runner
        run = c.stage.generate(15, max_tokens=20, limits=LIMITS, timeout_s=0.4)
        await until(lambda: bool(run.received()))
        runner.may_run.clear()
        error = await failure(run)
        assert isinstance(error, DeadlineExceeded)
        # Two tokens at 15 and 16, and none after the border.
        assert "after 2 of at most 20 tokens" in error.message
        assert run.received() == expected(c, run)[:2]
        assert outcomes(run) == ["OUTGROWN", "CANCELLED"]
        runner.may_run.set()
        await c.idle()


@pytest.mark.parametrize(
    # Tokens of the answer that the client has, and how often the rest outgrows a step: at 16, 32 and 64.
    ("num_known", "num_outgrown"),
    [(3, 2), (4, 2), (5, 1), (20, 1), (21, 0)],
)
async def test_an_answer_goes_on_at_another_router_on_either_side_of_a_border(
    num_known: int, num_outgrown: int
) -> None:
    async with scaled() as c:
        whole = c.stage.generate(12, max_tokens=30, limits=LIMITS)
        answer = await whole.answer()
        rest = c.stage.generate(12, max_tokens=30, limits=LIMITS, outputs=answer[:num_known])
        assert await rest.answer() == expected(c, whole)[num_known:]
        assert outcomes(rest) == ["OUTGROWN"] * num_outgrown + ["OK"]
        await c.idle()


async def test_times_and_cached_tokens_are_those_of_the_attempt_that_gave_the_first_token() -> None:
    async with scaled() as c:
        await c.stage.generate(20, max_tokens=4, limits=LIMITS).answer()
        run = c.stage.generate(20, max_tokens=40, limits=LIMITS)
        assert await run.answer() == expected(c, run)
        timeline = run.generation._timeline
        first, *others = timeline.explain.attempts
        # Of the 20 tokens 16 are in the first four blocks, and what comes behind the border in none.
        assert [attempt.prefill.num_cached_tokens for attempt in (first, *others)] == [16, 0]
        timings = timeline.timings()
        assert timings.num_outgrown == 1
        assert timeline.num_cached_tokens == 16
        assert timings.prefill_ms == first.prefill.total_ms <= timings.ttft_ms
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


async def test_a_grammar_goes_on_where_an_answer_outgrew_its_step(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, **MODELS["dynamic"], vocab_size=300)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": EOS}))
    limits, allowed = ModelDir.open(tmp_path).limits, ids_of("abc")
    async with (
        running(tmp_path, block_size=4, layout="HND") as prefill,
        running(tmp_path, block_size=6, layout="NHD") as decode,
        cluster(num_prefill=0, num_decode=0) as c,
    ):
        await c.prefill(engine=prefill, limits=limits)
        await c.decode(engine=decode, limits=limits)
        run = c.stage.generate(
            34, max_tokens=40, limits=limits, grammar=Grammar(kind="regex", source="[abc]{12}")
        )
        answer = await run.answer()
        assert outcomes(run) == ["OUTGROWN", "OK"]
        await c.idle()
    assert answer[:12] == token_by_token(reference, "dynamic", list(range(34)), 12, allowed)[34:]
    assert len(answer) in (12, 13)


async def test_scores_of_a_prompt_as_long_as_a_step_are_those_of_its_scale(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, **MODELS["dynamic"])
    limits = ModelDir.open(tmp_path).limits
    async with (
        running(tmp_path, block_size=4, layout="HND") as prefill,
        running(tmp_path, block_size=6, layout="NHD") as decode,
        cluster(num_prefill=0, num_decode=0) as c,
    ):
        await c.prefill(engine=prefill, limits=limits)
        await c.decode(engine=decode, limits=limits)
        run = c.stage.generate(80, max_tokens=6, limits=limits, prompt_logprobs=0)
        assert len(await run.answer()) == 6
        assert outcomes(run) == ["OUTGROWN", "OK"]
        # The second attempt was not asked for them again: it could use what is cached.
        assert run.generation._keys() is not None
        await c.idle()
    # At the length of a step transformers has its scale.
    theirs = reference_logits(reference, list(range(80))).log_softmax(-1)
    scores = [theirs[position - 1, position].item() for position in range(1, 80)]
    assert run.stream._prompt.logprobs == pytest.approx(scores, abs=1e-4)
