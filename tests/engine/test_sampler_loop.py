"""Requests with every parameter, through scheduler, model and sampler together, against the oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from baton.errors import InvalidRequest
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.request import FinishReason, Request
from engine.scheduler import ChunkComputed, Event, TokenSampled
from tests.engine.tiny_models import Reference, load_runner, make_request
from tests.sampling_oracle import OracleAnswer, oracle_prompt_logprobs, oracle_tokens

VOCAB = 101
EOS = 7


class Recorder:
    """Keeps what a worker would send of each request."""

    def __init__(self) -> None:
        self.tokens: dict[bytes, list[TokenSampled]] = {}
        self.prompt: dict[bytes, dict[int, tuple[float, list[int]]]] = {}

    def __call__(self, event: Event) -> None:
        key = event.request.attempt_id
        if isinstance(event, TokenSampled):
            self.tokens.setdefault(key, []).append(event)
        if isinstance(event, ChunkComputed | TokenSampled) and event.prompt_logprobs is not None:
            scored = event.prompt_logprobs
            entries = self.prompt.setdefault(key, {})
            for offset, logprob in enumerate(scored.logprobs.tolist()):
                index = scored.start_index + offset
                assert index not in entries, "an entry came twice"
                entries[index] = (logprob, scored.top.token_ids[offset].tolist())


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, default: Any, chance: float = 0.4) -> Any:
        return value if rng.random() < chance else default

    f32 = np.float32
    return SamplingParams(
        temperature=maybe(float(f32(rng.uniform(0.1, 2))), 0.0, 0.75),
        top_k=maybe(rng.randint(1, 60), 0),
        top_p=maybe(float(f32(rng.uniform(0.2, 0.99))), 1.0),
        min_p=maybe(float(f32(rng.uniform(0.001, 0.3))), 0.0),
        repetition_penalty=maybe(float(f32(rng.uniform(0.5, 2))), 1.0),
        presence_penalty=maybe(float(f32(rng.uniform(-2, 2))), 0.0),
        frequency_penalty=maybe(float(f32(rng.uniform(-2, 2))), 0.0),
        logit_bias=maybe(tuple((token_id, rng.uniform(-5, 5)) for token_id in range(3, 90, 17)), ()),
        allowed_token_ids=maybe(tuple(rng.sample(range(VOCAB), 40)), (), 0.25),
        seed=rng.getrandbits(64),
        max_tokens=rng.randint(1, 14),
        min_tokens=maybe(1, 0),
        stop_token_ids=maybe(tuple(rng.sample(range(VOCAB), 5)), (), 0.3),
        ignore_eos=rng.random() < 0.3,
        logprobs=True,
        top_logprobs=rng.choice((0, 3, 20)),
    )


def requests_of(rng: random.Random, count: int) -> list[Request]:
    return [
        make_request(
            rng.choices(range(VOCAB), k=rng.randint(1, 40)), number=number, params=random_params(rng),
            sample_index=rng.randint(0, 3),
        )
        for number in range(count)
    ]  # fmt: skip


def oracle_of(model: LlamaForCausalLM, request: Request) -> OracleAnswer:
    prompt = request.token_ids[: request.num_prompt_tokens]
    return oracle_tokens(
        model, prompt, request.params, eos_token_ids=[EOS], sample_index=request.sample_index
    )


def check(events: Sequence[TokenSampled], expected: OracleAnswer, *, start: int = 0) -> None:
    """What was sampled from place `start` on is the oracle's, as far as no tie is in the way."""
    for event, place in zip(events, range(start, expected.num_certain), strict=False):
        assert event.token_id == expected.tokens[place]
        assert event.logprob == pytest.approx(expected.logprobs[place], abs=1e-4)
        assert [logprob for _, logprob in event.top] == pytest.approx(
            [logprob for _, logprob in expected.top[place]], abs=1e-4
        )
    if expected.tie_at is None:
        request = events[0].request
        assert start + len(events) == len(expected.tokens)
        assert request.finish_reason is FinishReason(expected.finish_reason)


def test_random_parameters_give_what_the_oracle_gives(reference_model: Reference) -> None:
    folder, model = reference_model(eos_token_id=EOS)
    requests = requests_of(random.Random(41), 60)
    expected = [oracle_of(model, request) for request in requests]
    config = EngineConfig(
        model=str(folder), block_size=4, chunk_tokens=9, max_batch_tokens=40, max_running=24
    )
    loop, recorder = EngineLoop(load_runner(folder, num_blocks=600), config), Recorder()

    loop.run(requests, recorder)

    for request, answer in zip(requests, expected, strict=True):
        check(recorder.tokens[request.attempt_id], answer)
    # The comparison is worth something: few ties, and both ends occur.
    assert sum(answer.tie_at is not None for answer in expected) < 6
    assert {answer.finish_reason for answer in expected} == {"stop", "length"}


