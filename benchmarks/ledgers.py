"""What a process holds for requests, asked over its admin service."""

from __future__ import annotations

from baton.rpc import open_channel
from baton.v1.admin_service_pb2 import GetLedgerRequest
from baton.v1.admin_service_pb2_grpc import AdminServiceStub

Ledgers = dict[str, dict[str, int]]


async def ledger(address: str) -> tuple[str, dict[str, int]]:
    """Name and counts of the process at an address."""
    async with open_channel(address) as channel:
        response = await AdminServiceStub(channel).GetLedger(GetLedgerRequest(), timeout=5.0)
        return response.name, dict(response.counts)
