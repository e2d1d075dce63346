"""A grpc.aio.Channel over the simulated network: what KvClient uses of one.

Owns the calls that are open on it, so that closing it ends them, and whether anybody has answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from tests.simulation.calls import Caller, ClientCall

State = grpc.ChannelConnectivity
# The simulated methods by the names of the real ones.
KINDS = {"Pair": "pair", "Write": "kv"}


class SimChannel:
    """A channel from one process to a node. window_bytes: what the node takes before it has read it."""

    def __init__(self, caller: Caller, node: str, window_bytes: int) -> None:
        self._caller = caller
        self._node = node
        self._window_bytes = window_bytes
        self._calls: list[ClientCall] = []
        self._state = State.IDLE

    def get_state(self, try_to_connect: bool = False) -> State:
        return self._state

    async def wait_for_state_change(self, _last: State) -> None:
        """Asks whether anybody is there."""
        call = self._open("connect", bytes)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            self._state = State.TRANSIENT_FAILURE
        else:
            self._state = State.READY
        finally:
            call.cancel()

    def unary_unary(
        self, path: str, request_serializer: object, response_deserializer: Callable[[bytes], Any]
    ) -> Callable[[Any], Any]:
        async def ask(request: Any) -> Any:
            call = self._open(_kind(path), response_deserializer)
            try:
                call.send(request)
                return await anext(call)
            finally:
                call.cancel()

        return ask

    def stream_stream(
        self, path: str, response_deserializer: Callable[[bytes], Any]
    ) -> Callable[[], ClientCall]:
        def begin() -> ClientCall:
            call = self._open(_kind(path), response_deserializer)
            call.limit_sending(self._window_bytes)
            return call

        return begin

    async def close(self) -> None:
        """Ends all calls."""
        self._state = State.SHUTDOWN
        for call in self._calls:
            call.cancel()
        self._calls.clear()

    def _open(self, kind: str, decode: Callable[[bytes], Any]) -> ClientCall:
        self._calls = [call for call in self._calls if not call.is_over]
        call = self._caller.open(kind, self._node, decode)
        self._calls.append(call)
        return call


def _kind(path: str) -> str:
    return KINDS[path.rpartition("/")[2]]
