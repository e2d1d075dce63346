"""What a process holds for requests, asked over its admin service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.rpc import open_channel
from baton.v1.admin_service_pb2 import GetLedgerRequest
from baton.v1.admin_service_pb2_grpc import AdminServiceStub

Ledgers = dict[str, dict[str, int]]


async def ledger(address: str) -> tuple[str, dict[str, int]]:
    """Name and counts of the process at an address."""
    async with open_channel(address) as channel:
        response = await AdminServiceStub(channel).GetLedger(GetLedgerRequest(), timeout=5.0)
        return response.name, dict(response.counts)


async def settled(
    read: Callable[[], Awaitable[Ledgers]], is_settled: Callable[[Ledgers], bool], within_s: float
) -> Ledgers:
    """The ledgers as soon as they are as wanted; whatever they are after within_s seconds."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + within_s
    while True:
        found = await read()
        if is_settled(found) or clock() > deadline:
            return found
        await asyncio.sleep(0.05)
