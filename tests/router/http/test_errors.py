"""Refusals and failures: status, shape, place, and what a client may do about it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton import errors
from baton.errors import BatonError
from baton.priorities import PRIORITIES
from router.http.errors import body_of, form_of, headers_of
from router.http.exchange import MAX_BODY_BYTES
from router.tenancy.rate_limits import RateLimits
from router.tenancy.tenants import Tenant, Tenants
from tests.fakes import until
from tests.router.http.door import door
from tests.router.http.scripted import chunk, scripted, summary

HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}

# Of every error there is: status, OpenAI's type, code, and whether it is worth another try.
TABLE: dict[type[BatonError], tuple[int, str, str, bool]] = {
    errors.InvalidRequest: (400, "invalid_request_error", "invalid_value", False),
    errors.UnknownModel: (404, "invalid_request_error", "model_not_found", False),
    errors.UnknownRequest: (404, "invalid_request_error", "request_not_found", False),
    errors.Unauthenticated: (401, "invalid_request_error", "invalid_api_key", False),
    errors.Overloaded: (429, "rate_limit_error", "rate_limit_exceeded", True),
    errors.Unavailable: (503, "server_error", "unavailable", True),
    errors.Draining: (503, "server_error", "draining", True),
    errors.PeerLost: (503, "server_error", "unavailable", True),
    errors.KvTransferFailed: (503, "server_error", "unavailable", True),
    errors.DeadlineExceeded: (504, "timeout_error", "deadline_exceeded", False),
    errors.Cancelled: (499, "invalid_request_error", "client_closed_request", False),
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
    ({"messages": HI, "priority": 0}, "priority"),
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


async def test_a_deadline_must_be_a_time(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        for text in ("soon", "0", "-1", "nan", "inf"):
            headers = {"x-request-timeout-s": text}
            response = await d.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout-s")


KEY = "0123456789abcdef"
DIGEST = "sha256:9f9f5111f7b27a781f1f1ddde5ebc2dd2b796bfc7365c9c28b548e564176929f"


def tenants(**settings: Any) -> Tenants:
    return Tenants({Tenant(name="search", **settings): [DIGEST]})


async def test_a_key_says_whose_request_it_is(tmp_path: Path) -> None:
    async with door(tmp_path, tenants=tenants()) as d:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            # Whoever is not known does not learn what else is wrong.
            response = await d.http.post(path, content=b"{", headers=JSON)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await d.http.get("/v1/models")).status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert (await d.http.get(path)).status_code == 200
        wrong = await d.http.get("/v1/models", headers={"authorization": "Bearer " + "f" * 16})
        assert wrong.status_code == 401
        assert "f" * 16 not in wrong.text
        right = {"authorization": f"Bearer {KEY}"}
        assert (await d.http.get("/v1/models", headers=right)).status_code == 200
        body = {"prompt": "hello", "max_tokens": 2}
        assert (await d.http.post("/v1/completions", json=body, headers=right)).status_code == 200
        above = await d.http.post("/v1/completions", json={**body, "priority": "high"}, headers=right)
        assert (above.status_code, above.json()["error"]["param"]) == (400, "priority")
        await d.idle()


async def test_above_its_rate_a_tenant_is_told_when_to_come_back(tmp_path: Path) -> None:
    known = tenants(requests_per_minute=1, max_priority=PRIORITIES["high"])
    async with door(tmp_path, tenants=known, limits=RateLimits(known, 1)) as d:
        d.http.headers["authorization"] = f"Bearer {KEY}"
        assert (await d.complete(prompt="hello", max_tokens=2)).status_code == 200
        refused = await d.complete(prompt="hello", max_tokens=2, stream=True)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        # One a minute.
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        await d.idle()


async def test_more_requests_than_may_run_are_refused(tmp_path: Path) -> None:
    may_end = asyncio.Event()

    async def script(request: Any, call: Any) -> None:
        await may_end.wait()
        await answer(request, call)

    async with scripted(tmp_path, script, max_requests=2) as d:
        running = [asyncio.create_task(d.complete()) for _ in range(2)]
        await until(lambda: d.inference.num_running == 2)
        refused = await d.http.post("/v1/completions", content=b"{", headers=JSON)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        may_end.set()
        assert [(await task).status_code for task in running] == [200, 200]
        assert (await d.complete()).status_code == 200


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