def test_a_resumed_request_continues_as_it_would_have(reference_model: Reference) -> None:
    folder, model = reference_model(eos_token_id=EOS)
    config = EngineConfig(model=str(folder), block_size=4)
    loop, recorder = EngineLoop(load_runner(folder, num_blocks=600), config), Recorder()
    answers: dict[bytes, OracleAnswer] = {}
    resumed: list[Request] = []
    for request in requests_of(random.Random(43), 40):
        answer = oracle_of(model, request)
        start = len(answer.tokens) // 2
        if 0 < start < answer.num_certain:
            request.token_ids += answer.tokens[:start]
            answers[request.attempt_id] = answer
            resumed.append(request)
    starts = {request.attempt_id: request.num_output_tokens for request in resumed}

    loop.run(resumed, recorder)

    assert len(resumed) > 20
    for key, answer in answers.items():
        check(recorder.tokens[key], answer, start=starts[key])


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 6, 128])
def test_prompt_logprobs_lose_and_double_nothing_at_chunk_edges(
    reference_model: Reference, chunk_tokens: int
) -> None:
    folder, model = reference_model()
    prompt = [11, 5, 99, 5, 42, 17]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=True, top_logprobs=3, prompt_logprobs=3)
    config = EngineConfig(model=str(folder), block_size=4, chunk_tokens=chunk_tokens, max_running=8)
    loop = EngineLoop(load_runner(folder), config)
    expected = oracle_prompt_logprobs(model, prompt, 3)
    answer = oracle_tokens(model, prompt, params)

    # The second time its prefix is cached, and must be scored all the same.
    for number in range(2):
        recorder = Recorder()
        request = make_request(prompt, number=number, params=params)
        loop.run([request, make_request([3, 1, 4, 1, 5, 9, 2, 6], number=9)], recorder)

        entries = recorder.prompt[request.attempt_id]
        assert sorted(entries) == [1, 2, 3, 4, 5]
        for index, (logprob, top) in enumerate(expected, start=1):
            assert entries[index][0] == pytest.approx(logprob, abs=1e-4)
            assert entries[index][1] == [token_id for token_id, _ in top]
        tokens = recorder.tokens[request.attempt_id]
        assert len(tokens) == 4
        check(tokens, answer)
        assert recorder.prompt.keys() == {request.attempt_id}


@pytest.mark.parametrize("limit", [64, 48])
def test_an_answer_ends_where_the_context_does(reference_model: Reference, limit: int) -> None:
    folder, _ = reference_model(max_position_embeddings=limit)
    loop, recorder = (
        EngineLoop(load_runner(folder), EngineConfig(model=str(folder), block_size=4)),
        Recorder(),
    )
    params = SamplingParams(temperature=0, max_tokens=10)
    requests = [
        make_request([5] * length, number=number, params=params)
        for number, length in enumerate((limit - 2, limit - 1))
    ]

    loop.run(requests, recorder)

    assert [len(recorder.tokens[request.attempt_id]) for request in requests] == [2, 1]
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
    for length in (limit, limit + 1):
        with pytest.raises(InvalidRequest, match=str(limit - 1)):
            loop.run([make_request([5] * length, params=params)])


def test_a_request_that_excludes_every_token_fails_by_name(reference_model: Reference) -> None:
    folder, _ = reference_model(eos_token_id=EOS)
    loop = EngineLoop(load_runner(folder), EngineConfig(model=str(folder), block_size=4))
    params = SamplingParams(allowed_token_ids=(EOS,), min_tokens=1)

    with pytest.raises(InvalidRequest, match="allowed_token_ids and min_tokens") as error:
        loop.generate([[1, 2, 3]], params)

    assert error.value.field == "allowed_token_ids"


def test_a_prompt_of_one_token_has_no_logprobs(reference_model: Reference) -> None:
    folder, _ = reference_model()
    loop, recorder = (
        EngineLoop(load_runner(folder), EngineConfig(model=str(folder), block_size=4)),
        Recorder(),
    )

    loop.run([make_request([5], params=SamplingParams(max_tokens=1, prompt_logprobs=2))], recorder)

    assert recorder.prompt == {}
    assert len(recorder.tokens) == 1
