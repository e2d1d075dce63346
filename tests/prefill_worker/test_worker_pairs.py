"""Pairs as routers see them: what their sessions tell, and what comes of an attempt without one."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import BatonError, IncompatiblePeer, PeerLost
from kvtransfer.contract import Pairing, Peer
from tests.fakes import until
from tests.played_router import PrefillDown, routing
from tests.prefill_worker.test_worker import A, rig


async def test_every_router_that_names_a_decode_worker_hears_how_it_is_reached() -> None:
    async with rig() as r, routing(r.worker, PrefillDown, "router-1") as other:
        other.send(pair={"worker": "decode-0", "incarnation": 2, "address": r.decode.transfer_address})
        for kind in ("hello", "capacity"):
            await other.next(kind)
        status = await other.next("pair_status")
        assert (status.incarnation, status.transport, status.note) == (2, "memory", "")
        r.network.on_changed(2, Pairing(transport="grpc", note="the adapter reports an error"))
        await r.router.next("credit_reclaim")
        for router in (r.router, other):
            status = await router.next("pair_status")
            assert (status.transport, status.note) == ("grpc", "the adapter reports an error")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PeerLost("decode-9 does not answer"), "PEER_LOST"),
        (IncompatiblePeer("num_layers differs", field="num_layers"), "INCOMPATIBLE_PEER"),
    ],
)
async def test_a_router_hears_why_a_decode_worker_is_not_reached(
    error: BatonError, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig() as r:

        async def fail(peer: Peer) -> Pairing:
            raise error

        monkeypatch.setattr(r.network, "pair", fail)
        r.router.send(pair={"worker": "decode-9", "incarnation": 9, "address": "nowhere"})
        status = await r.router.next("pair_status")
        assert (status.incarnation, status.transport) == (9, "")
        assert (status.failure.code, status.failure.message) == (code, error.message)
        assert status.failure.field == (error.field or "")
        r.router.send(part={"incarnation": 9})
        await until(lambda: len(r.worker._pairs) == 1)


async def test_an_attempt_at_a_decode_worker_that_was_parted_fails_and_holds_nothing() -> None:
    async with rig() as r:
        r.router.send(part={"incarnation": 2})
        r.prefill(A, list(range(10)))
        await r.router.next("credit_grant")
        await r.router.next("token")
        assert (await r.router.next("ended")).failure.code == "PEER_LOST"
        await until(r.nothing)


async def test_a_router_that_leaves_lets_go_of_its_decode_workers_and_another_keeps_them() -> None:
    async with rig() as r, routing(r.worker, PrefillDown, "router-1") as other:
        other.send(pair={"worker": "decode-0", "incarnation": 2, "address": r.decode.transfer_address})
        for kind in ("hello", "capacity", "pair_status"):
            await other.next(kind)
        await r.router.leave()
        await asyncio.sleep(0)
        assert (len(r.worker._pairs), list(r.network._addresses)) == (1, [2])
        await other.leave()
        await until(lambda: r.network._addresses == {})
        assert len(r.worker._pairs) == 0


async def test_a_decode_worker_that_nobody_answers_for_is_tried_again_until_somebody_does() -> None:
    async with rig() as r:
        r.router.send(pair={"worker": "decode-1", "incarnation": 5, "address": "later"})
        assert (await r.router.next("pair_status")).failure.code == "PEER_LOST"
        r.network.receivers["later"] = r.decode.receiver
        status = await r.router.next("pair_status")
        assert (status.incarnation, status.transport) == (5, "memory")
