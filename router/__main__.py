"""`python -m router`: runs one router until SIGTERM."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from baton.certificate_watch import CertificateWatch
from baton.config import load_config
from baton.identity import Identity
from baton.logs import configure_logging, get_logger
from baton.metrics import configure_metrics, meter, shutdown_metrics
from baton.models import ModelDir
from baton.process import report_errors, run, run_until, write_ready_file
from baton.registry import RedisRegistry
from baton.rpc_server import Registration, RpcServer
from baton.telemetry import configure_tracing, shutdown_tracing
from baton.tls import TlsFiles
from baton.v1 import common_pb2
from baton.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from baton.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from router.admin import RouterAdminServicer
from router.config import RouterConfig
from router.core import RouterCore
from router.dial import decode_dialer, prefill_dialer
from router.fleet import Fleet
from router.grammars import GrammarCheck
from router.http.app import make_app
from router.http.doorman import Doorman
from router.http.server import HttpServer
from router.inference import Inference
from router.metrics import RouterMetrics
from router.service import InferenceServicer
from router.tenancy.rate_limits import RateLimits
from router.tenancy.rate_sync import RateSync
from router.tenancy.redis_usage import RedisUsage
from router.tenancy.tenants import Tenants
from router.text import Offload, Text

# Long prompts that are encoded, and grammars that are compiled, at once; the event loop goes on meanwhile.
TEXT_THREADS = 4
# Of those that the process may open: for workers, gRPC, Redis and what Python reads.
RESERVED_FILES = 512

log = get_logger(__name__)


async def serve(config: RouterConfig, registry: CollectorRegistry, stop: asyncio.Event) -> None:
    """Serves requests and follows the registry of workers until stop is set.

    registry: what /metrics shows.
    """
    model = ModelDir.open(config.model)
    with ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text") as threads:
        offload = partial(asyncio.get_running_loop().run_in_executor, threads)
        grammars = await GrammarCheck.of(model, offload)
        text = Text(model, offload)
        await _serve(
            config, stop, model=model, text=text, grammars=grammars, offload=offload, metrics=registry
        )


async def _serve(
    config: RouterConfig,
    stop: asyncio.Event,
    *,
    model: ModelDir,
    text: Text,
    grammars: GrammarCheck,
    offload: Offload,
    metrics: CollectorRegistry,
) -> None:
    rng = random.SystemRandom()
    identity = Identity.draw(config.name, common_pb2.ROLE_ROUTER, model.fingerprint(), rng)
    tenants = Tenants.load(config.tenants_file)
    limits = RateLimits(tenants, identity.incarnation)
    tls = config.tls
    opener = tls.opener()
    async with (
        RedisRegistry(config.redis_url, config.namespace) as registry,
        RedisUsage(config.redis_url, config.namespace) as usage,
    ):
        core = RouterCore.assemble(
            config,
            identity=identity,
            registry=registry,
            prefill_dialer=prefill_dialer(opener),
            decode_dialer=decode_dialer(opener),
            rng=rng,
            metrics=RouterMetrics(meter()),
        )
        inference = Inference(
            core=core, model=model, text=text, grammars=grammars, rng=rng, tenants=tenants, limits=limits
        )
        core.outlook.metrics.watch_load(core.queue.waiting_ms, lambda: inference.num_requests)
        admin = RouterAdminServicer(core=core, model=model.name, inference=inference)
        door = make_app(
            core=core,
            inference=inference,
            model=model,
            text=text,
            offload=offload,
            registry=metrics,
            rng=rng,
            wall=time.time,
        )
        sync = RateSync(limits, usage, rng=rng, wall=time.time)
        try:
            await _run(
                core,
                stop,
                [core.fleet.run(), sync.run(), CertificateWatch(tls, meter()).run()],
                tls=tls,
                inference=inference,
                admin=admin,
                start_http=partial(_start_http, config, tls, door),
            )
        finally:
            core.close()


async def _start_http(config: RouterConfig, tls: TlsFiles, door: tuple[ASGIApp, Doorman]) -> HttpServer:
    app, doorman = door
    return await HttpServer.start(
        app,
        doorman,
        host=config.host,
        port=config.http_port,
        tls=tls,
        write_timeout_s=config.write_timeout_s,
        max_connections=max_connections(config),
    )


def max_connections(config: RouterConfig) -> int:
    """Four for each request that may run, as far as there are files for them."""
    wanted = 4 * config.max_requests
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return wanted
    # With few files a part of them: a port that takes nobody is of no use.
    room = max(most - RESERVED_FILES, most // 4)
    if room < wanted:
        log.warning("fewer http connections than wanted", wanted=wanted, max=room, open_files=most)
    return min(wanted, room)


async def _run(
    core: RouterCore,
    stop: asyncio.Event,
    services: Sequence[Awaitable[None]],
    *,
    tls: TlsFiles,
    inference: Inference,
    admin: RouterAdminServicer,
    start_http: Callable[[], Awaitable[HttpServer]],
) -> None:
    config = core.config
    public = Registration(
        name="baton.v1.InferenceService",
        add=partial(add_InferenceServiceServicer_to_server, InferenceServicer(inference)),
    )
    private = Registration(
        name="baton.v1.AdminService", add=partial(add_AdminServiceServicer_to_server, admin)
    )
    async with (
        await RpcServer.start(
            [public],
            host=config.host,
            port=config.port,
            credentials=tls.public_server_credentials(),
            # Room on each connection to refuse requests in our own words, and for calls that are no requests.
            max_calls=4 * config.max_requests,
            # Where nobody is answered without a key, nobody is told anything either.
            reflects=not config.tenants_file,
        ) as server,
        await RpcServer.start(
            [private],
            host=config.admin_host,
            port=config.admin_port,
            credentials=tls.server_credentials(),
            health_port=config.health_port,
        ) as admin_server,
        await start_http() as http_server,
    ):
        write_ready_file(
            config.ready_file,
            address=server.address,
            http_address=http_server.address,
            admin_address=admin_server.address,
            pid=os.getpid(),
        )
        await run_until(
            stop,
            *services,
            _be_ready(core.fleet, stop, (server, admin_server)),
            drain=partial(_leave, inference, (server, http_server), admin_server, config.drain_s),
        )


async def _be_ready(fleet: Fleet, stop: asyncio.Event, servers: Sequence[RpcServer]) -> None:
    """Ready from the first time that requests can be served: later losses of workers are waited for."""
    await fleet.completed()
    for server in servers:
        await server.set_health(ready=not stop.is_set())
    await asyncio.Event().wait()


async def _leave(
    inference: Inference, doors: Sequence[RpcServer | HttpServer], admin_server: RpcServer, grace_s: float
) -> None:
    """The admin port answers until the end, so that operators see what is left."""

    async def stop(grace_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for door in doors:
                group.create_task(door.stop(grace_s))

    await admin_server.set_health(ready=False)
    await inference.handover.drain(stop, grace_s)


def main() -> int:
    """Entry point."""
    config = load_config(RouterConfig, section="router", argv=sys.argv[1:], environ=os.environ)
    configure_logging(config.name, config.log_level)
    configure_tracing("baton-router", config.name, config.trace_file or None)
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    configure_metrics("baton-router", config.name, reader)
    try:
        return run(partial(serve, config, registry))
    finally:
        shutdown_metrics()
        shutdown_tracing()


if __name__ == "__main__":
    sys.exit(report_errors(main))
