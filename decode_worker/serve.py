"""Runs one decode worker: the same in a process of its own and inside an actor."""

from __future__ import annotations

import asyncio
import os
import random
from functools import partial
from pathlib import Path

from baton.identity import Identity
from baton.metrics import meter
from baton.models import ModelDir
from baton.process import unless_stopped
from baton.rpc_server import Registration
from baton.served_role import ServedRole
from baton.tls import TlsFiles
from baton.v1 import common_pb2
from baton.v1.decode_service_pb2_grpc import add_DecodeServiceServicer_to_server
from baton.worker_process import OnServing, ignore, serve_worker
from decode_worker.config import DecodeConfig
from decode_worker.service import DecodeServicer
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from kvtransfer.metrics import observe_slots, observe_totals
from kvtransfer.transports.arena import Arena
from kvtransfer.transports.service import SERVICE_NAME


async def serve(config: DecodeConfig, stop: asyncio.Event, *, on_serving: OnServing = ignore) -> None:
    """Loads the model, serves sessions and KV writes, and announces the worker until stop is set; then
    drains it.

    on_serving: called once the worker is announced; never if stop is set while the model is loaded.
    """
    tls = config.tls
    tls.server_credentials()  # bad files are told before anything is loaded
    model = ModelDir.open(config.model)
    identity = Identity.draw(config.name, common_pb2.ROLE_DECODE, model.fingerprint(), random.SystemRandom())
    engine = await unless_stopped(stop, Engine.start(config, model))
    if engine is None:
        return
    try:
        await _serve(
            config, stop, tls=tls, model=model, identity=identity, engine=engine, on_serving=on_serving
        )
    finally:
        await engine.close()


ROLE = ServedRole("decode", DecodeConfig, serve)


async def _serve(
    config: DecodeConfig,
    stop: asyncio.Event,
    *,
    tls: TlsFiles,
    model: ModelDir,
    identity: Identity,
    engine: Engine,
    on_serving: OnServing,
) -> None:
    arena = Arena.of_size(
        config.arena_bytes,
        folder=Path(config.shm_folder),
        rng=random.SystemRandom(),
        name=f"{config.name}-{identity.incarnation:016x}",
    )
    worker = _worker(config, model, identity, engine, arena)
    try:
        # Nobody is served yet: now the event loop may wait for a compiler, and later it need not.
        worker.receiver.warm_up()
        await serve_worker(
            worker,
            _services(worker),
            identity=identity,
            settings=config,
            tls=tls,
            stop=stop,
            on_bound=worker.reachable_at,
            on_serving=on_serving,
        )
    finally:
        if arena is not None:
            arena.close()


def _worker(
    config: DecodeConfig, model: ModelDir, identity: Identity, engine: Engine, arena: Arena | None
) -> DecodeWorker:
    worker = DecodeWorker(
        identity=identity,
        engine=engine,
        limits=model.limits,
        pid=os.getpid(),
        lease_ttl_s=config.lease_ttl_s,
        rng=random.SystemRandom(),
        arena=arena,
        has_digests=config.has_digests,
        choices=engine.kernel_choices,
    )
    observe_totals(meter(), "receiver", worker.totals)
    if arena is not None:
        observe_slots(meter(), arena.slots.counts)
    return worker


def _services(worker: DecodeWorker) -> list[Registration]:
    return [
        Registration(
            name="baton.v1.DecodeService",
            add=partial(add_DecodeServiceServicer_to_server, DecodeServicer(worker)),
        ),
        Registration(name=SERVICE_NAME, add=worker.transfers.add_to),
    ]
