"""Whose requests are taken, and how many: keys, rates, and requests at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.priorities import PRIORITIES
from router.tenancy.rate_limits import RateLimits
from router.tenancy.tenants import Tenant, Tenants
from tests.fakes import until
from tests.router.http.door import door
from tests.router.http.scripted import chunk, scripted, summary

JSON = {"content-type": "application/json"}


async def answer(request: Any, call: Any) -> None:
    await call.write(chunk("a", end=True))
    await call.write(summary(1))


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
        for path in ("/health", "/ready"):
            assert (await d.http.get(path)).status_code == 200
        for path in ("/metrics", "/version"):
            assert (await d.http.get(path)).status_code == 401
            as_collector = {"authorization": f"Bearer {KEY}"}
            assert (await d.http.get(path, headers=as_collector)).status_code == 200
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


async def test_above_its_rate_a_tenants_prompts_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tenants(requests_per_minute=2)
    async with door(tmp_path, tenants=known, limits=RateLimits(known, 1)) as d:
        read: list[str] = []
        encode = d.text.encode

        async def traced(text: str, max_tokens: int) -> list[int]:
            read.append(text)
            return await encode(text, max_tokens)

        monkeypatch.setattr(d.text, "encode", traced)
        d.http.headers["authorization"] = f"Bearer {KEY}"
        statuses = [(await d.complete(prompt=text, max_tokens=1)).status_code for text in "abcd"]
        assert (statuses, read) == ([200, 200, 429, 429], ["a", "b"])
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
