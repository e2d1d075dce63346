"""What two workers compare when they are paired, and what they say of what differs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from baton.errors import IncompatiblePeer
from baton.identity import Identity
from baton.v1 import common_pb2
from baton.v1.kv_transfer_service_pb2 import PairRequest, PairResponse
from baton.versions import Versions
from kvtransfer.contract import Committed
from kvtransfer.transports import client as client_module
from kvtransfer.transports import service
from kvtransfer.transports.service import KvService
from tests.kvtransfer.rig import make_rig
from tests.kvtransfer.stage import (
    SMALL,
    receiving,
    reserve,
    send,
    sending,
)

torch.set_num_threads(1)


@pytest.mark.parametrize("has_digests", [True, False])
async def test_another_checksum_is_refused_by_name(has_digests: bool, tmp_path: Path) -> None:
    rig = make_rig()
    rig.receiver.has_digests = not has_digests
    async with (
        receiving(rig, tmp_path) as receiver,
        sending(rig, tmp_path, "auto", has_digests=has_digests) as client,
    ):
        theirs, ours = ("none", "xxh3") if has_digests else ("xxh3", "none")
        with pytest.raises(
            IncompatiblePeer, match=f"kv_checksum is {ours} at prefill-0 and {theirs} at decode-0"
        ) as caught:
            await client.pair(receiver.peer)
        assert caught.value.field == "kv_checksum"
        assert client.num_connections == 0


async def test_without_checksums_on_both_sides_transfers_commit(tmp_path: Path) -> None:
    rig = make_rig()
    rig.receiver.has_digests = False
    async with (
        receiving(rig, tmp_path) as receiver,
        sending(rig, tmp_path, "shm", has_digests=False) as client,
    ):
        await client.pair(receiver.peer)
        lease = reserve(rig)
        config = dataclasses.replace(SMALL, has_digests=False)
        assert (await send(rig.sender(client, config), rig, lease)).outcome == Committed()
        assert rig.has_all(lease, lease.block_ids)


@pytest.mark.parametrize("checks", ["receiver", "sender"])
async def test_another_model_is_refused_by_name_on_both_sides(
    checks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    if checks == "sender":  # the receiver is of a release that compares less

        def trusting(self: Identity, peer: common_pb2.Hello) -> None:
            if peer.name != "prefill-0":
                check(self, peer)

        check = Identity.check
        monkeypatch.setattr(Identity, "check", trusting)
    async with (
        receiving(rig, tmp_path, fingerprint=common_pb2.Fingerprint(weights_id="a")) as receiver,
        sending(rig, tmp_path, "auto", fingerprint=common_pb2.Fingerprint(weights_id="b")) as client,
    ):
        with pytest.raises(IncompatiblePeer, match="weights_id differs") as caught:
            await client.pair(receiver.peer)
        assert caught.value.field == "weights_id"
        assert "decode-0 has 'a'" in caught.value.message
        assert "prefill-0 has 'b'" in caught.value.message
        assert client.num_connections == 0


async def test_a_format_that_the_receiver_does_not_know_is_refused_for_good(tmp_path: Path) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver, sending(rig, tmp_path, "auto") as client:
        client._format = dataclasses.replace(client._format, block_size=1 << 16)
        with pytest.raises(IncompatiblePeer, match="block_size is 65536") as caught:
            await client.pair(receiver.peer)
        assert caught.value.field == "block_size"


@pytest.mark.parametrize(
    ("sender", "receiver_speaks"), [((2, 3), (1, 2)), ((1, 2), (2, 3)), ((1, 1), (1, 2))]
)
async def test_neighboring_releases_pair_and_transfer(
    sender: tuple[int, int],
    receiver_speaks: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speak(monkeypatch, sender, receiver_speaks)
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver, sending(rig, tmp_path, "auto") as client:
        await client.pair(receiver.peer)
        assert (await send(rig.sender(client, SMALL), rig, reserve(rig))).outcome == Committed()


async def test_releases_too_far_apart_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak(monkeypatch, (1, 2), (3, 4))
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver, sending(rig, tmp_path, "auto") as client:
        with pytest.raises(
            IncompatiblePeer, match=r"prefill-0 speaks versions 1 to 2 .* this process versions 3 to 4"
        ) as caught:
            await client.pair(receiver.peer)
        assert caught.value.field == "transfer_version"


class FutureService(KvService):
    """Chooses a version that nobody has offered."""

    async def pair(self, request: PairRequest, _context: object) -> PairResponse:
        response = await super().pair(request, _context)
        response.version = 99
        return response


async def test_an_answer_in_a_version_that_the_sender_does_not_speak_is_refused(tmp_path: Path) -> None:
    rig = make_rig()
    async with (
        receiving(rig, tmp_path, kind=FutureService) as receiver,
        sending(rig, tmp_path, "auto") as client,
    ):
        with pytest.raises(IncompatiblePeer, match="decode-0 speaks version 99 of") as caught:
            await client.pair(receiver.peer)
        assert caught.value.field == "transfer_version"


def speak(monkeypatch: pytest.MonkeyPatch, sender: tuple[int, int], receiver: tuple[int, int]) -> None:
    for module, (oldest, newest) in ((client_module, sender), (service, receiver)):
        monkeypatch.setattr(module, "TRANSFER_VERSIONS", Versions(oldest, newest))
