"""A NIXL write without Baton: between registered buffers of two processes, over UCX.

Owns one agent here and one in a process of its own.
"""

from __future__ import annotations

import logging
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bare_peers import TOTAL_BYTES, gb_per_s
from benchmarks.child import Child

_DRAM = "DRAM"
_LOOK_S = 0.005


class NixlWrite:
    """One-sided writes of one buffer, prepared once; raises ImportError where NIXL is not installed."""

    def __init__(self) -> None:
        self._source = np.ones(TOTAL_BYTES, np.uint8)
        self._agent = _agent("bare-source")
        self._agent.register_memory([_registration(self._source)], _DRAM)
        self._child = Child(_offer)
        metadata, self._remote = self._child.hear()
        self._peer = self._agent.add_remote_agent(metadata)
        self._agent.make_connection(self._peer)

    async def measure(self, piece_bytes: int) -> float:
        """GB/s of one write in pieces of that size, until NIXL says that it is done."""
        offsets = range(0, TOTAL_BYTES, piece_bytes)
        local, remote = (
            self._agent.get_xfer_descs([(base + offset, piece_bytes, 0) for offset in offsets], _DRAM)
            for base in (int(self._source.ctypes.data), self._remote)
        )
        write = self._agent.initialize_xfer("WRITE", local, remote, self._peer, b"")
        began = time.perf_counter()
        state = self._agent.transfer(write)
        while state == "PROC":
            state = self._agent.check_xfer_state(write)
        duration_s = time.perf_counter() - began
        if state != "DONE":
            raise RuntimeError(f"the bare NIXL write ended in state {state}")
        self._agent.release_xfer_handle(write)
        return gb_per_s(TOTAL_BYTES, duration_s)

    def close(self) -> None:
        """Ends the process."""
        self._child.close()


def _offer(pipe: Connection) -> None:
    target = np.zeros(TOTAL_BYTES, np.uint8)
    agent = _agent("bare-target")
    agent.register_memory([_registration(target)], _DRAM)
    pipe.send((agent.get_agent_metadata(), int(target.ctypes.data)))
    while not pipe.poll(_LOOK_S):
        agent.get_new_notifs()  # lets it answer what connecting needs


def _agent(name: str) -> Any:
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - optional

    # Its own thread would spin on a core for as long as the agent lives.
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def _registration(memory: NDArray[np.uint8]) -> tuple[int, int, int, str]:
    return (int(memory.ctypes.data), memory.nbytes, 0, "")
