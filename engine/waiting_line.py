"""Requests that wait for blocks: who is next, and who may go ahead of whom.

A synchronous core. It knows ages and how often each was overtaken; whether a request fits is its
caller's to say.

Who fits now goes ahead of older ones that do not, because blocks that lie idle serve nobody. A
request can be overtaken MAX_OVERTAKEN times; from then on nothing younger starts before it, so the
blocks that others give back collect until it fits. Whatever comes, it starts after that many others
and the end of those that run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.request import Request

MAX_OVERTAKEN = 32
# Looking for a request that fits costs time in every step; behind so many that do not, few will.
MAX_TRIED = 16


class WaitingLine:
    """Waiting requests, oldest first; requests of the same age in the order in which they came."""

    def __init__(self) -> None:
        self._requests: dict[bytes, Request] = {}
        self._overtaken: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, attempt_id: bytes) -> bool:
        return attempt_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Takes a request, at the place of its age."""
        self._requests[request.attempt_id] = request
        youngest_before = next(itertools.islice(reversed(self._requests.values()), 1, None), request)
        if request.arrived_at < youngest_before.arrived_at:
            # It was here before, or came by a longer way.
            by_age = sorted(self._requests.items(), key=lambda item: item[1].arrived_at)
            self._requests = dict(by_age)

    def pop(self, attempt_id: bytes) -> Request:
        """Takes a request out; it has overtaken nobody."""
        self._overtaken.pop(attempt_id, None)
        return self._requests.pop(attempt_id)

    def take(
        self, is_ready: Callable[[Request], bool], try_start: Callable[[Request], bool]
    ) -> Iterator[Request]:
        """Yields the requests that start now, oldest first, out of the line already.

        is_ready: False lets a request stand aside for a reason of its own; nobody overtakes it by that.
        try_start: gives a request what it needs to start, or returns False.
        The line must not change while this runs. Who stops iterating leaves the rest as it was.
        """
        passed: list[Request] = []
        for request in list(self._requests.values()):
            if not is_ready(request):
                continue
            if try_start(request):
                self.pop(request.attempt_id)
                for older in passed:
                    self._overtaken[older.attempt_id] = self._overtaken.get(older.attempt_id, 0) + 1
                yield request
            elif len(passed) + 1 == MAX_TRIED:
                return
            else:
                passed.append(request)
            if any(self._overtaken.get(older.attempt_id, 0) >= MAX_OVERTAKEN for older in passed):
                return
