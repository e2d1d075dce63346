"""A device's stream and events, on the host: nothing has ended there before somebody has waited for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Event(threading.Event):
    """What an event of a device offers, and a test sets."""

    def query(self) -> bool:
        return self.is_set()


class Device:
    """A stream. at_begin: called when it begins with what was launched; at_end: before that has ended."""

    def __init__(
        self, at_end: Callable[[], None] = lambda: None, at_begin: Callable[[], None] = lambda: None
    ) -> None:
        self.num_early = 0
        self.waited_for: list[Any] = []
        self._at_begin = at_begin
        self._at_end = at_end

    @contextmanager
    def behind(self, event: Any) -> Iterator[None]:
        self.waited_for.append(event)
        if event is not None:
            self.num_early += not event.is_set()
            assert event.wait(5)
        self._at_begin()
        yield
        self._at_end()


def fired() -> Any:
    event = Event()
    event.set()
    return event
