"""What every request to the HTTP port passes: its id, its place in the count, and the words of its failure.

Owns the number of requests that run, whether the door still takes new ones, and the one place where an error
becomes a response. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from email.utils import formatdate
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import (
    BatonError,
    Cancelled,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from baton.logs import get_logger
from router.http.errors import (
    CLIENT_LEFT,
    HEADERS_TOO_LARGE,
    TWO_LENGTHS,
    HttpRefusal,
    body_of,
    form_of,
    headers_of,
)
from router.http.exchange import ClientLeft, Exchange
from router.request import MAX_REQUEST_ID_CHARS

ID_HEADER: Final = "x-request-id"
# Of a request line and headers, whether they arrive in one piece or in many.
MAX_HEADER_BYTES: Final = 64 * 1024
_ABSOLUTE: Final = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_ID: Final = "baton.request_id"

Handler = Callable[[Exchange], Awaitable[None]]

log = get_logger(__name__)


class Doorman:
    """Counts requests, and refuses them once the router leaves.

    max_requests: those that may run; more are refused before their bodies are read.
    rng: source of ids for requests without one.
    wall: seconds since 1970.
    """

    def __init__(self, max_requests: int, rng: random.Random, wall: Callable[[], float]) -> None:
        self.is_draining = False
        self._max_requests = max_requests
        self._rng = rng
        self._wall = wall
        self._num_running = 0
        self._ended = asyncio.Event()

    def drain(self) -> None:
        """Takes no new requests from now on."""
        self.is_draining = True

    async def idle(self) -> None:
        """Returns once no request runs."""
        while self._num_running:
            self._ended.clear()
            await self._ended.wait()

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application, with the headers that every response has."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            request_id = self._request_id(scope)
            scope[_ID] = request_id

            async def marked(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], *self.headers(request_id)]}
                await send(message)

            if _num_header_bytes(scope) > MAX_HEADER_BYTES:
                refusal = HttpRefusal(
                    f"request line and headers are longer than {MAX_HEADER_BYTES} bytes", HEADERS_TOO_LARGE
                )
                await _fail(Exchange(scope, receive, marked, request_id), refusal)
                return
            if _has_two_lengths(scope):
                # A proxy that goes by the other one would take the rest of this body for another request.
                refusal = HttpRefusal(
                    "content-length and transfer-encoding exclude each other",
                    TWO_LENGTHS,
                    {"connection": "close"},
                )
                await _fail(Exchange(scope, receive, marked, request_id), refusal)
                return
            # As proxies ask, and every server has to understand.
            if (whole := _ABSOLUTE.match(scope["path"])) is not None:
                scope["path"] = scope["path"][whole.end() :] or "/"
            await app(scope, receive, marked)

        return guarded

    def endpoint(self, handler: Handler, *, drains: bool = True) -> Endpoint:
        """An endpoint of that handler. drains: it is counted, and refused once the router leaves."""
        return Endpoint(self, handler, drains=drains)

    async def run(self, exchange: Exchange, handler: Handler, *, drains: bool) -> None:
        """Answers one request, whatever comes of it."""
        try:
            with self._counting() if drains else nullcontext():
                _check_id(exchange)
                await handler(exchange)
        except ClientLeft:
            log.info("client left", request_id=exchange.request_id, status=CLIENT_LEFT)
        except Cancelled as error:
            # The client is there: something inside gave up.
            await _fail(exchange, Unavailable(error.message))
        except BatonError as error:
            await _fail(exchange, error)
        except Exception as error:  # noqa: BLE001  (there is nobody above to raise it to)
            await _fail(exchange, _unexpected(error, exchange.request_id))
        finally:
            if exchange.stream is not None:
                await exchange.stream.close()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Runs one request; raises Draining or Overloaded where it must not run."""
        self._num_running += 1
        try:
            if self.is_draining:
                raise Draining("this router is about to leave; another one can serve this")
            if self._num_running > self._max_requests:
                raise Overloaded(
                    f"{self._max_requests} requests are in flight already; try again later", retry_after_s=1.0
                )
            yield
        finally:
            self._num_running -= 1
            self._ended.set()

    def _request_id(self, scope: Scope) -> str:
        """The client's, or a new one where that cannot be sent back; then the request is refused."""
        for name, value in scope["headers"]:
            if name == ID_HEADER.encode():
                given: str = value.decode("latin-1")
                if given and len(given) <= MAX_REQUEST_ID_CHARS and given.isprintable():
                    return given
        return self.draw_id()

    def draw_id(self) -> str:
        """The id of a request that brings none."""
        return f"req-{self._rng.getrandbits(64):016x}"

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """Those that every response has."""
        headers = [
            (ID_HEADER.encode(), request_id.encode("latin-1")),
            (b"date", formatdate(self._wall(), usegmt=True).encode()),
        ]
        if self.is_draining:
            headers.append((b"connection", b"close"))
        return headers


class Endpoint:
    """A handler as Starlette calls it. A class, because it takes a function for something else."""

    def __init__(self, doorman: Doorman, handler: Handler, *, drains: bool) -> None:
        self._doorman = doorman
        self._handler = handler
        self._drains = drains

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        exchange = Exchange(scope, receive, send, scope[_ID])
        await self._doorman.run(exchange, self._handler, drains=self._drains)


def _has_two_lengths(scope: Scope) -> bool:
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}


def _num_header_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])


def _check_id(exchange: Exchange) -> None:
    given = exchange.headers.get(ID_HEADER)
    if given and given != exchange.request_id:
        raise InvalidRequest(
            f"{ID_HEADER} must be at most {MAX_REQUEST_ID_CHARS} printable characters", field=ID_HEADER
        )


async def _fail(exchange: Exchange, error: BatonError) -> None:
    """Says what went wrong: by the status, or by the last event of a stream whose status is out."""
    status = form_of(error).status
    if not exchange.has_begun:
        await exchange.reply(body_of(error), status=status, headers=headers_of(error))
    elif exchange.stream is not None:
        body = body_of(error)
        if error.retryable:
            # What it says was written for the SDK, which goes on elsewhere.
            body["error"]["message"] += "; over HTTP an answer that has begun cannot go on: ask again"
        await exchange.stream.fail(body)


def _unexpected(error: Exception, request_id: str) -> InternalError:
    """A client learns nothing of it but an id: a message or a stack trace may hold a prompt or a path."""
    error_id = secrets.token_hex(8)
    log.error("request failed", error_id=error_id, request_id=request_id, exc_info=error)
    return InternalError(f"internal error {error_id}; the router's log has the details under this id")
