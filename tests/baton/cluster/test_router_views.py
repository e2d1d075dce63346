"""Who has to be waited for, as the routers see it."""

from __future__ import annotations

import pytest

from baton.cluster.router_views import RouterViews, missing
from baton.errors import Unavailable
from baton.rpc import open_channel
from baton.v1 import common_pb2
from baton.v1.admin_service_pb2 import GetClusterStatusResponse, PairState, WorkerStatus

NAMES = ("prefill-0", "decode-0")
DECODE = WorkerStatus(name="decode-0", role=common_pb2.ROLE_DECODE, state="ready")


def prefill(*pairs: PairState) -> WorkerStatus:
    return WorkerStatus(name="prefill-0", role=common_pb2.ROLE_PREFILL, state="ready", pairs=pairs)


def view(*workers: WorkerStatus) -> GetClusterStatusResponse:
    return GetClusterStatusResponse(router="router-0", workers=workers)


PAIRED = prefill(PairState(worker="decode-0", transport="shm"))


def test_everybody_is_there() -> None:
    assert missing({"router-0": view(DECODE, PAIRED)}, NAMES) == frozenset()


def test_a_router_that_does_not_answer_is_waited_for() -> None:
    views = {"router-0": view(DECODE, PAIRED), "router-1": None}
    assert missing(views, NAMES) == {"router-1"}
    assert missing({"router-0": None}, NAMES) == {"router-0", *NAMES}


def test_what_one_of_two_routers_lacks_is_waited_for() -> None:
    views = {"router-0": view(DECODE, PAIRED), "router-1": view(PAIRED)}
    assert missing(views, NAMES) == {"decode-0"}


@pytest.mark.parametrize(
    "pairs", [[], [PairState(worker="decode-0", reason="not tried yet")]], ids=["none", "not-yet"]
)
def test_a_prefill_worker_without_a_way_for_kv_is_waited_for(pairs: list[PairState]) -> None:
    assert missing({"router-0": view(DECODE, prefill(*pairs))}, NAMES) == {"prefill-0"}


def test_a_refused_worker_ends_the_wait() -> None:
    refused = WorkerStatus(name="decode-0", state="refused", reason="num_layers differs")
    with pytest.raises(Unavailable, match="router-0 refused decode-0: num_layers differs"):
        missing({"router-0": view(refused)}, NAMES)


def test_so_does_a_pair_that_can_never_be() -> None:
    reason = "kv_checksum is xxh3 at prefill-0 and none at decode-0; set it alike on both"
    pair = PairState(worker="decode-0", reason=reason, code="INCOMPATIBLE_PEER")
    with pytest.raises(Unavailable, match=f"from prefill-0 to decode-0: {reason}"):
        missing({"router-0": view(DECODE, prefill(pair))}, NAMES)
    # One that is not reached yet is another matter.
    pair.code = "PEER_LOST"
    assert missing({"router-0": view(DECODE, prefill(pair))}, NAMES) == {"prefill-0"}


async def test_nobody_behind_an_address_is_no_view() -> None:
    views = RouterViews({"router-0": "127.0.0.1:1"}, open_channel)
    assert await views.look() == {"router-0": None}
