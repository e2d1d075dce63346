"""Answers that become too long for the scale step they were computed at: at the router."""

from __future__ import annotations

from typing import Any

from baton.limits import Limits
from baton.prefix_keys import PrefixKeys
from baton.v1 import decode_service_pb2
from router.generation import Generation
from tests.fakes import until
from tests.router.stage import NOTHING, PlayedDecode, Run, Stage, staged, to_decode, to_prefill, workers

LIMITS = Limits(max_model_len=10_000, vocab_size=10_000, rope_steps=(22, 44, 10_000))


def outgrows(decode: PlayedDecode, attempt_id: bytes) -> None:
    decode.send(preempted=decode_service_pb2.Preempted(attempt_id=attempt_id, outgrown=True))


def generate(stage: Stage, **options: Any) -> Run:
    return stage.generate(limits=LIMITS, **options)


async def test_it_goes_on_at_the_next_step_with_its_tokens_and_blames_nobody() -> None:
    async with staged(max_attempts=1) as stage:
        prefill, decode = await workers(stage)
        run = generate(stage, num_prompt_tokens=20, max_tokens=4)
        attempt_id = await to_decode(prefill, decode)
        decode.tokens(attempt_id, 1, 71)
        decode.tokens(attempt_id, 2, 72)
        outgrows(decode, attempt_id)
        resumed = await to_prefill(prefill, decode)
        assert list(resumed.sequence.token_ids) == [*range(20), 70, 71, 72]
        assert resumed.sequence.rope_step == 1
        assert resumed.attempt_id != attempt_id
        prefill.first_token(resumed, 73, start=3, end=True)
        prefill.ended(resumed.attempt_id, finished=True)
        assert await run.answer() == [70, 71, 72, 73]
        timeline = run.generation._timeline
        assert (timeline.num_attempts, timeline.num_preemptions, timeline.num_handovers) == (1, 0, 0)
        outcomes = [(attempt.outcome, attempt.reason) for attempt in timeline.explain.attempts]
        assert outcomes == [
            ("OUTGROWN", "its length needs the next scale of the model's positions"),
            ("OK", ""),
        ]
        assert all(link.breaker._num_failures == 0 for link in stage.fleet.links)
        assert not run.generation._suspicion.wants_alone
        assert stage.held() == NOTHING


async def test_workers_are_told_the_step_of_all_tokens() -> None:
    for num_tokens, step in ((21, 0), (22, 0), (23, 1), (44, 1), (45, 2)):
        async with staged() as stage:
            prefill, decode = await workers(stage)
            generate(stage, num_prompt_tokens=num_tokens)
            command = await to_prefill(prefill, decode)
            assert command.sequence.rope_step == step


async def test_it_keeps_its_place_in_line() -> None:
    async with staged() as stage:
        prefill, decode = await stage.prefill(budget=40), await stage.decode()
        generate(stage, num_prompt_tokens=22, max_tokens=4)
        attempt_id = await to_decode(prefill, decode)
        # No credit is left for anybody who comes now.
        generate(stage, num_prompt_tokens=40)
        computed = await to_prefill(prefill, decode)
        generate(stage, num_prompt_tokens=22)
        outgrows(decode, attempt_id)
        await until(lambda: len(stage.queue) == 2)
        prefill.first_token(computed, 90)
        # Both fit now; the one that outgrew its step has been here longer.
        assert len((await decode.grant()).sequence.token_ids) == 23


def keys_of(generation: Generation) -> list[bytes]:
    keys = generation._wanted(bytes(16)).keys
    assert keys is not None
    return keys.all(2)


async def test_cached_blocks_are_looked_for_at_the_step_of_its_length() -> None:
    async with staged() as stage:
        plain = PrefixKeys(b"", block_size=2)
        short, long = generate(stage, num_prompt_tokens=22), generate(stage, num_prompt_tokens=30)
        assert keys_of(short.generation) == plain.keys(list(range(22)))
        assert not set(keys_of(long.generation)) & set(plain.keys(list(range(30))))
        before = keys_of(short.generation)
        short.generation.token_ids.append(22)
        assert keys_of(short.generation) == keys_of(long.generation)[:11]
        assert not set(keys_of(short.generation)) & set(before)
