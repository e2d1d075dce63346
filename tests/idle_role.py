"""A role without an engine, for pools on a real Ray: it serves nothing and leaves when it is told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.health import WorkerHealth, WorkerLoad
from baton.pool.actor import WorkerActor
from baton.pool.worker_pool import WorkerPool
from baton.ports import WorkerInfo
from baton.served_role import ServedRole
from baton.worker_process import OnServing, Served, ignore

TOTALS = {"tokens": 7}
LOAD = WorkerLoad(num_attempts=3, num_running=2, num_waiting=1, num_free_blocks=5, num_blocks=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleConfig:
    """Settings of an idle worker.

    breaks: "" for a worker that serves, "start" for one that cannot.
    """

    name: str = "decode-0"
    host: str = "127.0.0.1"
    port: int = 0
    ready_file: str = ""
    drain_s: float = 1.0
    log_level: str = "info"
    log_file: str = ""
    trace_file: str = ""
    breaks: str = ""


class IdleWorker:
    """A worker of fixed load."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def drain(self, grace_s: float) -> None:
        await asyncio.sleep(0)

    def health(self) -> WorkerHealth:
        return WorkerHealth(is_ready=True, is_alive=True)

    def load(self) -> WorkerLoad:
        return LOAD

    def ledger(self) -> dict[str, int]:
        return {}

    def totals(self) -> dict[str, int]:
        return TOTALS


async def serve(config: IdleConfig, stop: asyncio.Event, *, on_serving: OnServing = ignore) -> None:
    if config.breaks == "start":
        raise ConfigError("breaks is 'start'; it must be empty", field="breaks")
    info = WorkerInfo(name=config.name, role="decode", incarnation=1, address=f"{config.host}:1")
    on_serving(Served(info, IdleWorker()))
    await stop.wait()


class DecodeWorker(WorkerActor):
    """Ray names processes by their actor's class, and baton.pool.leave_node finds them by that name."""

    role = ServedRole("decode", IdleConfig, serve)


class IdlePool(WorkerPool):
    actor_class = DecodeWorker
