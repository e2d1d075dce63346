"""The routers a client may use: one channel at a time, the next one when a router is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import grpc.aio

from baton.api_keys import ApiKey
from baton.errors import InvalidRequest, Unavailable
from baton.rpc import OpenChannel, open_router_channel
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from baton.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

CONNECT_S = 2.0


class Routers:
    """Channels to routers of one cluster. Made by `await Routers.connect(targets, timeout_s)`."""

    def __init__(
        self, targets: Sequence[str], opener: OpenChannel = open_router_channel, api_key: ApiKey | None = None
    ) -> None:
        if not targets:
            raise InvalidRequest("name at least one router", field="target")
        self._targets = list(targets)
        self._opener = opener
        self._metadata = () if api_key is None else api_key.metadata
        self._index = 0
        self._channels: dict[str, grpc.aio.Channel] = {}

    @classmethod
    async def connect(
        cls,
        targets: Sequence[str],
        timeout_s: float,
        opener: OpenChannel = open_router_channel,
        api_key: ApiKey | None = None,
    ) -> Self:
        """Connects to the first router that answers; raises Unavailable if none does in timeout_s seconds."""
        routers = cls(targets, opener, api_key)
        try:
            async with asyncio.timeout(timeout_s):
                await routers._find()
        except TimeoutError:
            await routers.close()
            raise Unavailable(
                f"no router answers at {', '.join(targets)}; is it running? `baton up` starts a local cluster"
                "; a router with TLS takes tls_ca, and an address that its certificate names"
            ) from None
        except BaseException:
            await routers.close()
            raise
        return routers

    @property
    def stub(self) -> InferenceServiceAsyncStub:
        """Calls on the current router."""
        return InferenceServiceStub(self._channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries, to whichever router: who is calling."""
        return self._metadata

    def lose(self, stub_target: str) -> None:
        """That router is gone: the next one is current, unless that is so already."""
        if self.target == stub_target:
            self._index = (self._index + 1) % len(self._targets)

    @property
    def target(self) -> str:
        """Address of the current router."""
        return self._targets[self._index]

    async def close(self) -> None:
        """Ends all calls and connections."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self.target not in self._channels:
            self._channels[self.target] = self._opener(self.target)
        return self._channels[self.target]

    async def _find(self) -> None:
        """Makes the first target current that connects; they are tried in turn until one does."""
        while not await _connects(self._channel):
            self.lose(self.target)


async def _connects(channel: grpc.aio.Channel) -> bool:
    """Whether it connects now; a target that swallows packets gets CONNECT_S before the next has its turn."""
    try:
        async with asyncio.timeout(CONNECT_S):
            return await _settles(channel)
    except TimeoutError:
        return False


async def _settles(channel: grpc.aio.Channel) -> bool:
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)
        if channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return False
    return True
