"""Runs one prefill worker: the same in a process of its own and inside an actor."""

from __future__ import annotations

import asyncio
import os
import random
from functools import partial

from baton.identity import Identity
from baton.metrics import meter
from baton.models import ModelDir
from baton.process import unless_stopped
from baton.rpc_server import Registration
from baton.served_role import ServedRole
from baton.tls import TlsFiles
from baton.v1 import common_pb2
from baton.v1.prefill_service_pb2_grpc import add_PrefillServiceServicer_to_server
from baton.worker_process import OnServing, ignore, serve_worker
from engine.engine import Engine
from kvtransfer.event_thread import EventThread
from kvtransfer.metrics import SendMetrics, observe_totals
from kvtransfer.sender import KvSender
from kvtransfer.sender_thread import SenderThread
from kvtransfer.staged import reader_of
from kvtransfer.transports.client import KvClient
from prefill_worker.config import PrefillConfig
from prefill_worker.service import PrefillServicer
from prefill_worker.worker import PrefillWorker


async def serve(config: PrefillConfig, stop: asyncio.Event, *, on_serving: OnServing = ignore) -> None:
    """Loads the model, serves sessions, and announces the worker until stop is set; then drains it.

    on_serving: called once the worker is announced; never if stop is set while the model is loaded.
    """
    tls = config.tls
    tls.server_credentials()  # bad files are told before anything is loaded
    model = ModelDir.open(config.model)
    identity = Identity.draw(config.name, common_pb2.ROLE_PREFILL, model.fingerprint(), random.SystemRandom())
    engine = await unless_stopped(stop, Engine.start(config, model))
    if engine is None:
        return
    try:
        if config.kv_staging:
            await engine.stage_kv(config.max_batch_tokens)
        await _serve(
            config, stop, tls=tls, model=model, identity=identity, engine=engine, on_serving=on_serving
        )
    finally:
        await engine.close()


ROLE = ServedRole("prefill", PrefillConfig, serve)


async def _serve(
    config: PrefillConfig,
    stop: asyncio.Event,
    *,
    tls: TlsFiles,
    model: ModelDir,
    identity: Identity,
    engine: Engine,
    on_serving: OnServing,
) -> None:
    reader = reader_of(engine.cache, config.sender().max_frame_bytes, engine.kernel_choices)
    sender_thread, events = SenderThread(), EventThread(engine.cache.device)
    transport = KvClient(
        identity,
        reader.format,
        offload=sender_thread,
        memory=reader.memory,
        config=config.transports(),
        dial=tls.opener(),
    )
    sender = KvSender(reader, transport, config.sender(), events=events)
    worker = _worker(config, model, identity, engine, sender)
    try:
        await serve_worker(
            worker,
            [_service(worker)],
            identity=identity,
            settings=config,
            tls=tls,
            stop=stop,
            on_bound=lambda _address: None,
            on_serving=on_serving,
        )
    finally:
        await transport.close()
        sender_thread.close()
        events.close()


def _worker(
    config: PrefillConfig, model: ModelDir, identity: Identity, engine: Engine, sender: KvSender
) -> PrefillWorker:
    worker = PrefillWorker(
        identity=identity,
        engine=engine,
        limits=model.limits,
        sender=sender,
        credit_tokens=config.credit_tokens,
        pid=os.getpid(),
        rng=random.SystemRandom(),
        metrics=SendMetrics(meter()),
    )
    observe_totals(meter(), "sender", worker.totals)
    return worker


def _service(worker: PrefillWorker) -> Registration:
    return Registration(
        name="baton.v1.PrefillService",
        add=partial(add_PrefillServiceServicer_to_server, PrefillServicer(worker)),
    )
