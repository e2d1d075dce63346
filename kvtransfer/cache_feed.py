"""Tells every router what a worker's prefix cache holds, and what changes in it.

Owns who listens, and when they are told: all of it as they join, then the net change after whatever
happened on the event loop in one go. What there is to tell is engine/cache_reports.py's; nothing is
kept for any listener.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.v1 import common_pb2
from engine.block_pool import BlockPool
from engine.cache_reports import CacheReport, CacheReports

ListenerT = TypeVar("ListenerT")


class CacheFeed(Generic[ListenerT]):
    """What the listeners of one pool hear. Without a prefix cache they hear nothing.

    send: sends one message to one listener; it must not raise if the listener has gone.
    """

    def __init__(self, pool: BlockPool, send: Callable[[ListenerT, common_pb2.CacheChanges], None]) -> None:
        self._is_on = pool.prefix_cache
        self._reports = CacheReports(pool)
        self._send = send
        self._listeners: dict[ListenerT, None] = {}
        if self._is_on:
            pool.tell_of_events(self._soon)

    def join(self, listener: ListenerT) -> None:
        """A listener has come: it is told all there is, and from now on what changes."""
        if not self._is_on:
            return
        # First what the others have yet to hear, so that for everybody the next change begins here.
        self._tell_changes()
        self._listeners[listener] = None
        for report in self._reports.complete():
            self._send(listener, write_cache_changes(report))

    def leave(self, listener: ListenerT) -> None:
        """A listener has gone. Idempotent."""
        self._listeners.pop(listener, None)

    def _soon(self) -> None:
        # Once per turn of the event loop: a step, or a reservation, changes many blocks.
        asyncio.get_running_loop().call_soon(self._tell_changes)

    def _tell_changes(self) -> None:
        for report in self._reports.changes():
            message = write_cache_changes(report)
            for listener in self._listeners:
                self._send(listener, message)


def write_cache_changes(report: CacheReport) -> common_pb2.CacheChanges:
    """The message of one report."""
    return common_pb2.CacheChanges(
        reset=report.reset, stored=b"".join(report.stored), removed=b"".join(report.removed)
    )
