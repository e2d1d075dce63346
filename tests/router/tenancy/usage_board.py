"""A store of counts in memory that can be away, for tests of rate limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.tenancy.rate_limits import Usage


class UsageBoard:
    """What all routers have said: the last count of each router, tenant and window."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, str, int], Usage] = {}

    def put(self, said: Iterable[Usage]) -> None:
        self.counts |= {(usage.router, usage.tenant, usage.window): usage for usage in said}

    def get(self, windows: Sequence[int]) -> list[Usage]:
        return [usage for usage in self.counts.values() if usage.window in windows]
