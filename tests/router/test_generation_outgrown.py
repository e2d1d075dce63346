"""Answers that become too long for the scale step they were computed at: at the router."""

from __future__ import annotations

from typing import Any

from baton.limits import Limits
from baton.prefix_keys import PrefixKeys
from baton.v1 import common_pb2, decode_service_pb2
from router.generation import Generation
from tests.fakes import until
from tests.router.stage import (
    NOTHING,
    PlayedDecode,
    PlayedPrefill,
    Run,
    Stage,
    staged,
    to_decode,
    to_prefill,
    workers,
)

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
        assert timeline.num_outgrown == timeline.timings().num_outgrown == 1
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


async def overtaken(stage: Stage) -> tuple[PlayedPrefill, PlayedDecode, Run, bytes]:
    """A prompt as long as a step: its decode worker has sent it away before its prefill worker's word."""
    prefill, decode = await workers(stage)
    run = generate(stage, num_prompt_tokens=22, max_tokens=4, prompt_logprobs=0)
    command = await to_prefill(prefill, decode)
    decode.committed(command.attempt_id)
    decode.tokens(command.attempt_id, 0, 70)
    outgrows(decode, command.attempt_id)
    await until(lambda: run.received() == [70])
    # The decode worker's link knows that it has left, and the prefill worker's does not.
    await until(lambda: stage.held()["attempts"] == 1)
    return prefill, decode, run, command.attempt_id


async def test_what_the_prefill_worker_has_still_to_say_of_it_is_heard() -> None:
    async with staged() as stage:
        prefill, decode, run, attempt_id = await overtaken(stage)
        scores = common_pb2.PromptLogprobs(attempt_id=attempt_id, start_index=1, logprobs=[-0.5] * 21)
        prefill.send(prompt_logprobs=scores)
        prefill.ended(attempt_id, committed=True, prefill={"num_computed_tokens": 22, "total_ms": 7.0})
        resumed = await to_prefill(prefill, decode)
        assert resumed.sequence.rope_step == 1
        # They are of the first step, all of them.
        assert not resumed.sequence.sampling.HasField("prompt_logprobs")
        assert run.stream._prompt.logprobs == [-0.5] * 21
        (first, _) = run.generation._timeline.explain.attempts
        assert (first.outcome, first.prefill.num_computed_tokens) == ("OUTGROWN", 22)


async def test_a_prefill_worker_that_says_nothing_is_not_waited_for() -> None:
    async with staged(reserve_timeout_s=0.05) as stage:
        prefill, decode, _, attempt_id = await overtaken(stage)
        assert (await prefill.command("cancel")).attempt_id == attempt_id
        resumed = await to_prefill(prefill, decode)
        assert resumed.sequence.rope_step == 1
        assert resumed.sequence.sampling.HasField("prompt_logprobs")


async def test_a_prefill_worker_that_dies_is_not_waited_for() -> None:
    async with staged(reserve_timeout_s=60.0) as stage:
        prefill, decode, run, _ = await overtaken(stage)
        other = await stage.prefill("prefill-1")
        stage.kill("prefill-0")
        resumed = await to_prefill(other, decode)
        assert resumed.sequence.rope_step == 1
        # Nothing is known to have failed: its KV was there.
        assert run.generation._timeline.num_attempts == 1
        assert prefill.commands.empty()


async def test_a_place_is_looked_for_up_to_the_border_and_the_whole_answer_is_told() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        for num_tokens, expected in ((20, 23), (22, 23), (23, 45), (40, 45)):
            run = generate(stage, num_prompt_tokens=num_tokens, max_tokens=100)
            wanted = run.generation._wanted(bytes(16))
            assert (wanted.expected_tokens, wanted.kv_tokens) == (expected, num_tokens + 99)
            await to_prefill(prefill, decode)
            assert run.generation._timeline.explain.expected_output_tokens == 100
        run = generate(stage, num_prompt_tokens=20, max_tokens=2)
        assert run.generation._wanted(bytes(16)).expected_tokens == 21
