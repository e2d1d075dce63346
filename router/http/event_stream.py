"""Server-sent events of one response.

Owns their framing, the pings that keep proxies from cutting a silent stream, and the moment of the status: it
goes out with the first event, so that what fails before is a status of its own. Nothing is queued here: an
event that cannot be sent yet holds back whoever brings it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from router.http.exchange import Exchange, to_json

PING_S: Final = 15.0
_HEADERS: Final = {
    "cache-control": "no-cache",
    # nginx and what is built on it would collect tokens before it passes them on.
    "x-accel-buffering": "no",
}


class EventStream:
    """The events of one response, whose status waits for the first of them.

    ping_s: a comment is sent after so many seconds without an event.
    """

    def __init__(self, exchange: Exchange, ping_s: float = PING_S) -> None:
        self._exchange = exchange
        self._ping_s = ping_s
        self._sent_at = 0.0
        # Several answers share the stream.
        self._turn = asyncio.Lock()
        self._pinging: asyncio.Task[None] | None = None
        self._has_ended = False

    async def event(self, content: Mapping[str, Any] | str) -> None:
        """Sends one event, as one piece: an object, or text that has no line break."""
        # ASCII: readers that take a line break of Unicode for one of their own, or that decode each read for
        # itself, find nothing to stumble over.
        text = content if isinstance(content, str) else to_json(content, ensure_ascii=True)
        await self._send(f"data: {text}\n\n".encode("ascii"))

    async def end(self) -> None:
        """Ends the response."""
        await self.close()
        self._has_ended = True
        await self._exchange.send(b"", more=False)

    async def fail(self, error: Mapping[str, Any]) -> None:
        """Ends a response that has begun, with one event that is the error; nothing where it has ended."""
        if not self._has_ended:
            # Some clients look for an event of this name and not for an error among its data.
            await self._send(f"event: error\ndata: {to_json(error, ensure_ascii=True)}\n\n".encode("ascii"))
            await self.end()

    async def close(self) -> None:
        """Leaves nothing behind, whether or not the response has ended."""
        pinging, self._pinging = self._pinging, None
        if pinging is not None:
            pinging.cancel()
            await asyncio.wait([pinging])

    async def _send(self, piece: bytes) -> None:
        async with self._turn:
            if not self._exchange.has_begun:
                await self._exchange.begin(200, _HEADERS, "text/event-stream; charset=utf-8")
                self._sent_at = asyncio.get_running_loop().time()
                self._pinging = asyncio.create_task(self._ping(), name="pings")
            await self._exchange.send(piece)
            self._sent_at = asyncio.get_running_loop().time()

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._sent_at + self._ping_s - loop.time())
            if loop.time() >= self._sent_at + self._ping_s:
                await self._send(b": ping\n\n")
