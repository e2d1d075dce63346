"""`python -m prefill_worker`: runs one prefill worker until SIGTERM."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from functools import partial

from baton.config import load_config
from baton.identity import Identity
from baton.ledger import LedgerServicer
from baton.logs import configure_logging
from baton.metrics import configure_metrics, meter, shutdown_metrics
from baton.models import ModelDir
from baton.ports import WorkerInfo
from baton.process import report_errors, run, run_until, write_ready_file
from baton.registry import RedisRegistry, registering
from baton.rpc_server import Registration, RpcServer
from baton.telemetry import configure_tracing, shutdown_tracing
from baton.v1 import common_pb2
from baton.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from baton.v1.prefill_service_pb2_grpc import add_PrefillServiceServicer_to_server
from engine.engine import Engine
from kvtransfer.metrics import SendMetrics, observe_totals
from kvtransfer.sender import KvSender
from kvtransfer.sender_thread import SenderThread
from kvtransfer.staged import reader_of
from kvtransfer.transports.client import KvClient
from prefill_worker.config import PrefillConfig
from prefill_worker.service import PrefillServicer
from prefill_worker.worker import PrefillWorker


async def serve(config: PrefillConfig, stop: asyncio.Event) -> None:
    """Loads the model, serves sessions, and announces the worker until stop is set."""
    credentials = config.tls.server_credentials()
    model = ModelDir.open(config.model)
    rng = random.SystemRandom()
    identity = Identity.draw(config.name, common_pb2.ROLE_PREFILL, model.fingerprint(), rng)
    engine = await Engine.start(config, model)
    reader, sender_thread = reader_of(engine.cache, config.sender().max_frame_bytes), SenderThread()
    transport = KvClient(
        identity,
        reader.format,
        offload=sender_thread,
        memory=reader.memory,
        config=config.transports(),
        dial=config.tls.opener(),
    )
    worker = PrefillWorker(
        identity=identity,
        engine=engine,
        limits=model.limits,
        sender=KvSender(reader, transport, config.sender()),
        credit_tokens=config.credit_tokens,
        pid=os.getpid(),
        rng=rng,
        metrics=SendMetrics(meter()),
    )
    observe_totals(meter(), "sender", worker.totals)
    services = [
        Registration(
            name="baton.v1.PrefillService",
            add=partial(add_PrefillServiceServicer_to_server, PrefillServicer(worker)),
        ),
        Registration(
            name="baton.v1.AdminService",
            add=partial(
                add_AdminServiceServicer_to_server,
                LedgerServicer(config.name, identity.role, worker.ledger, worker.totals),
            ),
        ),
    ]
    async with await RpcServer.start(
        services, host=config.host, port=config.port, credentials=credentials
    ) as server:
        address = config.advertise or server.address
        info = WorkerInfo(name=config.name, role="prefill", incarnation=identity.incarnation, address=address)
        async with RedisRegistry(config.redis_url, config.namespace) as registry:
            await server.set_serving(True)
            async with registering(registry, info):
                write_ready_file(config.ready_file, address=server.address, pid=os.getpid())
                # Steps go on while the server drains, or nothing that is running could end.
                await run_until(stop, worker.run(), drain=partial(server.stop, config.drain_s))
    await transport.close()
    sender_thread.close()
    await engine.close()


def main() -> int:
    """Entry point."""
    config = load_config(PrefillConfig, section="prefill", argv=sys.argv[1:], environ=os.environ)
    configure_logging(config.name, config.log_level)
    configure_tracing("baton-prefill", config.name, config.trace_file or None)
    configure_metrics("baton-prefill", config.name)
    try:
        return run(partial(serve, config))
    finally:
        shutdown_tracing()
        shutdown_metrics()


if __name__ == "__main__":
    sys.exit(report_errors(main))
