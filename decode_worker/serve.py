"""Runs one decode worker: the same in a process of its own and inside a Ray actor."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from baton.identity import Identity
from baton.ledger import LedgerServicer
from baton.metrics import meter
from baton.models import ModelDir
from baton.ports import WorkerInfo
from baton.process import run_until, write_ready_file
from baton.registry import RedisRegistry, registering
from baton.rpc_server import Registration, RpcServer
from baton.v1 import common_pb2
from baton.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from baton.v1.decode_service_pb2_grpc import add_DecodeServiceServicer_to_server
from decode_worker.config import DecodeConfig
from decode_worker.service import DecodeServicer
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from kvtransfer.metrics import observe_slots, observe_totals
from kvtransfer.transports.arena import Arena
from kvtransfer.transports.service import SERVICE_NAME


async def serve(
    config: DecodeConfig, stop: asyncio.Event, *, on_serving: Callable[[], None] = lambda: None
) -> None:
    """Loads the model, serves sessions and KV writes, and announces the worker until stop is set.

    on_serving: called once the worker is announced.
    """
    config.tls.server_credentials()  # bad files are told before anything is loaded
    model = ModelDir.open(config.model)
    rng = random.SystemRandom()
    identity = Identity.draw(config.name, common_pb2.ROLE_DECODE, model.fingerprint(), rng)
    engine = await Engine.start(config, model)
    arena = Arena.of_size(
        config.arena_bytes,
        folder=Path(config.shm_folder),
        rng=rng,
        name=f"{config.name}-{identity.incarnation:016x}",
    )
    worker = DecodeWorker(
        identity=identity,
        engine=engine,
        limits=model.limits,
        pid=os.getpid(),
        lease_ttl_s=config.lease_ttl_s,
        rng=rng,
        arena=arena,
        has_digests=config.has_digests,
    )
    observe_totals(meter(), "receiver", worker.totals)
    if arena is not None:
        observe_slots(meter(), arena.slots.counts)
    try:
        await _serve(config, worker, identity, stop, on_serving)
    finally:
        if arena is not None:
            arena.close()
    await engine.close()


async def _serve(
    config: DecodeConfig,
    worker: DecodeWorker,
    identity: Identity,
    stop: asyncio.Event,
    on_serving: Callable[[], None],
) -> None:
    """Until stop is set."""
    credentials = config.tls.server_credentials()
    async with await RpcServer.start(
        _services(config, worker), host=config.host, port=config.port, credentials=credentials
    ) as server:
        worker.transfer_address = config.advertise or server.address
        info = WorkerInfo(
            name=config.name,
            role="decode",
            incarnation=identity.incarnation,
            address=worker.transfer_address,
        )
        async with RedisRegistry(config.redis_url, config.namespace) as registry:
            await server.set_serving(True)
            async with registering(registry, info):
                write_ready_file(config.ready_file, address=server.address, pid=os.getpid())
                on_serving()
                # No drain: a server that takes no new calls takes no KV, and its router could not know.
                await run_until(stop, worker.run())


def _services(config: DecodeConfig, worker: DecodeWorker) -> list[Registration]:
    return [
        Registration(
            name="baton.v1.DecodeService",
            add=partial(add_DecodeServiceServicer_to_server, DecodeServicer(worker)),
        ),
        Registration(name=SERVICE_NAME, add=worker.transfers.add_to),
        Registration(
            name="baton.v1.AdminService",
            add=partial(
                add_AdminServiceServicer_to_server,
                LedgerServicer(config.name, common_pb2.ROLE_DECODE, worker.ledger, worker.totals),
            ),
        ),
    ]
