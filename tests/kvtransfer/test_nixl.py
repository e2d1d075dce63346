"""One-sided writes: the agents, their thread, and how little they say."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import psutil
import pytest

from baton.errors import PeerLost
from kvtransfer.transports import nixl
from kvtransfer.transports.nixl import NixlSource, NixlTarget, is_installed
from tests.kvtransfer.rig import until

needs_nixl = pytest.mark.skipif(not is_installed(), reason="nixl is not installed")

_WORKER = """
import asyncio, sys
import numpy as np
from baton.logs import configure_logging
from kvtransfer.transports import nixl
from kvtransfer.transports.nixl import NixlSource, NixlTarget

async def main():
    theirs, ours = np.zeros(4096, np.uint8), np.full(4096, 7, np.uint8)
    target = await NixlTarget.start("quiet-target", theirs)
    source = await NixlSource.start("quiet-source", ours)
    peer = await source.meet(target.metadata, target.base_address, "quiet-target")
    await source.write(peer, [(ours.ctypes.data, 4096)], [(target.base_address, 4096)])
    assert (theirs == 7).all()
    source.close()
    await source.ended()
    target.close()

configure_logging("prefill-0", "info")
asyncio.run(main())
"""


@asynccontextmanager
async def agents(name: str, num_bytes: int) -> AsyncIterator[tuple[NixlTarget, NixlSource, str]]:
    """A target of zeros and a source of counted bytes, connected."""
    ours = (np.arange(num_bytes) % 251).astype(np.uint8)
    target = await NixlTarget.start(f"target-{name}", np.zeros(num_bytes, np.uint8))
    source = await NixlSource.start(f"source-{name}", ours)
    try:
        yield target, source, await source.meet(target.metadata, target.base_address, f"target-{name}")
    finally:
        source.close()
        await until(lambda: not [thread for thread in threading.enumerate() if thread.name == "kv-nixl"])
        target.close()


@needs_nixl
def test_the_library_says_nothing_in_a_worker() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "NIXL_"))}
    done = subprocess.run(
        [sys.executable, "-c", _WORKER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_nixl
def test_what_the_library_has_to_say_goes_where_the_workers_logs_go(caplog: pytest.LogCaptureFixture) -> None:
    NixlTarget("logs", np.zeros(64, np.uint8)).close()
    logging.getLogger("nixl.test").error("a cable is missing")
    assert "a cable is missing" in caplog.text
    assert logging.getLogger("nixl").handlers == []


@needs_nixl
async def test_agents_that_have_nothing_to_do_use_no_processor() -> None:
    async with agents("idle", 4096):
        began = time.process_time()
        await asyncio.sleep(0.5)
        # A thread that never sleeps would use half a second, or its share of a busy machine.
        assert time.process_time() - began < 0.1


@needs_nixl
async def test_closed_agents_leave_no_thread() -> None:
    process = psutil.Process()
    NixlTarget("warm", np.zeros(64, np.uint8)).close()  # the library has loaded what it needs
    before = process.num_threads()
    target, source = NixlTarget("a", np.zeros(64, np.uint8)), NixlSource("b", np.zeros(64, np.uint8))
    assert process.num_threads() > before
    for _ in range(2):
        source.close()
        target.close()
    await until(lambda: process.num_threads() <= before)


@needs_nixl
async def test_pieces_land_where_they_are_written_to() -> None:
    async with agents("pieces", 4096) as (target, source, peer):
        ours = int(source._memory.ctypes.data)
        await source.write(
            peer,
            [(ours + 10, 100), (ours + 1000, 7)],
            [(target.base_address + 500, 100), (target.base_address + 4089, 7)],
        )
        expected = np.zeros(4096, np.uint8)
        expected[500:600] = source._memory[10:110]
        expected[4089:] = source._memory[1000:1007]
        assert (target._memory == expected).all()


@needs_nixl
async def test_closing_lets_the_writes_under_way_end_and_takes_no_more() -> None:
    size = 8 << 20
    async with agents("closing", size) as (target, source, peer):
        ours = int(source._memory.ctypes.data)
        writes = [source.write(peer, [(ours, size)], [(target.base_address, size)]) for _ in range(4)]
        source.close()
        late = source.write(peer, [(ours, 1)], [(target.base_address, 1)])
        with pytest.raises(PeerLost, match="the sender is closing"):
            await asyncio.wait_for(late, 5)
        assert await asyncio.wait_for(asyncio.gather(*writes), 10) == [None] * 4
        assert (target._memory == source._memory).all()
        source.close()


@needs_nixl
async def test_a_write_outside_the_registered_memory_is_peer_lost_and_the_next_one_goes_through() -> None:
    async with agents("outside", 4096) as (target, source, peer):
        ours = int(source._memory.ctypes.data)
        for local, remote in (
            ((ours, 4096), (target.base_address + 1, 4096)),
            ((ours + 1, 4096), (target.base_address, 4096)),
        ):
            with pytest.raises(PeerLost, match="the NIXL write failed"):
                await asyncio.wait_for(source.write(peer, [local], [remote]), 5)
        await source.write(peer, [(ours, 4096)], [(target.base_address, 4096)])
        assert (target._memory == source._memory).all()


@needs_nixl
async def test_a_receiver_that_cannot_be_met_is_peer_lost() -> None:
    async with agents("unmet", 64) as (target, source, peer):
        with pytest.raises(PeerLost, match="it calls itself target-unmet"):
            await source.meet(target.metadata, target.base_address, "target-other")
        for metadata in (b"", b"nonsense", target.metadata[:-7]):
            with pytest.raises(PeerLost, match="NIXL cannot connect"):
                await source.meet(metadata, target.base_address, "target-unmet")
        with pytest.raises(PeerLost, match="NIXL cannot connect"):
            await source.meet(target.metadata, target.base_address + 64, "target-unmet")
        await source.forget("nobody")
        await source.forget(peer)
        with pytest.raises(PeerLost):
            await source.write(peer, [(int(source._memory.ctypes.data), 1)], [(target.base_address, 1)])


class SlowAgent:
    """The library's agent, with transfers that end when and as a test says."""

    def __init__(self) -> None:
        self.began: list[tuple[str, list[tuple[int, ...]], list[tuple[int, ...]]]] = []
        self.states: dict[int, str] = {}
        self.released: list[int] = []
        self.is_registered = True

    def get_xfer_descs(self, pieces: list[tuple[int, ...]], _kind: str) -> list[tuple[int, ...]]:
        return pieces

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def initialize_xfer(self, operation: str, local: Any, remote: Any, _peer: str, _message: bytes) -> int:
        self.began.append((operation, local, remote))
        return len(self.began) - 1

    def transfer(self, handle: int) -> None:
        self.states.setdefault(handle, "PROC")

    def check_xfer_state(self, handle: int) -> str:
        if self.states[handle] == "RAISES":
            raise RuntimeError("the library is at a loss")
        return self.states[handle]

    def release_xfer_handle(self, handle: int) -> None:
        self.released.append(handle)

    def deregister_memory(self, _registered: object) -> None:
        self.is_registered = False


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowAgent:
    agent = SlowAgent()
    monkeypatch.setattr(nixl, "_agent", lambda *_: (agent, None))
    return agent


