"""Links over real gRPC with the real services of both workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton import __version__
from baton.identity import SESSION_VERSIONS, Identity
from baton.ports import WorkerInfo
from baton.rpc import OpenChannel, open_channel
from baton.rpc_server import Registration, RpcServer
from baton.tls import TlsFiles
from baton.v1 import common_pb2
from baton.v1.decode_service_pb2_grpc import add_DecodeServiceServicer_to_server
from baton.v1.prefill_service_pb2_grpc import add_PrefillServiceServicer_to_server
from baton.versions import Versions
from decode_worker.service import DecodeServicer
from prefill_worker.service import PrefillServicer
from router.decode_link import DecodeLink
from router.dial import decode_dialer, prefill_dialer
from router.prefill_link import PrefillLink
from tests.certificates import Authority
from tests.cluster import make_decode, make_prefill
from tests.fakes import FINGERPRINT, KvNetwork, until

ROUTER = Identity(name="router-0", role=common_pb2.ROLE_ROUTER, incarnation=9, fingerprint=FINGERPRINT)


class Node:
    """A worker on a real port, and how a link reaches it."""

    def __init__(self, role: str) -> None:
        network = KvNetwork()
        self.role = role
        if role == "prefill":
            self.worker: Any = make_prefill("w", 3, network, credit_tokens=70)
            add: Any = partial(add_PrefillServiceServicer_to_server, PrefillServicer(self.worker))
        else:
            self.worker = make_decode("w", 3, network)
            add = partial(add_DecodeServiceServicer_to_server, DecodeServicer(self.worker))
        name = f"baton.v1.{role.capitalize()}Service"
        self.registration = Registration(name=name, add=add)
        self.changes = 0

    def link(
        self,
        server: RpcServer,
        identity: Identity = ROUTER,
        incarnation: int = 3,
        opener: OpenChannel = open_channel,
    ) -> Any:
        info = WorkerInfo(name="w", role=self.role, incarnation=incarnation, address=server.address)
        if self.role == "prefill":
            return PrefillLink(info, identity, prefill_dialer(opener), self, self)
        return DecodeLink(info, identity, decode_dialer(opener), self, self)

    def changed(self) -> None:
        self.changes += 1

    def met(self) -> None:
        self.changes += 1

    def joined(self, link: Any) -> None:
        assert link.is_connected

    def lost(self, link: Any) -> None:
        assert not link.is_connected

    def cached(self, link: Any, changes: common_pb2.CacheChanges) -> None:
        assert changes.reset
        assert link.num_blocks == 64


@asynccontextmanager
async def served(node: Node, tls: TlsFiles | None = None) -> AsyncIterator[RpcServer]:
    credentials = tls.server_credentials() if tls else None
    async with await RpcServer.start([node.registration], credentials=credentials) as server:
        yield server


@pytest.fixture(params=["prefill", "decode"])
async def node(request: pytest.FixtureRequest) -> Node:
    return Node(request.param)


async def test_a_link_becomes_ready_and_knows_the_workers_capacity(node: Node) -> None:
    async with served(node) as server:
        link = node.link(server)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        if node.role == "prefill":
            await until(lambda: link.credit == 70)
        else:
            assert link.num_free_blocks == 64
            assert link.introduction.address == node.worker.transfer_address
        assert node.changes > 0
        running.cancel()
        await asyncio.wait([running])
        assert not link.is_ready
        # The worker has noticed: nothing of the session is left there.
        await until(lambda: not any(node.worker.ledger().values()))


async def test_a_worker_of_another_model_is_refused_on_both_sides_by_name(node: Node) -> None:
    other = common_pb2.Fingerprint()
    other.CopyFrom(FINGERPRINT)
    other.rope = "other"
    async with served(node) as server:
        link = node.link(server, replace(ROUTER, fingerprint=other))
        async with asyncio.timeout(5):
            await link.run()
        assert link.state == "refused"
        assert link.reason.startswith("rope differs")


async def test_a_router_two_releases_on_is_refused_on_both_sides_by_name(node: Node) -> None:
    newest = SESSION_VERSIONS.newest
    later = replace(ROUTER, versions=Versions(newest + 1, newest + 2), release="9.9")
    async with served(node) as server:
        link = node.link(server, later)
        async with asyncio.timeout(5):
            await link.run()
        assert link.state == "refused"
        assert link.reason.startswith(f"router-0 (release 9.9) speaks versions {newest + 1} to {newest + 2}")


async def test_a_router_of_the_next_release_works_with_this_one(node: Node) -> None:
    newest = SESSION_VERSIONS.newest
    following = replace(ROUTER, versions=Versions(newest, newest + 1), release="9.9")
    async with served(node) as server:
        link = node.link(server, following)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        assert link.status().release == __version__
        running.cancel()
        await asyncio.wait([running])


async def test_a_worker_that_restarted_is_not_taken_for_its_former_self(node: Node) -> None:
    async with served(node) as server:
        link = node.link(server, incarnation=4)
        async with asyncio.timeout(5):
            await link.run()
        assert link.state == "lost"
        assert "has restarted since it registered" in link.reason


async def test_a_dead_worker_is_noticed_at_once(node: Node) -> None:
    async with served(node) as server:
        link = node.link(server)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        await server.stop(0)
        async with asyncio.timeout(1):
            await running
        assert link.state == "lost"


async def test_a_link_with_tls_becomes_ready(node: Node, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    router = replace(authority.issue("router"), server_name="worker.baton")
    async with served(node, authority.issue("worker.baton")) as server:
        link = node.link(server, opener=router.opener())
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        assert (link.state, link.reason) == ("ready", "")
        running.cancel()
        await asyncio.wait([running])


async def test_a_router_that_a_worker_does_not_let_in_says_why(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Authority(tmp_path).issue("127.0.0.1")
    stranger = Authority(tmp_path, "stranger").issue("router")
    reasons = {
        open_channel: "a port with TLS does so to a peer without it, or without a certificate that it trusts",
        stranger.opener(): "its certificate does not pass the check against tls_ca",
    }
    async with served(node, worker) as server:
        for opener, reason in reasons.items():
            link = node.link(server, opener=opener)
            async with asyncio.timeout(5):
                await link.run()
            assert link.state == "lost"
            assert reason in link.reason
            assert caplog.records[-1].msg["event"] == "worker lost"
            assert reason in caplog.records[-1].msg["reason"]
