"""Refusals and failures: status, shape, place, and what a client may do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton import errors
from baton.errors import BatonError
from router.http.errors import body_of, form_of, headers_of
from router.http.exchange import MAX_BODY_BYTES
from tests.router.http.door import door
from tests.router.http.scripted import chunk, scripted, summary

HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}

# Of every error there is: status, OpenAI's type, code, and whether it is worth another try.
TABLE: dict[type[BatonError], tuple[int, str, str, bool]] = {
    errors.InvalidRequest: (400, "invalid_request_error", "invalid_value", False),
    errors.PromptTooLong: (400, "invalid_request_error", "context_length_exceeded", False),
    errors.UnknownModel: (404, "invalid_request_error", "model_not_found", False),
    errors.UnknownRequest: (404, "invalid_request_error", "request_not_found", False),
    errors.Unauthenticated: (401, "invalid_request_error", "invalid_api_key", False),
    errors.Overloaded: (429, "rate_limit_error", "rate_limit_exceeded", True),
    errors.Unavailable: (503, "server_error", "unavailable", True),
    errors.Draining: (503, "server_error", "draining", True),
    errors.PeerLost: (503, "server_error", "unavailable", True),
    errors.KvTransferFailed: (503, "server_error", "unavailable", True),
    errors.DeadlineExceeded: (504, "timeout_error", "deadline_exceeded", False),
    # None that a client sees: of those that leave nobody hears, and any other is another answer.
    errors.Cancelled: (500, "server_error", "cancelled", False),
    errors.PoisonRequest: (500, "server_error", "poison_request", False),
    errors.NonFiniteLogits: (500, "server_error", "non_finite_logits", False),
    errors.IncompatiblePeer: (500, "server_error", "incompatible_peer", False),
    errors.ModelError: (500, "server_error", "model_error", False),
    errors.ConfigError: (500, "server_error", "config_error", False),
    errors.InternalError: (500, "server_error", "internal", False),
}


def test_every_error_has_its_row() -> None:
    # The last is the SDK's own.
    assert TABLE.keys() == {*errors.BY_CODE.values()} - {BatonError, errors.IncompleteAnswer}


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_an_error_becomes_a_status_and_openais_object(kind: type[BatonError]) -> None:
    status, type_, code, retries = TABLE[kind]
    error = kind("what happened", field="where")
    assert form_of(error).status == status
    expected = {"message": "what happened", "type": type_, "param": "where", "code": code}
    assert body_of(error) == {"error": expected}
    assert headers_of(error)["x-should-retry"] == ("true" if retries else "false")
    assert ("retry-after" in headers_of(error)) is retries


@pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [(None, "1", "1000"), (0.0, "1", "1"), (0.2, "1", "200"), (2.0, "2", "2000"), (2.001, "3", "2001")],
)
def test_a_time_to_come_back_is_rounded_up(
    retry_after_s: float | None, seconds: str, milliseconds: str
) -> None:
    headers = headers_of(errors.Overloaded("full", retry_after_s=retry_after_s))
    assert (headers["retry-after"], headers["retry-after-ms"]) == (seconds, milliseconds)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": HI, "tempertaure": 1}, "tempertaure"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "nobody", "content": "x"}]}, "messages[1]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[0].content[1]",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
    ({"messages": HI, "temperature": "hot"}, "temperature"),
    ({"messages": HI, "temperature": -1}, "temperature"),
    ({"messages": HI, "top_p": 0}, "top_p"),
    ({"messages": HI, "n": 0}, "n"),
    ({"messages": HI, "n": 17}, "n"),
    ({"messages": HI, "n": True}, "n"),
    ({"messages": HI, "n": 2**31}, "n"),
    ({"messages": HI, "max_tokens": 900}, "max_tokens"),
    ({"messages": HI, "max_completion_tokens": 900}, "max_completion_tokens"),
    ({"messages": HI, "max_completion_tokens": 9, "max_tokens": 8}, "max_tokens"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "logprobs": 1}, "logprobs"),
    ({"messages": HI, "stop": [""]}, "stop"),
    ({"messages": HI, "stop": [3]}, "stop[0]"),
    ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"messages": HI, "logit_bias": {"5": 101}}, "logit_bias"),
    ({"messages": HI, "stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"messages": HI, "allowed_token_ids": [5000]}, "allowed_token_ids"),
    ({"messages": HI, "allowed_token_ids": []}, "allowed_token_ids"),
    ({"messages": HI, "seed": 2**64}, "seed"),
    ({"messages": HI, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": HI, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"messages": HI, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"messages": HI, "priority": "urgent"}, "priority"),
    ({"messages": HI, "priority": 1}, "priority"),
    ({"messages": HI, "priority": False}, "priority"),
    ({"messages": HI, "cache_salt": 3}, "cache_salt"),
    ({"messages": HI, "cache_salt": "s" * 257}, "cache_salt"),
    ({"messages": [{"role": "user", "content": "x" * 64}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"messages": HI, "logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"messages": HI, "logit_bias": {"5": None}}, "logit_bias.5"),
    ({"messages": HI, "ttft_objective_ms": 0}, "ttft_objective_ms"),
    ({"messages": HI, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"messages": HI, "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {
            "messages": HI,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "no"}},
            },
        },
        "response_format",
    ),
    ({"messages": HI, "guided_regex": "("}, "guided_regex"),
    ({"messages": HI, "guided_choice": []}, "guided_choice"),
    ({"messages": HI, "guided_json": "{"}, "guided_json"),
    ({"messages": HI, "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"messages": HI, "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": HI, "tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"messages": HI, "functions": []}, "functions"),
    ({"messages": HI, "modalities": ["audio"]}, "modalities[0]"),
    ({"messages": HI, "echo": True}, "echo"),
    ({"messages": HI, "use_beam_search": True}, "use_beam_search"),
    ({"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]


async def test_what_is_wrong_with_a_chat_is_named_by_its_place(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        for body, param in WRONG:
            response = await d.http.post("/v1/chat/completions", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), (body, response.text)
            assert error["type"] == "invalid_request_error"
            assert error["message"]
        await d.idle()


async def test_what_is_wrong_with_a_completion_is_named_by_its_place(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a" * 64}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "messages": HI}, "messages"),
    ]
    async with door(tmp_path) as d:
        for body, param in wrong:
            response = await d.http.post("/v1/completions", json=body)
            assert response.status_code == 400, (body, response.text)
            assert response.json()["error"]["param"] == param, (body, response.text)
        await d.idle()


async def test_a_typo_is_answered_with_what_may_be_meant(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        response = await d.complete(prompt="a", max_tokns=3)
        assert response.json()["error"]["message"] == "unknown field 'max_tokns'; did you mean 'max_tokens'?"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt":' + b"[" * 9000],
)
async def test_a_body_that_is_no_json_object_is_refused(body: bytes, tmp_path: Path) -> None:
    async with scripted(tmp_path, refuse_all) as d:
        response = await d.http.post("/v1/completions", content=body, headers=JSON)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


async def refuse_all(request: Any, call: Any) -> None:
    raise AssertionError("nothing may get here")


async def answer(request: Any, call: Any) -> None:
    await call.write(chunk("a", end=True))
    await call.write(summary(1))


async def test_paths_methods_types_and_sizes(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        for method, path, status in [
            ("GET", "/", 404),
            ("POST", "/v1/embeddings", 404),
            ("GET", "/v1/completions/", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("OPTIONS", "/v1/chat/completions", 405),
        ]:
            response = await d.http.request(method, path)
            assert response.status_code == status
            assert f"{method} {path}" in response.json()["error"]["message"]
            assert response.headers["x-request-id"]
            if status == 405:
                assert response.headers["allow"]
        body = json.dumps({"prompt": "x"}).encode()
        for headers in ({}, {"content-type": "text/plain"}, {**JSON, "content-encoding": "gzip"}):
            response = await d.http.post("/v1/completions", content=body, headers=headers)
            assert response.status_code == 415
        for content_type in ("application/json; charset=utf-8", "Application/JSON"):
            response = await d.http.post(
                "/v1/completions", content=body, headers={"content-type": content_type}
            )
            assert response.status_code == 200
        assert (await d.http.head("/health")).status_code == 200


async def test_a_body_over_the_limit_is_refused_and_the_limit_named(tmp_path: Path) -> None:
    async def pieces() -> Any:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    async with scripted(tmp_path, answer) as d:
        for content in (b" " * (MAX_BODY_BYTES + 1), pieces()):
            response = await d.http.post("/v1/completions", content=content, headers=JSON)
            assert response.status_code == 413
            assert str(MAX_BODY_BYTES) in response.json()["error"]["message"]
        fitting = json.dumps({"prompt": "x"}).encode().ljust(MAX_BODY_BYTES)
        assert (await d.http.post("/v1/completions", content=fitting, headers=JSON)).status_code == 200


async def test_request_ids_are_echoed_or_drawn(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:

        async def ask(request_id: str, **body: Any) -> Any:
            headers = {"x-request-id": request_id}
            return await d.http.post("/v1/completions", json={"prompt": "x", **body}, headers=headers)

        given = await ask("my id 7")
        assert (given.headers["x-request-id"], given.json()["id"]) == ("my id 7", "cmpl-my id 7")
        assert (await ask("my id 8", prompt=3)).headers["x-request-id"] == "my id 8"
        assert (await ask("my id 9", stream=True)).headers["x-request-id"] == "my id 9"
        drawn = [(await d.complete()).headers["x-request-id"] for _ in range(3)]
        assert len(set(drawn)) == 3
        refused = await ask("x" * 129)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-request-id")
        assert refused.headers["x-request-id"] != "x" * 129


async def test_a_deadline_may_be_any_time_to_come(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        for text in ("1e300", "5000000", "inf", "30"):
            headers = {"x-request-timeout-s": text}
            body = {"prompt": "x", "max_tokens": 2}
            response = await d.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200, response.text
        await d.idle()


async def test_several_prompts_may_have_the_longest_id_there_is(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        for length in (125, 126, 127, 128):
            headers = {"x-request-id": "r" * length}
            body = {"prompt": ["x"] * 11, "max_tokens": 1}
            response = await d.http.post("/v1/completions", json=body, headers=headers)
            assert (response.status_code, len(response.json()["choices"])) == (200, 11)
            assert response.headers["x-request-id"] == "r" * length
        await d.idle()


async def test_what_somebody_wrote_does_not_come_back_by_the_megabyte(tmp_path: Path) -> None:
    long = "m" * 1_000_000
    async with door(tmp_path) as d:
        for path, body in [
            ("/v1/completions", {"prompt": "x", "model": long}),
            ("/v1/completions", {"prompt": "x", long: 1}),
            ("/v1/completions", {"prompt": "x", "logit_bias": {long: 1}}),
            ("/v1/chat/completions", {"messages": [{"role": long, "content": "x"}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": long}]}]}),
            ("/tokenize", {"prompt": "x", "model": long}),
        ]:
            response = await d.http.post(path, json=body)
            assert response.status_code in (400, 404)
            assert len(response.content) < 700, (path, [*body])
        await d.idle()
    assert len(body_of(errors.InvalidRequest(long))["error"]["message"]) == 2000


async def test_who_is_out_of_reach_of_an_objective_is_not_told_to_try_again(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        response = await d.complete(prompt="x", max_tokens=1, ttft_objective_ms=1e-6)
        assert (response.status_code, response.headers["x-should-retry"]) == (429, "false")
        await d.idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_what_was_cancelled_inside_is_unavailable_to_a_client_that_is_there(
    stream: bool, tmp_path: Path
) -> None:
    async def script(request: Any, call: Any) -> None:
        if stream:
            await call.write(chunk("a"))
        raise errors.Cancelled("the worker gave up")

    async with scripted(tmp_path, script) as d:
        response = await d.complete(stream=stream)
        assert response.status_code == (200 if stream else 503)
        assert '"code":"unavailable"' in response.text
        assert ("retry-after" in response.headers) is not stream


async def test_a_deadline_must_be_a_time(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        for text in ("soon", "0", "-1", "nan", "-inf"):
            headers = {"x-request-timeout-s": text}
            response = await d.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout-s")


async def test_a_defect_is_told_by_an_id_and_nothing_else(tmp_path: Path) -> None:
    async def script(request: Any, call: Any) -> None:
        raise RuntimeError("a secret")

    async with scripted(tmp_path, script) as d:
        for stream in (False, True):
            response = await d.complete(stream=stream)
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "internal"
            assert "secret" not in response.text
            assert response.headers["x-should-retry"] == "false"
