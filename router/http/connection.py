"""One connection of the HTTP port: uvicorn's, with limits on what a peer may make it wait for.

Owns three timers that uvicorn lacks: for a request that does not arrive, for a response that is not read, and
for a connection that is closed but not emptied. Each ends in a reset, which needs nothing of the peer. Reads
on while a response is under way, where uvicorn stops at the first byte: else nobody would hear that the peer
left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from baton.errors import InvalidRequest
from router.http.errors import body_of
from router.http.exchange import to_json

# From the first byte of a request, or from the connection's beginning, to its end.
REQUEST_S: Final = 60.0
# Of what a peer sends while its response is under way: other requests of its, or nothing of use.
MAX_EARLY_BYTES: Final = 64 * 1024


class Connection(H11Protocol):
    """uvicorn's protocol, in our words where it speaks for itself.

    write_timeout_s: longest time without room for more of a response.
    max_connections: those of the port; one more is reset at once.
    make_headers: makes those that every response has.
    on_lost: called when it is gone.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        *,
        write_timeout_s: float,
        max_connections: int,
        make_headers: Callable[[], list[tuple[bytes, bytes]]],
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._write_timeout_s = write_timeout_s
        self._max_connections = max_connections
        self._make_headers = make_headers
        self._on_lost = on_lost
        self._num_early_bytes = 0
        self._until_request: asyncio.TimerHandle | None = None
        self._until_room: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A peer is there."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.abort()
            return
        self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone, or was reset."""
        super().connection_lost(exc)
        for timer in (self._until_request, self._until_room):
            if timer is not None:
                timer.cancel()
        # uvicorn leaves it running where the connection was reset.
        self._unset_keepalive_if_required()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """Some of a request, or the next one, came."""
        if self._is_answering:
            self._keep(data)
            return
        super().data_received(data)
        self._watch_request()

    def pause_writing(self) -> None:
        """The response does not fit into the buffer any more: its reader is behind."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """There is room again."""
        super().resume_writing()
        if self._until_room is not None and not self.transport.is_closing():
            self._until_room.cancel()
            self._until_room = None

    def on_response_complete(self) -> None:
        """The response is in the buffer."""
        self._num_early_bytes = 0
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()

    def shutdown(self) -> None:
        """Ends it with the response that is under way, or now."""
        super().shutdown()
        if self.transport.is_closing():
            self._watch_reader()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, or has more headers than fit."""
        error = InvalidRequest(f"this is no HTTP request that can be read: {msg}")
        body = to_json(body_of(error), ensure_ascii=True).encode("ascii")
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        headers += [header for header in self._make_headers() if header not in headers]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        try:
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            # In the middle of a response there is no room for another.
            self.transport.abort()
            return
        self.transport.close()
        self._watch_reader()

    def _unsupported_upgrade_warning(self) -> None:
        """A client that offers another protocol gets this one; that is no news."""

    def _watch_request(self) -> None:
        """Times the peer while a request is due or incomplete; uvicorn times it between two requests."""
        cycle: Any = self.cycle
        is_due = cycle is None or cycle.more_body or (cycle.response_complete and not self._is_idle)
        if not is_due and self._until_request is not None:
            self._until_request.cancel()
            self._until_request = None
        elif is_due and self._until_request is None:
            self._until_request = self.loop.call_later(REQUEST_S, self.transport.abort)

    @property
    def _is_answering(self) -> bool:
        """Whether a request is complete and its response is not."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _keep(self, data: bytes) -> None:
        """For the request after this one, in h11's buffer; where there can be none it is dropped."""
        self._num_early_bytes += len(data)
        if self._num_early_bytes > MAX_EARLY_BYTES:
            self.transport.abort()
        elif self.conn.their_state is h11.DONE:
            self.conn.receive_data(data)

    @property
    def _is_idle(self) -> bool:
        return self.timeout_keep_alive_task is not None

    def _watch_reader(self) -> None:
        if self._until_room is None:
            self._until_room = self.loop.call_later(self._write_timeout_s, self.transport.abort)
