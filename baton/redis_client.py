"""The connection to Redis that everybody here uses: its timeouts, and its errors in our words.

Owns the translation of Redis's errors, and what becomes of connections after one. It knows no key.
Redis may be away at any time; whoever asks says what happens then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError

from baton.errors import ConfigError, Unavailable

# One step: connecting, or one reply. Whatever is under way when Redis comes back is over after this.
_STEP_S: Final = 2.0
# All steps of a command together, its retry and the handshake of a new connection included.
_COMMAND_S: Final = 5.0

# Parameter of a URL that is ours; redis-py has the others.
PASSWORD_FILE: Final = "password_file"
_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

ResultT = TypeVar("ResultT")


class PasswordFile(CredentialProvider):
    """The password in a file, read for every new connection: it may change while the process runs."""

    def __init__(self, path: Path, user: str | None) -> None:
        self._path = path
        self._user = user

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """As redis-py asks for them; raises OSError, which asking() turns into Unavailable."""
        password = self._path.read_text(encoding="utf-8").strip()
        return (password,) if self._user is None else (self._user, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same: a small file, read once per connection."""
        return self.get_credentials()


class _RenewedTls(SSLConnection):
    """Reads the files of TLS for every new connection, as the password's is; redis-py keeps what it read."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return super()._connection_arguments()


def open_redis(url: str, on_connect: Callable[[], object] = lambda: None) -> Redis:
    """A client that connects on first use.

    url: redis://, rediss:// or unix://; a password in it is never shown. `?password_file=PATH` names a file
        with it. With rediss://, `?ssl_ca_certs=PATH` names one with authorities that sign the server's
        certificate, `&ssl_certfile=PATH&ssl_keyfile=PATH` ours. All are read for every connection.
    on_connect: called after every connect, also where a connection was lost unseen and made again.

    Raises ConfigError, field "redis_url", if it cannot be used.
    """

    async def connected(connection: Any) -> None:
        await connection.on_connect()
        on_connect()

    try:
        url, credentials = _split(url)
        client = Redis.from_url(
            url,
            credential_provider=credentials,
            socket_timeout=_STEP_S,
            socket_connect_timeout=_STEP_S,
            # One retry, for a pooled connection that Redis closed meanwhile; back-off is the caller's.
            retry=Retry(NoBackoff(), 1),
            redis_connect_func=connected,
        )
        pool = client.connection_pool
        if issubclass(pool.connection_class, SSLConnection):
            pool.connection_class = _RenewedTls
        # Builds a connection without connecting, which checks the URL's parameters.
        connection = pool.make_connection()  # type: ignore[no-untyped-call]
        if isinstance(connection, SSLConnection):
            connection.ssl_context.get()
    except OSError as error:
        given = [f"{name}={path}" for name, path in parse_qsl(urlsplit(url).query) if name in _TLS_FILES]
        message = (
            f"the Redis URL names {', '.join(given)}, which cannot be used: {error.strerror or error}; "
            "name PEM files that this user may read, a key without a password and its certificate"
        )
        raise ConfigError(message, field="redis_url") from None
    except (TypeError, ValueError, RedisError):
        # The parser's own message may quote a part of the password.
        message = (
            "the Redis URL cannot be used; write redis://[user:password@]host:port/0, rediss://... or "
            f"unix://..., or leave the password out and name its file: ?{PASSWORD_FILE}=PATH"
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


def _split(url: str) -> tuple[str, PasswordFile | None]:
    """The URL as redis-py takes it, and where its password is; raises ValueError if it has two."""
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    paths = [value for name, value in query if name == PASSWORD_FILE]
    if not paths:
        return url, None
    if len(paths) > 1 or parts.password is not None:
        raise ValueError(paths)
    rest = urlencode([(name, value) for name, value in query if name != PASSWORD_FILE])
    user = None if parts.username is None else unquote(parts.username)
    # The provider says who the user is; a name without a password would be one of its own.
    address = parts.netloc.rpartition("@")[2]
    bare = urlunsplit(parts._replace(netloc=address, query=rest))
    return bare, PasswordFile(Path(paths[0]), user)


def _num_cancels() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
