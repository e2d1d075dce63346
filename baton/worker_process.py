"""One worker served: its gRPC server, its health, its announcement, and the order of its end.

What both kinds of worker have in common once their engine is loaded, in a process of their own or inside
an actor. Knows no engine and no model.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from baton.advertise import advertised
from baton.certificate_watch import CertificateWatch
from baton.health import WorkerHealth, WorkerLoad
from baton.identity import Identity
from baton.ledger import LedgerServicer
from baton.logs import get_logger
from baton.metrics import meter
from baton.ports import WorkerInfo
from baton.process import run_until, write_ready_file
from baton.registry import Announcement, RedisRegistry, registering
from baton.rpc_server import Registration, RpcServer
from baton.tls import TlsFiles
from baton.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server

HEALTH_INTERVAL_S: Final = 0.25

log = get_logger(__name__)


class Worker(Protocol):
    """What is served: a prefill or a decode worker."""

    async def run(self) -> None:
        """Works until cancelled."""

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new, ends what it has within grace_s seconds, and hands over the rest."""

    def health(self) -> WorkerHealth:
        """How it is now."""

    def load(self) -> WorkerLoad:
        """How busy it is now."""

    def ledger(self) -> dict[str, int]:
        """Everything held for requests."""

    def totals(self) -> dict[str, int]:
        """Counts since the start."""


class ServeSettings(Protocol):
    """The settings of a worker that matter here; see their help texts."""

    @property
    def name(self) -> str:
        """Name of the worker."""

    @property
    def host(self) -> str:
        """Address to listen on."""

    @property
    def port(self) -> int:
        """Port to listen on."""

    @property
    def health_port(self) -> int | None:
        """Port of the health service alone, in plain text; None for none."""

    @property
    def advertise(self) -> str:
        """What to announce instead."""

    @property
    def redis_url(self) -> str:
        """The registry."""

    @property
    def namespace(self) -> str:
        """Prefix of the keys."""

    @property
    def drain_s(self) -> float:
        """Grace time, in seconds."""

    @property
    def ready_file(self) -> str:
        """Path, or empty."""


@dataclass(frozen=True, slots=True)
class Served:
    """A worker that serves and is announced. To be asked on the event loop that serves it."""

    info: WorkerInfo
    worker: Worker

    @property
    def address(self) -> str:
        """host:port as others dial it."""
        return self.info.address

    def health(self) -> WorkerHealth:
        """How it is now."""
        return self.worker.health()

    def load(self) -> WorkerLoad:
        """How busy it is now."""
        return self.worker.load()

    def totals(self) -> dict[str, int]:
        """Counts since its start, which only grow."""
        return self.worker.totals()


OnServing = Callable[[Served], object]


def ignore(_served: Served) -> None:
    """For those who ask nothing of a worker that serves."""


async def serve_worker(
    worker: Worker,
    services: Sequence[Registration],
    *,
    identity: Identity,
    settings: ServeSettings,
    tls: TlsFiles,
    stop: asyncio.Event,
    on_bound: Callable[[str], object],
    on_serving: OnServing,
) -> None:
    """Serves a worker until stop is set, then drains it and leaves.

    services: its own; the admin and health services are added here.
    on_bound: called with the address that others will dial, before anybody can.
    on_serving: called once the worker is announced, also where stop was set meanwhile.
    """
    admin = LedgerServicer(settings.name, identity.role, worker.ledger, worker.totals)
    add_admin = partial(add_AdminServiceServicer_to_server, admin)
    async with await RpcServer.start(
        [*services, Registration(name="baton.v1.AdminService", add=add_admin)],
        host=settings.host,
        port=settings.port,
        credentials=tls.server_credentials(),
        health_port=settings.health_port,
    ) as server:
        address = advertised(settings.advertise, name=settings.name, port=server.port) or server.address
        on_bound(address)
        info = WorkerInfo(
            name=settings.name,
            role=identity.role_name,
            incarnation=identity.incarnation,
            address=address,
        )
        async with (
            RedisRegistry(settings.redis_url, settings.namespace) as registry,
            registering(registry, info) as announcement,
        ):
            await _show_health(server, worker)
            write_ready_file(settings.ready_file, address=server.address, pid=os.getpid())
            on_serving(Served(info, worker))
            leave = partial(_drain, server, worker, announcement, settings.drain_s)
            watches = (_watch_health(server, worker), CertificateWatch(tls, meter()).run())
            # Steps go on while it drains, or nothing that is running could end.
            await run_until(stop, worker.run(), *watches, announcement.keep(), drain=leave)


async def _drain(server: RpcServer, worker: Worker, announcement: Announcement, grace_s: float) -> None:
    """Tells the registry while the worker drains: a Redis that is away costs no grace time, and a second at
    most where there is nothing to drain.
    """
    await asyncio.gather(_announce_leaving(announcement), worker.drain(grace_s), _show_health(server, worker))


async def _announce_leaving(announcement: Announcement) -> None:
    try:
        await announcement.update(replace(announcement.info, draining=True))
    except Exception:
        # The routers hear of the drain from the worker as well: what goes wrong here must not end it.
        log.exception("announcement failed", worker=announcement.info.name)


async def _watch_health(server: RpcServer, worker: Worker) -> None:
    while True:
        await _show_health(server, worker)
        await asyncio.sleep(HEALTH_INTERVAL_S)


async def _show_health(server: RpcServer, worker: Worker) -> None:
    health = worker.health()
    await server.set_health(ready=health.is_ready, alive=health.is_alive)
