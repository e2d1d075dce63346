"""What routers tell each other of their tenants' usage, in Redis.

Owns the keys and their values. One hash per window holds one field per router and tenant, and ends by
itself. There is no Lua and no blocking command. It holds names of tenants and counts, nothing else. It
must not know what a limit is.

    <namespace>:rate:<window>
        "00c0ffee00c0ffee search" -> "12 3456"      requests and tokens, of that router in that window
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice
from types import TracebackType
from typing import Any, Final, Self, cast

from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from baton.redis_client import asking, open_redis
from router.tenancy.rate_limits import NUM_WINDOWS, WINDOW_S, Usage

# Longer than any router reads a window, whatever its clock says.
_TTL_S: Final = (NUM_WINDOWS + 3) * WINDOW_S
# Redis is shared and may hold anything under our prefix; these bound what a router will take in.
_FIELD: Final = re.compile(rb"([0-9a-f]{16}) ([\w.-]{1,64})")
_COUNTS: Final = re.compile(rb"(\d{1,15}) (\d{1,15})")
_MAX_FIELDS: Final = 20_000


class RedisUsage:
    """A UsageStore behind which one Redis stands; it may come and go.

    async with RedisUsage("redis://127.0.0.1:6379/0", "baton") as store:
        heard = await store.exchange(said, windows)
    """

    def __init__(self, url: str, namespace: str) -> None:
        """Connects on first use.

        Args:
            url: redis://, rediss:// or unix://; a password in it is never shown.
            namespace: prefix of all keys; one per cluster.

        Raises:
            ConfigError: the URL cannot be used.
        """
        self._redis = open_redis(url)
        self._prefix = f"{namespace}:rate:"

    async def exchange(self, said: Sequence[Usage], windows: Sequence[int]) -> list[Usage]:
        """Publishes what this router says and returns what all of them say; one round trip.

        Raises Unavailable when Redis cannot be reached; what was said may be published all the same.
        """
        # A transaction, so that no key is left without its end.
        pipeline = self._redis.pipeline(transaction=True)
        num_writes = 0
        for window, usages in groupby(
            sorted(said, key=lambda usage: usage.window), lambda usage: usage.window
        ):
            pipeline.hset(self._key(window), mapping=_fields(usages))
            pipeline.expire(self._key(window), _TTL_S)
            num_writes += 2
        for window in windows:
            pipeline.hgetall(self._key(window))
        replies = await asking(self._redis, _replies(pipeline))
        found = zip(windows, replies[num_writes:], strict=True)
        return [usage for window, reply in found for usage in _usages(window, reply)]

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _key(self, window: int) -> str:
        return f"{self._prefix}{window}"


async def _replies(pipeline: Pipeline) -> list[object]:
    """One reply per command; an exception where a foreign type stands under one key."""
    replies = cast("list[object]", await pipeline.execute(raise_on_error=False))
    for reply in replies:
        # That is that key's fault, and it ends with its window; anything else is Redis's.
        if isinstance(reply, RedisError) and not str(reply).startswith("WRONGTYPE"):
            raise reply
    return replies


def _fields(usages: Iterable[Usage]) -> dict[Any, Any]:
    return {
        f"{usage.router:016x} {usage.tenant}": f"{usage.num_requests} {usage.num_tokens}" for usage in usages
    }


def _usages(window: int, reply: object) -> Iterable[Usage]:
    """What a hash says; fields that nobody here has written are ignored."""
    if not isinstance(reply, Mapping):
        return
    for field, value in islice(reply.items(), _MAX_FIELDS):
        names, counts = _FIELD.fullmatch(field), _COUNTS.fullmatch(value)
        if names and counts:
            yield Usage(
                router=int(names[1], 16),
                tenant=names[2].decode(),
                window=window,
                num_requests=int(counts[1]),
                num_tokens=int(counts[2]),
            )
