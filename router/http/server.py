"""The HTTP port of a router: from bind to stop, on the event loop that runs already.

Owns the listening socket and its connections. It takes uvicorn's protocol but not uvicorn's server, which
would install signal handlers, end the process where a port is taken, and look ten times a second whether it
should stop.
"""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Final, Protocol, Self

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from baton.bind import why_not
from baton.errors import ConfigError
from baton.tls import TlsFiles
from router.http.connection import Connection
from router.http.doorman import MAX_HEADER_BYTES

# Above that of proxies, so that they close first and never send into a closed connection.
KEEP_ALIVE_S: Final = 75
# asyncio's own is a minute, in which nobody counts the connection.
HANDSHAKE_S: Final = 10.0
# For what is in the buffers, once nothing runs.
LAST_WORDS_S: Final = 0.5
# Of the kernel, which would let it grow to megabytes for each stream whose reader is behind.
SEND_BUFFER_BYTES: Final = 256 * 1024
_BACKLOG: Final = 2048


class Door(Protocol):
    """What the server needs of the application: to end well, and to answer what is no request."""

    def drain(self) -> None:
        """Takes no new requests from now on."""

    async def idle(self) -> None:
        """Returns once no request runs."""

    def draw_id(self) -> str:
        """The id of a request that brings none."""

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """Those that every response has."""


class HttpServer:
    """A listening port.

    async with await HttpServer.start(app, doorman, host="127.0.0.1", port=0) as server:
        print(server.address)
    """

    def __init__(self, listener: socket.socket, config: Config, doorman: Door, host: str) -> None:
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._config = config
        self._doorman = doorman
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._lost = asyncio.Event()
        self._stopping: asyncio.Future[None] | None = None

    @classmethod
    async def start(
        cls,
        app: ASGIApp,
        doorman: Door,
        *,
        host: str,
        port: int,
        tls: TlsFiles,
        write_timeout_s: float,
        max_connections: int,
    ) -> Self:
        """Binds host:port and starts to serve.

        tls: with a certificate it is HTTPS.
        write_timeout_s: a connection whose reader takes nothing for so long is reset.

        Raises ConfigError, field "http_port", if the address cannot be bound.
        """
        context = tls.public_context()
        config = Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ssl_context_factory=None if context is None else lambda _config, _default: context,
        )
        config.load()
        self = cls(_bind(host, port), config, doorman, host)

        def connection() -> Connection:
            return Connection(
                config,
                self._state,
                write_timeout_s=write_timeout_s,
                max_connections=max_connections,
                make_headers=lambda: doorman.headers(doorman.draw_id()),
                on_lost=self._lost.set,
            )

        self._server = await asyncio.get_running_loop().create_server(
            connection,
            sock=self._listener,
            ssl=context,
            ssl_handshake_timeout=None if context is None else HANDSHAKE_S,
            backlog=_BACKLOG,
        )
        return self

    @property
    def address(self) -> str:
        """host:port, as a client dials it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuses new requests, and ends running ones after grace_s seconds. Idempotent.

        Listens until then, so that whoever comes is told. Returns as soon as no request runs.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        self._doorman.drain()
        idle = asyncio.ensure_future(self._doorman.idle())
        await asyncio.wait((idle,), timeout=grace_s)
        idle.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                while self._state.connections:
                    self._lost.clear()
                    await self._lost.wait()
        except TimeoutError:
            await self._cut()

    async def _cut(self) -> None:
        """Resets what is left, which ends the requests too."""
        for connection in list(self._state.connections):
            connection.transport.abort()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=LAST_WORDS_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # Its connections have the same.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        # asyncio sets it for sockets that name their protocol, which these do not. Without it the kernel
        # holds what follows the head back until the peer has acknowledged that, 40 ms later.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError):
        raise ConfigError(
            f"cannot listen on {host}:{port}: {why_not(host, port)}", field="http_port"
        ) from None
