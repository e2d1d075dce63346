"""One-sided writes with NIXL: over UCX that is RDMA, NVLink, shared memory or TCP, whatever both ends have.

Owns the agents, the registered memory and the thread that watches writes. Must not know frames'
contents, leases, or which write has which slot.

The package is optional and imported on first use. Its agents answer no wake-up: whether a write
has ended can only be asked, so a thread of its own asks, and only while writes are under way.
Frames are written from where they lie in the sender's cache, without a copy before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.errors import PeerLost, Unavailable
from kvtransfer.contract import OutgoingFrame
from kvtransfer.transports.shm import check_fits

# Between two looks at writes under way; a write of 1 MiB takes some 200 us.
_LOOK_S = 20e-6
# For a receiver to answer when it is met.
_MEET_S = 5.0
# For a write; less than a step of a transfer may take, so that the reason is told and not only the stall.
_WRITE_S = 8.0
# The library's own thread sleeps until something arrives, and so long at most. With 0, which is its
# default, it never sleeps, and a worker that is idle was measured to use a whole core.
_PROGRESS_US = 100_000
_DRAM = "DRAM"


def is_installed() -> bool:
    """Whether the package is there."""
    return find_spec("nixl") is not None


def _agent(name: str, *memory: NDArray[np.uint8]) -> tuple[Any, Any]:
    """A new agent with UCX and the memory registered with it; raises Unavailable if that cannot be had."""
    # UCX and NIXL write to standard output what is of no use to an operator.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        from nixl import _bindings as bindings  # noqa: PLC0415 - optional, and slow to load
        from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415

        # Its logger has a handler of its own; what it says goes where this process's logs go.
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, _PROGRESS_US
        agent = nixl_agent(name, nixl_agent_config(backends=[], enable_prog_thread=False))
        # The only way to set the delay: the wrapper makes its agent with 0.
        agent.agent = bindings.nixlAgent(name, config)
        agent.create_backend("UCX", {})
        return agent, agent.register_memory([_span(area) for area in memory], _DRAM)
    except Exception as error:
        raise Unavailable(f"NIXL cannot be used: {error or type(error).__name__}") from error


class NixlTarget:
    """A receiver's memory, registered. The sender says when a write into it has ended.

    metadata: what a sender needs to reach it.
    base_address: of the memory, in this process.
    """

    def __init__(self, name: str, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._agent, self._registered = _agent(name, memory)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self.base_address = int(memory.ctypes.data)

    @classmethod
    async def start(cls, name: str, memory: NDArray[np.uint8]) -> NixlTarget:
        """One that is made off the event loop: loading the library alone takes a second."""
        return await asyncio.to_thread(cls, name, memory)

    def close(self) -> None:
        """Takes the registration back, and ends the agent with its thread. Idempotent."""
        if self._agent is not None:
            self._agent.deregister_memory(self._registered)
            self._agent = None


@dataclass(frozen=True, slots=True)
class _Write:
    """A write to be posted: local (address, bytes) and where each goes."""

    local: list[tuple[int, int]]
    remote: list[tuple[int, int]]
    peer: str
    done: asyncio.Future[None]
    give_up_at: float


class NixlSource:
    """A sender's agent, its registered cache, and its thread. One per process; close() it.

    memory: all bytes that are ever written from. name: unique among agents that meet.
    """

    def __init__(self, name: str, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._tasted = np.zeros(1, np.uint8)
        self._agent, self._registered = _agent(name, memory, self._tasted)
        self._is_closed = False
        self._uses: Counter[str] = Counter()
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="kv-nixl", daemon=True)
        self._thread.start()

    @classmethod
    async def start(cls, name: str, memory: NDArray[np.uint8]) -> NixlSource:
        """One that is made off the event loop."""
        return await asyncio.to_thread(cls, name, memory)

    async def meet(self, metadata: bytes, base_address: int, expected: str) -> str:
        """Connects to a receiver and returns its name here; raises PeerLost if that fails, or if the
        metadata is not that of the expected agent.

        One byte is read from base_address: only a first use sets a connection up, which takes as long as
        many writes, and shows that the way is open at all.
        """
        return await asyncio.to_thread(self._meet, metadata, base_address, expected)

    def _meet(self, metadata: bytes, base_address: int, expected: str) -> str:
        try:
            with self._lock:
                name = self._agent.add_remote_agent(metadata)
                peer: str = name.decode() if isinstance(name, bytes) else name
                self._uses[peer] += 1
        except Exception as error:
            raise PeerLost(f"NIXL cannot connect: {error}") from error
        try:
            if peer != expected:
                raise PeerLost(f"it calls itself {peer}")
            with self._lock:
                handle = self._begin("READ", [(self._tasted.ctypes.data, 1)], [(base_address, 1)], peer)
            self._until_done(handle)
        except Exception as error:
            self._forget(peer)
            raise PeerLost(f"NIXL cannot connect: {error}") from error
        return peer

    def _until_done(self, handle: Any) -> None:
        give_up_at = time.monotonic() + _MEET_S
        state = "PROC"
        while state == "PROC" and time.monotonic() < give_up_at:
            time.sleep(_LOOK_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        self._release(handle)
        if state != "DONE":
            raise PeerLost("no answer" if state == "PROC" else state)

    def _begin(
        self, operation: str, local: list[tuple[int, int]], remote: list[tuple[int, int]], peer: str
    ) -> Any:
        """Starts to move bytes between pieces (address, bytes) here and there; the caller has the lock."""
        ours = self._agent.get_xfer_descs([(*piece, 0) for piece in local], _DRAM)
        theirs = self._agent.get_xfer_descs([(*piece, 0) for piece in remote], _DRAM)
        handle = self._agent.initialize_xfer(operation, ours, theirs, peer, b"")
        self._agent.transfer(handle)
        return handle

    async def forget(self, peer: str) -> None:
        """Drops a receiver once nobody who met it needs it any more; unknown ones are ignored."""
        await asyncio.to_thread(self._forget, peer)

    def _forget(self, peer: str) -> None:
        with self._lock, contextlib.suppress(Exception):
            self._uses[peer] -= 1
            if self._uses[peer] <= 0:
                del self._uses[peer]
                self._agent.remove_remote_agent(peer)

    def write(
        self, peer: str, local: list[tuple[int, int]], remote: list[tuple[int, int]]
    ) -> asyncio.Future[None]:
        """Writes pieces (address, bytes) to addresses of a peer.

        The future is done when nothing is on its way any more, PeerLost if the write failed.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        write = _Write(local, remote, peer, done, time.monotonic() + _WRITE_S)
        if self._is_closed:
            _fail(write, "the sender is closing")
        else:
            self._writes.put(write)
        return done

    def close(self) -> None:
        """Ends the thread after the writes under way. Idempotent."""
        self._is_closed = True
        self._writes.put(None)

    async def ended(self) -> None:
        """Returns when the thread has ended; the library aborts a process that exits before."""
        await asyncio.to_thread(self._thread.join, _WRITE_S)

    def _work(self) -> None:
        running: list[tuple[Any, _Write]] = []
        is_open = True
        while is_open or running:
            try:
                write = self._writes.get(block=not running)
                if write is None:
                    is_open = False
                else:
                    self._post(write, running)
            except queue.Empty:
                time.sleep(_LOOK_S)
            running = [entry for entry in running if not self._has_ended(*entry)]
        with self._lock:
            self._agent.deregister_memory(self._registered)
            self._agent = None

    def _post(self, write: _Write, running: list[tuple[Any, _Write]]) -> None:
        try:
            with self._lock:
                handle = self._begin("WRITE", write.local, write.remote, write.peer)
            running.append((handle, write))
        except Exception as error:  # noqa: BLE001 - the library's errors share no class
            _fail(write, str(error))

    def _has_ended(self, handle: Any, write: _Write) -> bool:
        try:
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001 - the library's errors share no class
            state = str(error)
        if state == "PROC" and time.monotonic() < write.give_up_at:
            return False
        if state == "DONE":
            _settle(write, None)
        else:
            _fail(write, f"no end within {_WRITE_S:g} s" if state == "PROC" else state)
        # It gives up what has not ended. Should bytes come late all the same, they land in slots that are
        # quarantined: of a write that failed nobody says that it is quiet.
        self._release(handle)
        return True

    def _release(self, handle: Any) -> None:
        with self._lock, contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)


