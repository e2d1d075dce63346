"""One HTTP request and its response, above ASGI.

Owns reading the body within its limit, the headers that mean something to a request, and the order of what is
sent: a status once, then pieces, then the end. Knows neither OpenAI nor inference.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from baton.api_keys import METADATA_KEY
from baton.errors import InvalidRequest
from baton.rpc import MAX_MESSAGE_BYTES
from router.http.errors import TOO_LARGE, WRONG_TYPE, HttpRefusal

if TYPE_CHECKING:
    from router.http.event_stream import EventStream

# The gRPC door's, so that a request fits through both or neither.
MAX_BODY_BYTES: Final = MAX_MESSAGE_BYTES
TIMEOUT_HEADER: Final = "x-request-timeout-s"
# Eleven days; what is longer is as good as none, and no number is too large for what travels to workers.
MAX_TIMEOUT_S: Final = 1e6
# Of a response that is one object: whoever reads it is judged by each, and not by all of it.
PIECE_BYTES: Final = 64 * 1024
_JSON: Final = "application/json"
_ASCII: Final = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
_UNICODE: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class ClientLeft(Exception):
    """The client is gone: there is nobody to answer. Never leaves the door."""


class Exchange:
    """What an endpoint works with.

    request_id: the client's, or one that was drawn.
    stream: what the response is sent by, if it is a stream of events.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.path_params: Mapping[str, Any] = scope.get("path_params", {})
        self.headers = Headers(scope=scope)
        self.stream: EventStream | None = None
        self._receive = receive
        self._send = send
        self._has_begun = False

    @property
    def has_begun(self) -> bool:
        """Whether the status is out, so that no other can follow."""
        return self._has_begun

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What tells whose request it is; as many keys as were sent."""
        return tuple((METADATA_KEY, value) for value in self.headers.getlist(METADATA_KEY))

    @property
    def traceparent(self) -> str:
        """W3C header of the caller's span, or ""."""
        return self.headers.get("traceparent", "")

    @property
    def remaining_s(self) -> float | None:
        """The caller's deadline, in seconds from now; None without one. Raises InvalidRequest."""
        text = self.headers.get(TIMEOUT_HEADER)
        if text is None:
            return None
        try:
            remaining_s = float(text)
        except ValueError:
            remaining_s = math.nan
        if not remaining_s > 0:
            raise InvalidRequest(
                f"the header {TIMEOUT_HEADER} must be a number of seconds above 0", field=TIMEOUT_HEADER
            )
        return None if math.isinf(remaining_s) else min(remaining_s, MAX_TIMEOUT_S)

    async def body(self) -> bytes:
        """The whole body, which must be JSON by its type.

        Raises HttpRefusal for another type or one that is too long, ClientLeft for a client that left.
        """
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            # A browser sends any other type across origins without asking first.
            raise HttpRefusal(f"the body must be JSON; say so with content-type: {_JSON}", WRONG_TYPE)
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise HttpRefusal("the body must not be compressed; leave content-encoding out", WRONG_TYPE)
        declared = int(self.headers.get("content-length", "0"))
        body, more = bytearray(), True
        while more:
            if max(declared, len(body)) > MAX_BODY_BYTES:
                raise self._too_long()
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise self._too_long()
        return bytes(body)

    def _too_long(self) -> HttpRefusal:
        return HttpRefusal(f"the body is longer than {MAX_BODY_BYTES} bytes", TOO_LARGE)

    async def while_connected(self, handling: Coroutine[Any, Any, None]) -> None:
        """Runs what handles the request, whose body has been read; raises what it raises.

        Cancels it where the client leaves, and raises ClientLeft.
        """
        work = asyncio.ensure_future(handling)
        leaving = asyncio.ensure_future(self._left())
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientLeft
            await work
        finally:
            work.cancel()
            leaving.cancel()
            await asyncio.wait((work, leaving))

    async def _left(self) -> None:
        """Returns once the client is gone."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self,
        content: Mapping[str, Any] | str,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str = _JSON,
    ) -> None:
        """Sends the whole response. content: an object to be sent as JSON, or text."""
        text = content if isinstance(content, str) else to_json(content, ensure_ascii=False)
        body = text.encode("utf-8", "replace")
        await self.begin(status, {"content-length": str(len(body)), **(headers or {})}, media_type)
        *pieces, last = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)] or [b""]
        for piece in pieces:
            await self.send(piece)
        await self.send(last, more=False)

    async def begin(self, status: int, headers: Mapping[str, str], media_type: str) -> None:
        """Sends the status and the headers."""
        assert not self._has_begun, "a response has one status"
        sent = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        sent.append((b"content-type", media_type.encode("latin-1")))
        await self._send(_start(status, sent))
        self._has_begun = True

    async def send(self, piece: bytes, *, more: bool = True) -> None:
        """Sends a piece of the body; waits while the reader is behind."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})


def to_json(content: Mapping[str, Any], *, ensure_ascii: bool) -> str:
    """Standard JSON: a number that JSON does not have is a defect here, not a word of Python's there."""
    return (_ASCII if ensure_ascii else _UNICODE).encode(content)


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}
