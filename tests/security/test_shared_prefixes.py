"""Tenants do not find each other's cached prefixes, whatever salts they bring; their own they find."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import grpc
import pytest

from baton.api_keys import digest_of
from baton.prefix_keys import request_salt, tenant_salt
from baton.rpc import open_channel
from baton.v1.inference_service_pb2 import GenerateRequest
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub
from router.placing.prompt_keys import PromptKeys
from router.tenancy.tenants import Tenant, Tenants
from tests.router.http.door import Door, door
from tests.security.test_without_a_key import served

KEYS = {name: name * 16 for name in ("aa", "bb")}
PROMPT = "the same words for all, in several blocks"


def tenants() -> Tenants:
    return Tenants({Tenant(name=name): [digest_of(key)] for name, key in KEYS.items()})


async def by_http(d: Door, tenant: str, salt: str = "") -> int:
    """How many tokens of the prompt were found."""
    body = {"prompt": PROMPT, "max_tokens": 2, **({"cache_salt": salt} if salt else {})}
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    answer = await d.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def by_grpc(address: str, tenant: str, salt: str = "") -> int:
    async with open_channel(address) as channel:
        request = GenerateRequest(text=PROMPT, max_tokens=2, cache_salt=salt)
        call = InferenceServiceStub(channel).Generate(
            request, metadata=[("authorization", f"Bearer {KEYS[tenant]}")], timeout=20
        )
        responses = [response async for response in call]
    return int(responses[-1].summary.num_cached_tokens)


@pytest.mark.parametrize("first", ["http", "grpc"])
async def test_the_same_tenant_hits_and_another_one_misses(tmp_path: Path, first: str) -> None:
    async with door(tmp_path, tenants=tenants()) as d, await served(d) as server:

        async def cached(tenant: str, salt: str = "", *, over: str) -> int:
            if over == "http":
                return await by_http(d, tenant, salt)
            return await by_grpc(server.address, tenant, salt)

        assert await cached("aa", over=first) == 0
        other = {"http": "grpc", "grpc": "http"}[first]
        assert await cached("aa", over=other) >= 8, "the cache is off, and the test would prove nothing"
        for over in ("http", "grpc"):
            assert await cached("bb", f"not yet {over}", over=over) == 0
        assert await cached("bb", over=other) == 0
        assert await cached("bb", over=first) >= 8
        # A request's own salt narrows, and does not lead to what somebody else has.
        for salt in ("mine", "aa", "bb", str(tenant_salt("aa"))):
            assert await cached("bb", salt, over=first) == 0
            assert await cached("bb", salt, over=other) >= 8
            assert await cached("aa", salt, over=first) == 0
        await d.idle()


async def test_a_salt_that_is_too_long_is_refused_and_not_cut(tmp_path: Path) -> None:
    async with door(tmp_path, tenants=tenants()) as d, await served(d) as server:
        with pytest.raises(grpc.aio.AioRpcError, match="cache_salt") as caught:
            await by_grpc(server.address, "aa", "x" * 5_000)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_no_pair_of_tenant_and_salt_has_another_pairs_keys() -> None:
    """Names and salts that would run together if they were only joined."""
    names = ["", "a", "aa", "a:b", "b", "a\x00", "\x00a"]
    pairs = list(product(names, names))
    salts = [request_salt(tenant_salt(name), salt) for name, salt in pairs]
    assert len(set(salts)) == len(pairs)
    tokens = list(range(64))
    first = {PromptKeys(tokens, salt).all(16)[0] for salt in salts}
    assert len(first) == len(pairs)
