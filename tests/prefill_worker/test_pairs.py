"""Pairs: a decode worker is reached once for all routers that name it, again if need be, and then let go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from baton.errors import BatonError, IncompatiblePeer, PeerLost
from kvtransfer.contract import KvWriter, Pairing, Peer, Ticket, TransferTarget
from prefill_worker.pairs import Pairs, PairState
from tests.fakes import until
from tests.simulation.virtual_loop import VirtualLoop

DECODE = Peer(worker="decode-0", incarnation=7, address="10.0.0.1:5")
OTHER = Peer(worker="decode-1", incarnation=8, address="10.0.0.2:5")
SHM = Pairing(transport="shm")
LOST = PeerLost("decode-0 does not answer")
REFUSED = IncompatiblePeer("num_layers differs", field="num_layers")


@dataclass
class PlayedTransport:
    """A KvTransport whose pairings a test answers, or plans ahead.

    outcomes: of the next pairings, in order; SHM when there are none left. tries: when each was begun.
    """

    outcomes: list[Pairing | Exception] = field(default_factory=list)
    tries: list[float] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    may_pair: asyncio.Event = field(default_factory=asyncio.Event)
    may_part: asyncio.Event = field(default_factory=asyncio.Event)
    part_error: Exception | None = None
    on_changed: Callable[[int, Pairing], None] = lambda _incarnation, _pairing: None

    def __post_init__(self) -> None:
        self.may_pair.set()
        self.may_part.set()

    async def pair(self, peer: Peer) -> Pairing:
        self.tries.append(asyncio.get_running_loop().time())
        self.calls.append(f"pair {peer.incarnation}")
        await self.may_pair.wait()
        outcome = self.outcomes.pop(0) if self.outcomes else SHM
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def part(self, incarnation: int) -> None:
        self.calls.append(f"part {incarnation}")
        await self.may_part.wait()
        if self.part_error is not None:
            raise self.part_error

    def open(self, ticket: Ticket, target: TransferTarget) -> AbstractAsyncContextManager[KvWriter]:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


@dataclass
class Rig:
    transport: PlayedTransport
    told: list[tuple[int, int, PairState]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pairs = Pairs(self.transport, random.Random(3), lambda *news: self.told.append(news))

    async def hears(self, *news: tuple[int, int, PairState]) -> None:
        """Waits for exactly that."""
        await until(lambda: len(self.told) >= len(news))
        assert self.told == list(news)
        self.told.clear()


@asynccontextmanager
async def rig(*outcomes: Pairing | Exception) -> AsyncIterator[Rig]:
    """Whatever happens, no task is left once no router names anybody."""
    before = asyncio.all_tasks()
    made = Rig(PlayedTransport(list(outcomes)))
    yield made
    for session_id in range(3):
        made.pairs.leave(session_id)
    assert len(made.pairs) == 0
    await until(lambda: asyncio.all_tasks() == before)
    assert made.pairs._parting == {}


async def test_a_router_hears_of_a_pair_as_soon_as_there_is_one_and_not_before() -> None:
    async with rig() as r:
        r.transport.may_pair.clear()
        r.pairs.meet(0, DECODE)
        await until(lambda: r.transport.calls == ["pair 7"])
        assert r.told == []
        r.transport.may_pair.set()
        await r.hears((0, 7, SHM))


async def test_a_second_router_hears_at_once_and_nobody_is_asked_again() -> None:
    async with rig() as r:
        r.pairs.meet(0, DECODE)
        await r.hears((0, 7, SHM))
        r.pairs.meet(1, DECODE)
        assert r.told == [(1, 7, SHM)]
        assert r.transport.calls == ["pair 7"]


async def test_routers_that_name_it_while_it_is_reached_all_hear_of_it() -> None:
    async with rig() as r:
        r.transport.may_pair.clear()
        r.pairs.meet(1, DECODE)
        r.pairs.meet(0, DECODE)
        r.pairs.meet(0, OTHER)
        r.transport.may_pair.set()
        await r.hears((0, 7, SHM), (1, 7, SHM), (0, 8, SHM))
        assert r.transport.calls == ["pair 7", "pair 8"]


async def test_a_refused_pair_is_told_and_not_tried_again() -> None:
    async with rig(REFUSED) as r:
        r.pairs.meet(0, DECODE)
        await r.hears((0, 7, REFUSED))
        r.pairs.meet(1, DECODE)
        assert r.told == [(1, 7, REFUSED)]
        # All that could still be tried is waiting for its end.
        (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "pair-decode-0"]
        await asyncio.sleep(0)
        assert (task.done(), r.transport.calls) == (False, ["pair 7"])


def test_what_cannot_be_reached_is_tried_with_growing_pauses_until_it_can() -> None:
    errors: list[BatonError] = [LOST] * 8
    loop = VirtualLoop()

    async def run() -> Rig:
        r = Rig(PlayedTransport([*errors]))
        r.pairs.meet(0, DECODE)
        while len(r.told) < 9:
            await asyncio.sleep(0.01)
        r.pairs.leave(0)
        await asyncio.sleep(60)
        return r

    try:
        r = loop.run_until_complete(run())
    finally:
        loop.close()
    assert r.told == [(0, 7, error) for error in errors] + [(0, 7, SHM)]
    tries = r.transport.tries
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    # From a tenth of a second, doubled each time up to two; each between half of that and all of it.
    longest = [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert all(0.5 * most <= pause <= most for pause, most in zip(pauses, longest, strict=True))
    assert len({pause / most for pause, most in zip(pauses, longest, strict=True)}) == 8


async def test_a_pair_ends_when_the_last_router_has_parted_or_left() -> None:
    async with rig() as r:
        r.pairs.meet(0, DECODE)
        r.pairs.meet(1, DECODE)
        r.pairs.meet(2, DECODE)
        await r.hears((0, 7, SHM), (1, 7, SHM), (2, 7, SHM))
        r.pairs.part(0, 7)
        r.pairs.part(0, 7)
        r.pairs.leave(1)
        await asyncio.sleep(0)
        assert (len(r.pairs), r.transport.calls) == (1, ["pair 7"])
        r.pairs.part(2, 7)
        assert len(r.pairs) == 0
        await until(lambda: r.transport.calls == ["pair 7", "part 7"])
        # Unknown by now.
        r.pairs.part(2, 7)
        r.pairs.leave(2)
        assert r.told == []


async def test_a_router_that_leaves_lets_go_of_all_its_decode_workers_and_of_no_others() -> None:
    async with rig() as r:
        r.pairs.meet(0, DECODE)
        r.pairs.meet(0, OTHER)
        r.pairs.meet(1, OTHER)
        await until(lambda: len(r.told) == 3)
        r.pairs.leave(0)
        await until(lambda: "part 7" in r.transport.calls)
        assert (len(r.pairs), "part 8" in r.transport.calls) == (1, False)


@pytest.mark.parametrize("stage", ["pairing", "pausing", "refused"])
async def test_a_pair_that_was_never_reached_is_let_go_all_the_same(stage: str) -> None:
    outcomes = {"pairing": [], "pausing": [LOST], "refused": [REFUSED]}[stage]
    async with rig(*outcomes) as r:
        if stage == "pairing":
            r.transport.may_pair.clear()
        r.pairs.meet(0, DECODE)
        await until(lambda: bool(r.told or (stage == "pairing" and r.transport.calls)))
        r.pairs.part(0, 7)
        await until(lambda: r.transport.calls == ["pair 7", "part 7"])
        assert len(r.told) == (0 if stage == "pairing" else 1)


async def test_what_is_named_again_while_it_is_let_go_is_reached_anew_afterwards() -> None:
    async with rig() as r:
        r.transport.may_part.clear()
        r.pairs.meet(0, DECODE)
        await r.hears((0, 7, SHM))
        r.pairs.part(0, 7)
        await until(lambda: r.transport.calls == ["pair 7", "part 7"])
        r.pairs.meet(1, DECODE)
        await until(lambda: len(asyncio.all_tasks()) == 3)
        await asyncio.sleep(0)
        # Not before the old connection is gone: what is parted last would be the new one.
        assert (r.transport.calls, r.told) == (["pair 7", "part 7"], [])
        r.transport.may_part.set()
        await r.hears((1, 7, SHM))
        assert r.transport.calls == ["pair 7", "part 7", "pair 7"]


@pytest.mark.parametrize("has_begun", [True, False])
async def test_what_is_let_go_twice_while_it_is_let_go_is_never_held_by_two(has_begun: bool) -> None:
    async with rig() as r:
        r.transport.may_part.clear()
        r.pairs.meet(0, DECODE)
        await r.hears((0, 7, SHM))
        for _ in range(2):
            r.pairs.part(0, 7)
            await until(lambda: "part 7" in r.transport.calls)
            r.pairs.meet(0, DECODE)
            for _ in range(has_begun):
                await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert r.transport.calls == ["pair 7", "part 7"]
        r.transport.may_part.set()
        await r.hears((0, 7, SHM))
        assert r.transport.calls == ["pair 7", "part 7", "pair 7"]


async def test_a_pair_whose_end_fails_is_logged_and_can_be_met_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig() as r:
        r.transport.part_error = RuntimeError("the memory is gone")
        r.pairs.meet(0, DECODE)
        await r.hears((0, 7, SHM))
        r.pairs.part(0, 7)
        await until(lambda: "the memory is gone" in caplog.text)
        r.transport.part_error = None
        r.pairs.meet(0, DECODE)
        await r.hears((0, 7, SHM))
        assert r.transport.calls == ["pair 7", "part 7", "pair 7"]


async def test_a_pair_that_fails_for_no_known_reason_is_logged_and_told_and_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig(ZeroDivisionError("a defect")) as r:
        r.pairs.meet(0, DECODE)
        await until(lambda: bool(r.told))
        ((session_id, incarnation, state),) = r.told
        assert (session_id, incarnation, str(state)) == (0, 7, "pairing with decode-0 failed")
        assert "a defect" in caplog.text
        assert r.transport.calls == ["pair 7", "part 7"]
        # It can be let go, and met anew.
        r.pairs.part(0, 7)
        r.told.clear()
        r.pairs.meet(0, DECODE)
        await r.hears((0, 7, SHM))


async def test_a_pair_that_goes_over_to_another_transport_is_told_to_all_its_routers() -> None:
    slower = Pairing(transport="grpc", note="the adapter reports an error")
    async with rig() as r:
        r.pairs.meet(0, DECODE)
        r.pairs.meet(1, DECODE)
        await r.hears((0, 7, SHM), (1, 7, SHM))
        r.transport.on_changed(7, slower)
        await r.hears((0, 7, slower), (1, 7, slower))
        r.pairs.meet(2, DECODE)
        assert r.told == [(2, 7, slower)]
        # Of one that nobody names any more, nobody hears.
        r.transport.on_changed(8, slower)
        assert len(r.told) == 1


async def test_a_pair_in_which_nobody_was_there_is_made_anew() -> None:
    lost = PeerLost("cannot connect to decode-0")
    async with rig() as r:
        r.pairs.meet(0, DECODE)
        await r.hears((0, 7, SHM))
        r.pairs.doubt(7, "shm", lost)
        await r.hears((0, 7, lost), (0, 7, SHM))
        assert r.transport.calls == ["pair 7", "part 7", "pair 7"]
        # Of one that cannot be reached already, and of strangers, this is no news.
        r.transport.may_pair.clear()
        r.pairs.doubt(7, "shm", lost)
        r.pairs.doubt(7, "shm", lost)
        r.pairs.doubt(8, "shm", lost)
        assert r.told == [(0, 7, lost)]
        r.transport.may_pair.set()


async def test_a_pair_is_not_made_anew_for_a_transport_that_it_has_left() -> None:
    slower = Pairing(transport="grpc", note="the adapter reports an error")
    async with rig() as r:
        r.pairs.meet(0, DECODE)
        await r.hears((0, 7, SHM))
        r.transport.on_changed(7, slower)
        r.pairs.doubt(7, "shm", PeerLost("the adapter reports an error"))
        await r.hears((0, 7, slower))
        assert r.transport.calls == ["pair 7"]
