"""One HTTP/1.1 connection of a client that measures: a request, then its response as it comes.

Written on asyncio alone, so that the base install can measure the HTTP port, and so that no client library's
own work is in the figures. It takes what a server sends to a POST: a length, chunks, or everything until it
closes. Knows no API.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from baton.errors import InternalError, Unavailable

# Of one line of a response: an event with one token's text is far below.
_LINE_LIMIT = 1 << 20
# A number that is none, a negative length, a line without an end.
_NOT_HTTP = (ValueError, asyncio.LimitOverrunError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server is. prefix: what its paths begin with."""

    host: str
    port: int
    is_tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Reads "http://host:8000" or "https://host/prefix"; raises ValueError for another text."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is no URL of a server; write http://host:port")
        is_tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if is_tls else 80),
            is_tls=is_tls,
            prefix=parts.path.rstrip("/"),
        )

    @property
    def authority(self) -> str:
        """host:port, for the Host field."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class HttpConnection:
    """An open connection; made by `await HttpConnection.open(endpoint, context)`.

    status: of the response that is being read. is_reusable: it was read to its end, and the server stays.
    """

    def __init__(
        self, endpoint: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._endpoint = endpoint
        self._reader = reader
        self._writer = writer
        self._fields: dict[str, str] = {}
        self.status = 0
        self.is_reusable = False

    @classmethod
    async def open(cls, endpoint: Endpoint, context: ssl.SSLContext | None) -> Self:
        """Connects; raises Unavailable if nothing listens or TLS fails."""
        try:
            streams = await asyncio.open_connection(
                endpoint.host, endpoint.port, ssl=context if endpoint.is_tls else None, limit=_LINE_LIMIT
            )
        except (OSError, UnicodeError) as error:
            raise Unavailable(f"no HTTP server answers at {endpoint.authority}: {error}") from None
        return cls(endpoint, *streams)

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Sends a request and reads the head of its response.

        Raises Unavailable if the server hangs up, InternalError if what it sends is no response.
        """
        fields = {"Host": self._endpoint.authority, "Content-Length": str(len(body)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.is_reusable = False
        try:
            self._writer.write(
                f"{method} {self._endpoint.prefix}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
            )
            await self._writer.drain()
            await self._read_head()
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Unavailable(f"{self._endpoint.authority} closed the connection: {error}") from None
        except _NOT_HTTP as error:
            raise self._no_http(error) from None

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it arrives; raises Unavailable if it breaks off, InternalError if it is none."""
        try:
            if self._fields.get("transfer-encoding", "").lower() == "chunked":
                async for piece in self._chunks():
                    yield piece
            elif (length := self._fields.get("content-length")) is not None:
                yield await self._reader.readexactly(int(length))
            else:
                while piece := await self._reader.read(1 << 16):
                    yield piece
                return
        except (OSError, asyncio.IncompleteReadError):
            raise Unavailable(f"{self._endpoint.authority} broke the response off") from None
        except _NOT_HTTP as error:
            raise self._no_http(error) from None
        self.is_reusable = self._fields.get("connection", "").lower() != "close"

    @property
    def is_open(self) -> bool:
        """Whether the server has not hung up, as it may after a silence."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        """Hangs up, which cancels what is being answered."""
        self._writer.close()

    async def _read_head(self) -> None:
        status_line = await self._line()
        parts = status_line.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
            raise ValueError(f"the first line is {status_line[:40]!r}")
        self.status = int(parts[1])
        self._fields = {}
        while line := await self._line():
            name, _, value = line.partition(":")
            self._fields[name.strip().lower()] = value.strip()

    async def _chunks(self) -> AsyncIterator[bytes]:
        # A negative size is refused by whoever reads so many bytes.
        while size := int((await self._line()).partition(";")[0], 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        # Trailers, if any, and the empty line.
        while await self._line():
            pass

    def _no_http(self, error: Exception) -> InternalError:
        return InternalError(f"{self._endpoint.authority} does not speak HTTP/1.1: {error}")

    async def _line(self) -> str:
        return (await self._reader.readuntil(b"\n")).decode("latin-1").rstrip("\r\n")
