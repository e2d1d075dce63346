"""A proxy in front of every worker, opened as soon as the worker is announced.

Workers announce 127.0.0.2 and the port that they listen on at 127.0.0.1; between the two stands the proxy. It
follows the registry and closes nothing before the end: a registry that forgets a worker ends no connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from baton.ports import WorkerInfo
from baton.registry import RedisRegistry
from benchmarks.chaos.tcp_proxy import TcpProxy

PROXY_HOST = "127.0.0.2"
ADVERTISE = PROXY_HOST + ":{port}"
# Shorter than a router's own, so that the proxy is there before a router dials.
_POLL_S = 0.05
_MAX_BACKOFF_S = 0.5


class Proxies:
    """`async with Proxies(redis_url, namespace, name_peer) as proxies: proxies.of("decode-0")`."""

    def __init__(self, redis_url: str, namespace: str, name_peer: Callable[[int], str]) -> None:
        self._registry = RedisRegistry(redis_url, namespace, poll_s=_POLL_S, max_backoff_s=_MAX_BACKOFF_S)
        self._name_peer = name_peer
        self._by_port: dict[int, TcpProxy] = {}
        self._by_name: dict[str, TcpProxy] = {}
        self._known: set[int] = set()
        self._open = AsyncExitStack()
        self._follower: asyncio.Task[None] | None = None

    def of(self, worker: str) -> TcpProxy | None:
        """The proxy of the worker's youngest incarnation, if it was ever announced."""
        return self._by_name.get(worker)

    async def __aenter__(self) -> Self:
        await self._open.enter_async_context(self._registry)
        self._follower = asyncio.create_task(self._follow(), name="proxies")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._follower is not None
        self._follower.cancel()
        await asyncio.wait([self._follower])
        await self._open.aclose()
        if not self._follower.cancelled():
            self._follower.result()

    async def _follow(self) -> None:
        async for workers in self._registry.watch():
            for info in workers:
                if info.incarnation not in self._known:
                    self._known.add(info.incarnation)
                    await self._add(info)

    async def _add(self, info: WorkerInfo) -> None:
        port = int(info.address.rpartition(":")[2])
        if port not in self._by_port:
            proxy = TcpProxy(port, self._name_peer, host=PROXY_HOST, port=port)
            self._by_port[port] = await self._open.enter_async_context(proxy)
        self._by_name[info.name] = self._by_port[port]
