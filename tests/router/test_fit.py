"""Requests too large for who is left: who was large enough is waited for, as where nobody is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.errors import Draining, InvalidRequest, Unavailable
from baton.failure import to_failure
from tests.fakes import until
from tests.router.acting import virtually
from tests.router.stage import (
    NOBODY,
    NOTHING,
    PlayedDecode,
    PlayedPrefill,
    PlayedWorker,
    Run,
    Stage,
    failure,
    staged,
    to_decode,
    to_prefill,
)

# Workers that a test plays are silent, and given up after two seconds.
GRACE_S = 1.0
SMALL, LARGE = 4, 64
# A prompt of more than 4 blocks of 16.
NUM_TOKENS = 70


def now() -> float:
    return asyncio.get_running_loop().time()


async def begins_to_drain(stage: Stage, worker: PlayedWorker) -> None:
    worker.send(heartbeat={"num_free_blocks": LARGE, "is_draining": True})
    incarnation = worker.identity.incarnation
    await until(lambda: not any(x.is_ready for x in stage.fleet.links if x.incarnation == incarnation))


async def ends(run: Run, stage: Stage) -> BaseException:
    error = await failure(run)
    assert stage.held() == NOTHING
    return error


def test_what_a_large_worker_hands_over_waits_for_it_and_others_go_on_meanwhile() -> None:
    async def main() -> None:
        async with staged(resume_wait_s=GRACE_S, max_wait_s=0.1, max_attempts=1) as stage:
            prefill = await stage.prefill()
            large = await stage.decode("large", num_blocks=LARGE)
            run = stage.generate(NUM_TOKENS, max_tokens=8)
            attempt_id = await to_decode(prefill, large)
            small = await stage.decode("small", num_blocks=SMALL)
            await begins_to_drain(stage, large)
            failed = to_failure(Draining("it leaves"))
            large.send(failed={"attempt_id": attempt_id, "failure": failed})
            stage.kill("large")
            await asyncio.sleep(GRACE_S / 2)
            # Overdue for long, it would have the queue to itself.
            other = stage.generate(20, max_tokens=1)
            command = await to_prefill(prefill, small)
            prefill.first_token(command, 80, end=True)
            prefill.ended(command.attempt_id, finished=True)
            assert await other.answer() == [80]
            assert not run.task.done()
            again = await stage.decode("large", num_blocks=LARGE)
            command = await to_prefill(prefill, again)
            assert list(command.sequence.token_ids) == [*range(NUM_TOKENS), 70]
            prefill.first_token(command, 71, start=1, end=True)
            prefill.ended(command.attempt_id, finished=True)
            assert await run.answer() == [70, 71]
            assert run.generation._timeline.num_attempts == 1

    virtually(main())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_new_request_waits_for_one_that_has_just_gone_and_no_longer_than_for_any(role: str) -> None:
    async def main() -> None:
        async with staged(resume_wait_s=GRACE_S) as stage:
            await stage.prefill("prefill-0")
            await stage.decode("decode-0")
            small: Any = PlayedDecode("small", 50, 3)
            if role == "prefill":
                small = PlayedPrefill("small", 50, 4096, NOBODY)
                small.num_blocks = 3
            await stage.enter(small, role)
            stage.kill(f"{role}-0")
            await until(lambda: not any(link.name == f"{role}-0" for link in stage.fleet.links))
            began = now()
            error = await ends(stage.generate(NUM_TOKENS, max_tokens=4), stage)
            assert isinstance(error, Unavailable)
            assert f"no connected {role} worker holds" in str(error)
            assert now() - began == pytest.approx(GRACE_S, abs=0.05)
            # All that were large enough went long ago.
            began = now()
            assert isinstance(await ends(stage.generate(NUM_TOKENS, max_tokens=4), stage), InvalidRequest)
            assert now() - began < 0.1

    virtually(main())


def test_what_none_was_ever_large_enough_for_is_refused_at_once() -> None:
    async def main() -> None:
        async with staged(resume_wait_s=GRACE_S) as stage:
            await stage.prefill()
            await stage.decode("large", num_blocks=LARGE)
            await stage.decode("small", num_blocks=SMALL)
            stage.kill("large")
            await until(lambda: len(stage.fleet.decode_links()) == 1)
            began = now()
            error = await ends(stage.generate(NUM_TOKENS, max_tokens=16 * LARGE), stage)
            assert isinstance(error, InvalidRequest)
            assert now() - began < 0.1

    virtually(main())


def test_a_large_worker_that_is_back_and_not_yet_reached_is_waited_for() -> None:
    async def main() -> None:
        async with staged(resume_wait_s=GRACE_S) as stage:
            prefill = await stage.prefill()
            await stage.decode("small", num_blocks=SMALL)
            prefill.silent_about.add("large")
            coming = asyncio.create_task(stage.decode("large", num_blocks=LARGE))
            await until(lambda: len(prefill.introductions) == 2)
            run = stage.generate(NUM_TOKENS, max_tokens=4)
            await asyncio.sleep(GRACE_S / 2)
            assert not run.task.done()
            prefill.pair_status(prefill.introductions[1].incarnation, transport="grpc")
            await until(lambda: stage.held()["asked"] > 0)
            await coming

    virtually(main())


def test_a_request_that_is_cancelled_while_it_waits_for_a_large_worker_leaves_nothing() -> None:
    async def main() -> None:
        async with staged(resume_wait_s=GRACE_S) as stage:
            await stage.prefill()
            await stage.decode("large", num_blocks=LARGE)
            await stage.decode("small", num_blocks=SMALL)
            stage.kill("large")
            await until(lambda: len(stage.fleet.decode_links()) == 1)
            run = stage.generate(NUM_TOKENS, max_tokens=4)
            await asyncio.sleep(GRACE_S / 2)
            run.task.cancel()
            await asyncio.wait([run.task])
            assert stage.held() == NOTHING

    virtually(main())


def test_what_fits_a_small_worker_for_now_only_goes_to_a_large_one() -> None:
    async def main() -> None:
        async with staged() as stage:
            await stage.prefill()
            small = await stage.decode("small", num_blocks=SMALL)
            large = await stage.decode("large", num_blocks=LARGE)
            for _ in range(6):
                stage.generate(20, max_tokens=100)
            await until(lambda: small.commands.qsize() + large.commands.qsize() == 6)
            assert small.commands.empty()

    virtually(main())


async def leaves(prefill: PlayedPrefill, decode: PlayedDecode, num_tokens: int) -> None:
    """Plays an attempt at a prompt of 20 until it has so many tokens, and its decode worker sends it away."""
    attempt_id = await to_decode(prefill, decode)
    decode.tokens(attempt_id, 1, *range(71, 70 + num_tokens - 20))
    decode.send(preempted={"attempt_id": attempt_id})


@pytest.mark.parametrize(("num_tokens", "is_local"), [(32, False), (33, True)])
async def test_what_grew_beyond_every_prefill_worker_is_computed_by_a_decode_worker(
    num_tokens: int, is_local: bool
) -> None:
    async with staged(max_attempts=1) as stage:
        small = PlayedPrefill("prefill-0", 50, 40, NOBODY)
        small.num_blocks = 2
        await stage.enter(small, "prefill")
        decode = await stage.decode()
        run = stage.generate(20, max_tokens=20)
        await leaves(small, decode, num_tokens)
        command = await decode.grant()
        assert (command.compute_locally, len(command.sequence.token_ids)) == (is_local, num_tokens)
        if is_local:
            decode.committed(command.attempt_id)
            decode.tokens(command.attempt_id, num_tokens - 20, 99, end=True)
            assert (await run.answer())[-1] == 99
            assert stage.held() == NOTHING


async def test_it_does_not_wait_for_credit_that_it_does_not_need() -> None:
    # Deadlines are by length, so that the short one is tried first, and in a bucket of its own.
    async with staged(ttft_per_token_ms=1000.0, bucket_edges=(25,)) as stage:
        small = PlayedPrefill("prefill-0", 50, 20, NOBODY)
        small.num_blocks = 2
        await stage.enter(small, "prefill")
        decode = await stage.decode()
        stage.generate(20, max_tokens=20)
        attempt_id = await to_decode(small, decode)
        stage.generate(20)
        await to_prefill(small, decode)
        # No credit is left for this one, which needs less in every respect.
        stage.generate(18, max_tokens=2)
        await until(lambda: len(stage.queue) == 1)
        decode.tokens(attempt_id, 1, *range(71, 83))
        decode.send(preempted={"attempt_id": attempt_id})
        assert (await decode.grant()).compute_locally
        assert len(stage.queue) == 1


async def test_it_waits_for_a_prefill_worker_where_there_is_none() -> None:
    async with staged(resume_wait_s=60.0) as stage:
        small = PlayedPrefill("prefill-0", 50, 40, NOBODY)
        small.num_blocks = 2
        await stage.enter(small, "prefill")
        decode = await stage.decode()
        stage.generate(20, max_tokens=20)
        attempt_id = await to_decode(small, decode)
        stage.kill("prefill-0")
        await until(lambda: not stage.fleet.prefill_links())
        decode.tokens(attempt_id, 1, *range(71, 90))
        decode.send(preempted={"attempt_id": attempt_id})
        await until(lambda: len(stage.queue) == 1)
        large = await stage.prefill("prefill-1")
        assert len((await to_prefill(large, decode)).sequence.token_ids) == 40