async def test_a_receiver_is_met_when_a_byte_of_its_memory_has_been_read(slow: SlowAgent) -> None:
    source = NixlSource("source", np.zeros(64, np.uint8))
    meeting = asyncio.create_task(source.meet(b"peer", 4000, "peer"))
    await until(lambda: 0 in slow.states)
    ((operation, _, remote),) = slow.began
    assert (operation, remote) == ("READ", [(4000, 1, 0)])
    for _ in range(20):
        await asyncio.sleep(0)
    assert not meeting.done()
    slow.states[0] = "DONE"
    assert await asyncio.wait_for(meeting, 5) == "peer"
    assert slow.released == [0]
    source.close()


async def test_a_receiver_that_never_answers_is_peer_lost(
    slow: SlowAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "_MEET_S", 0.05)
    source = NixlSource("source", np.zeros(64, np.uint8))
    with pytest.raises(PeerLost, match="NIXL cannot connect: no answer"):
        await asyncio.wait_for(source.meet(b"peer", 4000, "peer"), 5)
    source.close()


async def test_the_cache_stays_registered_until_the_last_write_has_ended(slow: SlowAgent) -> None:
    source = NixlSource("source", np.zeros(64, np.uint8))
    writes = [source.write("peer", [(1, 2)], [(3, 2)]) for _ in range(4)]
    await until(lambda: len(slow.states) == 4)
    source.close()
    ends = ["DONE", "ERR", "RAISES", "DONE"]
    for handle, end in enumerate(ends):
        assert not writes[handle].done()
        assert slow.is_registered
        slow.states[handle] = end
        await until(writes[handle].done)
    assert [write.exception() is None for write in writes] == [end == "DONE" for end in ends]
    with pytest.raises(PeerLost, match="the NIXL write failed: ERR"):
        await writes[1]
    with pytest.raises(PeerLost, match="the NIXL write failed: the library is at a loss"):
        await writes[2]
    await until(lambda: not slow.is_registered)
    assert slow.released == [0, 1, 2, 3]
