"""A cluster, or any server with OpenAI's API, under load by HTTP: /v1/completions, streaming."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from baton.bench.http_connection import Endpoint, HttpConnection
from baton.bench.outcome import Planned
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
)

_BY_STATUS: dict[int, type[BatonError]] = {
    401: Unauthenticated,
    403: Unauthenticated,
    429: Overloaded,
    502: Unavailable,
    503: Unavailable,
    504: DeadlineExceeded,
}
_DONE = b"[DONE]"


class HttpTarget:
    """A server, asked over connections that are kept open between requests.

    endpoint: what OpenAI's clients call base_url; without a path it is /v1.
    context: for https. api_key: sent with every request.
    """

    def __init__(
        self, endpoint: Endpoint, *, context: ssl.SSLContext | None = None, api_key: str | None = None
    ) -> None:
        self._endpoint = endpoint
        self._base = "" if endpoint.prefix else "/v1"
        self._context = context
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._idle: list[HttpConnection] = []
        self.model = ""

    async def find_model(self) -> str:
        """The name of the first model served, which every request then names."""
        async with _Lent(self) as connection:
            await connection.send("GET", f"{self._base}/models", self._headers)
            found = _read_json(await connection.body())
            if connection.status != 200:
                raise _error(connection.status, found)
        match found:
            case {"data": [{"id": str(name)}, *_]}:
                self.model = name
            case _:
                raise InternalError(f"{self._endpoint.authority} lists no model")
        return self.model

    async def answer(self, request: Planned, timeout_s: float) -> AsyncGenerator[int, None]:
        """One greedy answer that no stop token ends."""
        # HTTP has no deadlines; whoever asks hangs up.
        del timeout_s
        async with _Lent(self) as connection:
            await connection.send("POST", f"{self._base}/completions", self._headers, self._body(request))
            if connection.status != 200:
                raise _error(connection.status, _read_json(await connection.body()))
            num_tokens = 0
            async for event in _events(connection.pieces()):
                if "error" in event:
                    raise _error(500, event)
                count = _count(event, num_tokens, request.max_tokens)
                if count > num_tokens:
                    yield count - num_tokens
                    num_tokens = count

    def close(self) -> None:
        """Closes what is open."""
        while self._idle:
            self._idle.pop().close()

    def _body(self, request: Planned) -> bytes:
        body = {
            "model": self.model,
            "prompt": list(request.token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            # The usage of each chunk says how many tokens it stands for.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return json.dumps(body).encode()

    async def take(self) -> HttpConnection:
        """A connection that nobody uses."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            connection.close()
        return await HttpConnection.open(self._endpoint, self._context)

    def give_back(self, connection: HttpConnection) -> None:
        """Keeps it, if it can be used again."""
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()


class _Lent:
    """A connection for one request."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target

    async def __aenter__(self) -> HttpConnection:
        self._connection = await self._target.take()
        return self._connection

    async def __aexit__(self, *_error: object) -> None:
        self._target.give_back(self._connection)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events; pieces may be cut anywhere."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data" and value.strip() not in (b"", _DONE):
                event = _read_json(value)
                if not isinstance(event, dict):
                    raise InternalError(f"an event of the stream is no JSON object: {event!r:.200}")
                yield event


def _count(event: Mapping[str, Any], so_far: int, longest: int) -> int:
    """Tokens of the answer up to this event: by its usage, else one more if it brings text."""
    usage = event.get("usage")
    if isinstance(usage, dict) and isinstance(count := usage.get("completion_tokens"), int):
        if count > longest:
            raise InternalError(f"the usage of an event is {count} tokens where {longest} were asked for")
        return count
    choices = event.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise InternalError(f"the choices of an event are no list of objects: {choices!r:.200}")
    return so_far + any(choice.get("text") for choice in choices)


def _read_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.decode("utf-8", "replace")[:200]


def _error(status: int, body: Any) -> BatonError:
    """What the server said, as the error that its status stands for."""
    inner = body.get("error", body) if isinstance(body, dict) else body
    message = inner.get("message", inner) if isinstance(inner, dict) else inner
    kind = _BY_STATUS.get(status, InvalidRequest if status < 500 else InternalError)
    return kind(f"HTTP {status}: {message}")
