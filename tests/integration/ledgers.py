"""What every process of a cluster holds for requests, and waiting for it to be what it was."""

from __future__ import annotations

import asyncio

from baton.cluster.local_cluster import LocalCluster
from benchmarks.ledgers import Ledgers, ledger


async def ledgers(cluster: LocalCluster) -> Ledgers:
    """The ledger of the router and of every ready worker, by name."""
    status = await cluster.status()
    addresses = [cluster.admin_address] + [w.address for w in status.workers if w.state == "ready"]
    return dict([await ledger(address) for address in addresses])


async def settled(cluster: LocalCluster, expected: Ledgers, *, within_s: float) -> Ledgers:
    """The ledgers as soon as they are the expected ones; whatever they are after within_s seconds."""
    deadline = asyncio.get_running_loop().time() + within_s
    while (found := await ledgers(cluster)) != expected and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)
    return found
