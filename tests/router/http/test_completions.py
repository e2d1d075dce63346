"""POST /v1/completions: what it answers, whole and streamed, counted and with log-probabilities."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import expected_answer
from tests.router.http.door import KV, NOW, Door, door, events
from tests.router.tiny_text import BOS, byte_tokenizer, ids_of

PROMPT = [BOS, *ids_of("hello")]
USAGE = {"include_usage": True}


def text_of(token_ids: list[int]) -> str:
    return byte_tokenizer().decode(token_ids)


async def test_an_answer_in_openais_shape(tmp_path: Path) -> None:
    expected = expected_answer(PROMPT, 12, KV)
    async with door(tmp_path) as d:
        response = await d.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "hello", "max_tokens": 12, "temperature": 0},
            headers={"x-request-id": "r-7"},
        )
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "r-7"
        assert response.headers["content-type"] == "application/json"
        answer = response.json()
        fingerprint = answer.pop("system_fingerprint")
        assert fingerprint == f"fp_{d.model.weights_id[:12]}"
        choice = {"index": 0, "text": text_of(expected), "logprobs": None, "finish_reason": "length"}
        assert answer == {
            "id": "cmpl-r-7",
            "object": "text_completion",
            "created": int(NOW),
            "model": "tiny",
            "choices": [choice],
            "usage": {
                "prompt_tokens": 6,
                "completion_tokens": 12,
                "total_tokens": 18,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }
        await d.idle()


@pytest.mark.parametrize(
    "prompt", ["hello", ["hello"], PROMPT, [PROMPT]], ids=["text", "texts", "ids", "lists"]
)
async def test_a_prompt_is_text_or_ids_alone_or_in_a_list(prompt: Any, tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        response = await d.complete(prompt=prompt, max_tokens=5, return_token_ids=True)
        (choice,) = response.json()["choices"]
        assert choice["token_ids"] == expected_answer(PROMPT, 5, KV)
        await d.idle()


async def test_choices_are_numbered_prompt_by_prompt(tmp_path: Path) -> None:
    first, second = expected_answer(PROMPT, 4, KV), expected_answer([BOS, *ids_of("ab")], 4, KV)
    async with door(tmp_path) as d:
        response = await d.complete(prompt=["hello", "ab"], n=2, max_tokens=4)
        answer = response.json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [text_of(first)] * 2 + [text_of(second)] * 2
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (9, 16, 25)
        streamed = events((await d.complete(prompt=["hello", "ab"], n=2, max_tokens=4, stream=True)).text)
        joined = dict.fromkeys(range(4), "")
        for event in streamed[:-1]:
            (choice,) = event["choices"]
            joined[choice["index"]] += choice["text"]
        assert [*joined.values()] == texts
        await d.idle()


async def test_one_bad_prompt_of_several_refuses_them_all(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        response = await d.complete(prompt=["hello", "x" * 100], max_tokens=4)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        await d.idle()


def stop_in(text: str) -> str:
    return text[6:9]


CASES: dict[str, dict[str, Any]] = {
    "one": {"n": 1, "max_tokens": 9},
    "two": {"n": 2, "max_tokens": 9},
    "one token": {"max_tokens": 1},
    "stop": {"max_tokens": 50, "stop": stop_in(text_of(expected_answer(PROMPT, 50, KV)))},
    "empty": {"max_tokens": 9, "stop": [text_of(expected_answer(PROMPT, 1, KV))]},
    "cached prefix": {"max_tokens": 9, "prompt": PROMPT * 4},
}


@pytest.mark.parametrize("case", CASES)
async def test_usage_is_the_same_streamed_or_not(case: str, tmp_path: Path) -> None:
    body = {"prompt": "hello", **CASES[case]}
    async with door(tmp_path) as d:
        # So that both see the same cache.
        await d.complete(**body)
        await d.idle()
        whole = (await d.complete(**body)).json()
        await d.idle()
        streamed = await d.complete(**body, stream=True, stream_options=USAGE)
        *parts, last, done = events(streamed.text)
        assert done == "[DONE]"
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all(part["choices"] and part["usage"] is None for part in parts)
        for choice in whole["choices"]:
            own = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice["index"]]
            assert "".join(part["text"] for part in own) == choice["text"]
            assert [part["finish_reason"] for part in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1]["finish_reason"] == choice["finish_reason"]
        num_prompt = 24 if case == "cached prefix" else 6
        # Counted by hand: the stop is complete with its third token, the ninth of the answer.
        num_output = {"one": 9, "two": 18, "one token": 1, "stop": 9, "empty": 1, "cached prefix": 9}[case]
        assert whole["usage"]["prompt_tokens"] == num_prompt
        assert whole["usage"]["completion_tokens"] == num_output
        # Whole blocks of four tokens; the last token of a prompt is always computed.
        if case != "empty":
            # What ended with its first token was cancelled, and leaves no promise of a cache.
            assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == {6: 4, 24: 20}[num_prompt]
        await d.idle()


async def test_without_include_usage_a_stream_does_not_tell_it(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
            streamed = await d.complete(prompt="hello", max_tokens=3, stream=True, **options)
            *parts, done = events(streamed.text)
            assert done == "[DONE]"
            assert all("usage" not in part and part["choices"] for part in parts)
        await d.idle()


async def test_continuous_usage_grows_with_the_tokens(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        options = USAGE | {"continuous_usage_stats": True}
        streamed = await d.complete(
            prompt="hello", max_tokens=5, stream=True, stream_options=options, return_token_ids=True
        )
        *parts, last, _ = events(streamed.text)
        seen = 0
        for part in parts:
            seen += len(part["choices"][0]["token_ids"])
            usage = part["usage"]
            counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
            assert counts == (6, seen, 6 + seen)
        assert last["usage"]["completion_tokens"] == seen == 5
        await d.idle()


async def logprobs_of(d: Door, **body: Any) -> tuple[dict[str, Any], str]:
    response = await d.complete(prompt="hello", **body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["logprobs"], choice["text"]


async def test_log_probabilities_name_tokens_and_their_places(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        shaped, text = await logprobs_of(d, max_tokens=5, logprobs=0)
        assert "".join(shaped["tokens"]) == text
        assert shaped["text_offset"] == [0, 1, 2, 3, 4]
        # What tests/fakes.py gives to every token.
        assert shaped["token_logprobs"] == [-0.5] * 5
        assert shaped["top_logprobs"] == [{token: -0.5} for token in text]
        parts = events((await d.complete(prompt="hello", max_tokens=5, logprobs=0, stream=True)).text)[:-1]
        streamed = [part["choices"][0]["logprobs"] for part in parts]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [entry for piece in streamed for entry in piece[name]] == shaped[name]
        await d.idle()


async def test_stops_seeds_and_budgets_reach_the_generation(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        text = text_of(expected_answer(PROMPT, 50, KV))
        stop = stop_in(text)
        body = {"prompt": "hello", "max_tokens": 50, "stop": ["never", stop]}
        cut = (await d.complete(**body)).json()["choices"][0]
        assert (cut["text"], cut["finish_reason"]) == (text[: text.index(stop)], "stop")
        shown = (await d.complete(**body, include_stop_str_in_output=True)).json()["choices"][0]
        assert shown["text"] == cut["text"] + stop
        for empty in (None, []):
            whole = (await d.complete(**body | {"stop": empty})).json()["choices"][0]
            assert (whole["text"], whole["finish_reason"]) == (text, "length")
        answers = [
            (await d.complete(prompt="hello", max_tokens=9, temperature=1, seed=seed)).json()["choices"][0][
                "text"
            ]
            for seed in (7, 7, -1, 2**64 - 1)
        ]
        sampled = expected_answer(PROMPT, 9, KV, seed=7)
        assert answers[0] == answers[1] == text_of(sampled)
        # A negative seed is the number with the same 64 bits.
        assert answers[2] == answers[3]
        await d.idle()


@pytest.mark.parametrize(
    "body",
    [
        {"priority": 0},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"stop": None, "logprobs": None, "stream": None, "seed": None, "n": None, "response_format": None},
        {"ignore_eos": True, "min_tokens": 3, "top_k": -1, "echo": False, "best_of": 1, "suffix": None},
        {"priority": "high", "ttft_objective_ms": 60000.0, "logit_bias": {"12": -100}},
        {"response_format": {"type": "text"}, "structured_outputs": {}},
    ],
)
async def test_what_clients_send_beside_is_taken(body: dict[str, Any], tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        response = await d.complete(prompt="hello", max_tokens=3, **body)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == text_of(expected_answer(PROMPT, 3, KV))
        await d.idle()


async def test_prefixes_are_shared_by_those_with_the_same_salt_only(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        cached = []
        for salt in (None, "a", "a", "b", "", None):
            response = await d.complete(prompt=PROMPT, max_tokens=2, cache_salt=salt)
            cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            await d.idle()
        # A whole block of four, where it is known; empty is none.
        assert cached == [0, 0, 4, 0, 4, 4]


async def test_many_clients_at_once_get_their_own_answers(tmp_path: Path) -> None:
    rng = random.Random(4)
    prompts = [[BOS, *rng.sample(range(2, 97), 5)] for _ in range(24)]
    async with door(tmp_path) as d:

        async def ask(prompt: list[int], stream: bool) -> httpx.Response:
            return await d.complete(prompt=prompt, max_tokens=6, return_token_ids=True, stream=stream)

        responses = await asyncio.gather(*(ask(prompt, bool(i % 2)) for i, prompt in enumerate(prompts)))
        for index, response in enumerate(responses):
            if index % 2:
                ids = [t for e in events(response.text)[:-1] for t in e["choices"][0]["token_ids"]]
            else:
                ids = response.json()["choices"][0]["token_ids"]
            assert ids == expected_answer(prompts[index], 6, KV)
        assert len({response.headers["x-request-id"] for response in responses}) == 24
        await d.idle()
