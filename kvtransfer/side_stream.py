"""A device's stream beside the one that computes.

Owns the order on that stream, and the sleep until it is done. Must not know what runs there: copies and
kernels are launched as on any stream, so everything but this file runs on a CPU as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Stream(Protocol):
    """Runs what is launched in the order of launching."""

    def behind(self, event: torch.cuda.Event | None) -> AbstractContextManager[None]:
        """What is launched inside runs once the event has fired; the context is left when it has ended."""


class SideStream:
    """A Stream on a GPU. A step's stream never waits for it, and its kernels go before those of steps."""

    def __init__(self, device: torch.device) -> None:
        # A kernel of ours takes microseconds, but would have to wait until one of a step leaves it room.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def behind(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """As Stream.behind(); the thread sleeps meanwhile."""
        with torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            try:
                yield
            finally:
                # Behind a failure too: a copy that was launched has its memory until it ends. With `blocking`
                # the thread sleeps instead of spinning on a core.
                ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                ended.record(self._stream)
                ended.synchronize()
