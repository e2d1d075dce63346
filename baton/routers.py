"""The routers a client may use: one channel at a time, the next one when a router is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import grpc.aio

from baton.api_keys import ApiKey, KeySource
from baton.errors import BatonError, Cancelled, ConfigError, Unavailable
from baton.rpc import OpenChannel, open_router_channel, translate
from baton.v1.inference_service_pb2 import ListModelsRequest
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from baton.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

CONNECT_S = 2.0
# How long one that has not answered is asked why.
REASON_S = 0.5


class Routers:
    """Channels to routers of one cluster, opened when they are used; `await Routers.connect()` opens one now.

    After close() a call raises Cancelled; in a process forked off the one that made them, RuntimeError.

    api_key: who is calling; a function is asked before each call.
    """

    def __init__(
        self,
        targets: Sequence[str],
        opener: OpenChannel = open_router_channel,
        api_key: KeySource | None = None,
    ) -> None:
        if not targets:
            raise ConfigError("target is empty; name at least one router", field="target")
        self._targets = list(targets)
        self._opener = opener
        self._api_key = api_key
        self._index = 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._is_closed = False
        self._process_id = os.getpid()

    @classmethod
    async def connect(
        cls,
        targets: Sequence[str],
        timeout_s: float,
        opener: OpenChannel = open_router_channel,
        api_key: KeySource | None = None,
    ) -> Self:
        """Connects to the first router that answers; raises Unavailable if none does in timeout_s seconds."""
        routers = cls(targets, opener, api_key)
        await routers.find(timeout_s)
        return routers

    async def find(self, timeout_s: float | None, *, max_rounds: int | None = None) -> None:
        """Makes the first router current that answers.

        timeout_s: in seconds; None for no limit.  max_rounds: how often each is tried; None for no limit.

        Raises Unavailable if none does within these; then, and if it is cancelled, all is closed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._find(max_rounds)
        except TimeoutError:
            reason = await self._reason()
            await self.close()
            raise Unavailable(
                f"no router answers at {', '.join(self._targets)}; is it running? `baton up` starts a local "
                "cluster; a router with TLS takes tls_ca, and an address that its certificate names"
                + (f" ({reason.message})" if reason else ""),
                field=reason.field if reason else "",
            ) from None
        except BaseException:
            await self.close()
            raise

    @property
    def stub(self) -> InferenceServiceAsyncStub:
        """Calls on the current router."""
        return InferenceServiceStub(self._channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries, to whichever router: who is calling.

        Raises ConfigError if a function gave something that is no key; what it raises itself passes.
        """
        if self._api_key is None:
            return ()
        key = self._api_key if isinstance(self._api_key, ApiKey) else ApiKey(self._api_key())
        return key.metadata

    def lose(self, stub_target: str) -> None:
        """That router is gone: the next one is current, unless that is so already."""
        if self.target == stub_target:
            self._index = (self._index + 1) % len(self._targets)

    @property
    def target(self) -> str:
        """Address of the current router."""
        return self._targets[self._index]

    async def close(self) -> None:
        """Ends all calls and connections, for good."""
        self._is_closed = True
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    @property
    def _channel(self) -> grpc.aio.Channel:
        refuse_fork(self._process_id)
        if self._is_closed:
            raise Cancelled("the client is closed")
        if self.target not in self._channels:
            self._channels[self.target] = self._opener(self.target)
        return self._channels[self.target]

    async def _find(self, max_rounds: int | None) -> None:
        """Makes the first target current that connects; TimeoutError if none did in so many rounds."""
        for number in itertools.count(1):
            if await _connects(self._channel):
                return
            self.lose(self.target)
            if max_rounds is not None and number == max_rounds * len(self._targets):
                raise TimeoutError

    async def _reason(self) -> BatonError | None:
        """What gRPC has to say of a router that does not answer; None if nothing."""
        try:
            # Without the key: this is not a call that anybody made.
            await self.stub.ListModels(ListModelsRequest(), timeout=REASON_S)
        except grpc.aio.AioRpcError as error:
            failure = translate(error)
            return failure if isinstance(failure, Unavailable) else None
        return None


def refuse_fork(process_id: int) -> None:
    """Raises RuntimeError in another process than that one: threads and connections stay behind in a fork."""
    if os.getpid() != process_id:
        raise RuntimeError("a client does not survive a fork; connect in the child")


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