class NixlCarrier:
    """Writes payloads into the slots of one receiver: a Carrier."""

    num_slots = 16

    def __init__(self, source: NixlSource, peer: str, base_address: int, slot_bytes: int) -> None:
        self._source = source
        self._peer = peer
        self._base_address = base_address
        self._slot_bytes = slot_bytes

    def fill(self, slots: Sequence[int], frames: Sequence[OutgoingFrame]) -> list[bytes]:
        """The headers; the payloads are written from where they lie."""
        for _slot, frame in zip(slots, frames, strict=True):
            check_fits(frame, self._slot_bytes)
        return [frame.header() for frame in frames]

    async def deliver(self, slots: Sequence[int], frames: Sequence[OutgoingFrame]) -> None:
        """Writes every frame to its slot."""
        local, remote = [], []
        for slot, frame in zip(slots, frames, strict=True):
            address = self._base_address + slot * self._slot_bytes
            for run in frame.runs():
                local.append((np.frombuffer(run, np.uint8).ctypes.data, run.nbytes))
                remote.append((address, run.nbytes))
                address += run.nbytes
        await self._source.write(self._peer, local, remote)

    async def close(self) -> None:
        """Drops the receiver."""
        await self._source.forget(self._peer)


def _span(memory: NDArray[np.uint8]) -> tuple[int, int, int, str]:
    return (int(memory.ctypes.data), memory.nbytes, 0, "")


def _fail(write: _Write, reason: str) -> None:
    _settle(write, PeerLost(f"the NIXL write failed: {reason}"))


def _settle(write: _Write, error: PeerLost | None) -> None:
    def settle() -> None:
        if write.done.done():
            return
        if error is None:
            write.done.set_result(None)
        else:
            write.done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        write.done.get_loop().call_soon_threadsafe(settle)
