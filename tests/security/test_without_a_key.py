"""Where tenants are told apart, nothing is answered without a key but what probes ask.

Routes and methods are those that the servers have, not a list of this test: a new one is covered, or named.
"""

from __future__ import annotations

import hmac
import random
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from starlette.routing import Route

from baton.api_keys import digest_of
from baton.rpc import open_channel
from baton.rpc_server import Registration, RpcServer
from baton.v1 import inference_service_pb2
from baton.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from engine.block_pool import BlockPool
from kvtransfer.contract import Gone
from kvtransfer.lease_table import Lease, LeaseTable
from router.http import app as http_app
from router.service import InferenceServicer
from router.tenancy.tenants import Tenant, Tenants
from tests.router.http.door import Door, door

KEY = "k" * 32
OPEN_PAGES = {"/health", "/ready"}
# Everything a client may do wrong with a key.
WRONG: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer " + "x" * 32},
    {"authorization": f"Basic {KEY}"},
    {"authorization": KEY},
    {"authorization": f"Bearer {KEY} {KEY}"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer {KEY}\u00e9".encode("latin-1").decode("latin-1")},
    {"x-api-key": KEY},
]


def tenants() -> Tenants:
    return Tenants({Tenant(name="search"): [digest_of(KEY)]})


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[Route]:
    made: list[Route] = []

    def recording(*args: Any, **options: Any) -> Route:
        made.append(Route(*args, **options))
        return made[-1]

    monkeypatch.setattr(http_app, "Route", recording)
    return made


def asked(routes: list[Route]) -> list[tuple[str, str]]:
    """(method, path) of each, with a name where a path has room for one."""
    return [
        (method, route.path.replace("{name:path}", "tiny"))
        for route in routes
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]


async def test_http_routes_ask_for_a_key(tmp_path: Path, routes: list[Route]) -> None:
    async with door(tmp_path, tenants=tenants()) as d:
        seen = asked(routes)
        assert len(seen) >= 10
        assert {path for _, path in seen} >= OPEN_PAGES
        for method, path in seen:
            for headers in WRONG:
                content = b'{"model": "tiny", "prompt": "hello"}'
                response = await d.http.request(
                    method,
                    path,
                    headers=[(k.encode(), v.encode("latin-1")) for k, v in headers.items()],
                    content=content if method == "POST" else None,
                )
                wanted = {200, 503} if path in OPEN_PAGES else {401}
                assert response.status_code in wanted, (method, path, headers)
                assert KEY not in response.text
        assert d.inference.num_requests == 0


async def test_http_takes_the_scheme_in_any_case_and_one_header_only(tmp_path: Path) -> None:
    async with door(tmp_path, tenants=tenants()) as d:
        for scheme in ("Bearer", "bearer", "BEARER"):
            right = await d.http.get("/v1/models", headers={"authorization": f"{scheme} {KEY}"})
            assert right.status_code == 200
        twice = [(b"authorization", f"Bearer {KEY}".encode()), (b"authorization", b"Bearer other")]
        assert (await d.http.get("/v1/models", headers=twice)).status_code in (400, 401)


async def served(d: Door) -> RpcServer:
    add = partial(add_InferenceServiceServicer_to_server, InferenceServicer(d.inference))
    return await RpcServer.start([Registration(name="baton.v1.InferenceService", add=add)])


async def test_rpcs_ask_for_a_key(tmp_path: Path) -> None:
    service = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    assert len(service.methods) >= 2
    async with door(tmp_path, tenants=tenants()) as d, await served(d) as server:
        async with open_channel(server.address) as channel:
            for method in service.methods:
                for headers in WRONG:
                    metadata = [(key, value) for key, value in headers.items() if value.isascii()]
                    code = await called(channel, f"/{service.full_name}/{method.name}", metadata)
                    assert code is grpc.StatusCode.UNAUTHENTICATED, (method.name, headers)
            # Health says who takes requests, and is for probes.
            health = await called(channel, "/grpc.health.v1.Health/Check", [])
            assert health is grpc.StatusCode.OK
            # A method that is not there says so, and nothing else.
            nothing = await called(channel, f"/{service.full_name}/Shutdown", [])
            assert nothing is grpc.StatusCode.UNIMPLEMENTED
        assert d.inference.num_requests == 0


async def called(channel: grpc.aio.Channel, method: str, metadata: list[tuple[str, str]]) -> grpc.StatusCode:
    """The status of a call with an empty message, whichever way answers stream."""
    call = channel.unary_stream(method)(b"", metadata=metadata, timeout=10)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()  # type: ignore[no-any-return]


class Secret(bytes):
    """Fails where it is compared in a time that tells how much of it was right."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared by ==")

    __hash__ = bytes.__hash__


def test_keys_are_looked_up_by_digest_and_numbers_of_leases_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []

    def recorded(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True))

    monkeypatch.setattr(hmac, "compare_digest", recorded)
    known = tenants()
    assert known.of([("authorization", f"Bearer {KEY}")]).name == "search"
    # What is compared, and what is kept, is a digest: whoever guesses a key does not choose its digest.
    assert compared == [(digest_of(KEY), digest_of(KEY))]
    assert KEY not in repr(vars(known))

    table = LeaseTable[str](BlockPool(8, 16), rng=random.Random(3))
    lease = table.reserve(b"a" * 16, "request", num_blocks=1, num_tokens=16, now=0.0)
    assert isinstance(lease, Lease)
    lease.lease_id = Secret(lease.lease_id)
    compared.clear()
    assert isinstance(table.accept(Secret(b"x" * 16), b"a" * 16, 1.0), Gone)
    assert table.accept(Secret(bytes(lease.lease_id)), b"a" * 16, 1.0) is lease
    assert len(compared) >= 2


def test_random_is_the_systems_where_it_guards_something() -> None:
    root = Path(__file__).parents[2]
    for name in ("router/__main__.py", "decode_worker/serve.py", "prefill_worker/serve.py"):
        assert "SystemRandom()" in (root / name).read_text(), name
    assert issubclass(random.SystemRandom, random.Random)
