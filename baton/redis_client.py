"""The connection to Redis that everybody here uses: its timeouts, and its errors in our words.

Owns the translation of Redis's errors, and what becomes of connections after one. It knows no key.
Redis may be away at any time; whoever asks says what happens then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.errors import ConfigError, Unavailable

# One step: connecting, or one reply. Whatever is under way when Redis comes back is over after this.
_STEP_S: Final = 2.0
# All steps of a command together, its retry and the handshake of a new connection included.
_COMMAND_S: Final = 5.0

ResultT = TypeVar("ResultT")


def open_redis(url: str, on_connect: Callable[[], object] = lambda: None) -> Redis:
    """A client that connects on first use.

    url: redis://, rediss:// or unix://; a password in it is never shown.
    on_connect: called after every connect, also where a connection was lost unseen and made again.

    Raises ConfigError, field "redis_url", if it cannot be used.
    """

    async def connected(connection: Any) -> None:
        await connection.on_connect()
        on_connect()

    try:
        client = Redis.from_url(
            url,
            socket_timeout=_STEP_S,
            socket_connect_timeout=_STEP_S,
            # One retry, for a pooled connection that Redis closed meanwhile; back-off is the caller's.
            retry=Retry(NoBackoff(), 1),
            redis_connect_func=connected,
        )
        # Builds a connection without connecting, which checks the URL's parameters.
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        # The parser's own message may quote a part of the password.
        message = (
            "the Redis URL cannot be used; write redis://[:password@]host:port/0, rediss://... or unix://..."
        )
        raise ConfigError(message, field="redis_url") from None
    return client


async def asking(redis: Redis, answer: Awaitable[ResultT]) -> ResultT:
    """The answer of this client; raises Unavailable if Redis cannot be reached or refuses.

    After any error the idle connections are closed, so the next command looks up its address again: a
    former primary that refuses to write keeps its connections open, and would be asked for ever.

    A cancellation is always heard. redis-py sends under asyncio.wait_for, which up to Python 3.11 forgets one
    that comes just when the sending is done; whoever polls would go on for ever.
    """
    num_cancels = _num_cancels()
    try:
        async with asyncio.timeout(_COMMAND_S):
            found = await answer
    except (RedisError, OSError) as error:
        await redis.connection_pool.disconnect(inuse_connections=False)
        if _num_cancels() > num_cancels:
            raise asyncio.CancelledError from None
        # Redis's messages name host and port, never the password.
        message = f"Redis does not answer as it should: {type(error).__name__}: {error}"
        raise Unavailable(message) from None
    if _num_cancels() > num_cancels:
        raise asyncio.CancelledError
    return found


def _num_cancels() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
