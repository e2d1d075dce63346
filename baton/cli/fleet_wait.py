"""Waits at a control port until the workers are as they were asked to be, and says what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console

from baton.cli.progress_lines import ProgressLines
from baton.cli.worker_words import listed
from baton.cluster.control import ControlClient
from baton.errors import DeadlineExceeded
from baton.v1 import pool_service_pb2
from baton.v1.pool_service_pb2 import PoolWorker

POLL_S = 0.25
_UNHEALTHY = pool_service_pb2.POOL_WORKER_STATE_UNHEALTHY

# Which of the workers are still to be waited for.
Open = Callable[[Sequence[PoolWorker]], list[PoolWorker]]


async def wait_for(
    control: ControlClient, still_open: Open, *, timeout_s: float, console: Console
) -> list[PoolWorker]:
    """Returns the workers once none is left to be waited for; raises DeadlineExceeded after timeout_s."""
    waiting: list[PoolWorker] = []
    try:
        async with asyncio.timeout(timeout_s), ProgressLines(console) as progress:
            said = ""
            while True:
                workers = list((await control.list_workers()).workers)
                waiting = still_open(workers)
                if not waiting:
                    return workers
                unhealthy = [worker for worker in waiting if worker.state == _UNHEALTHY]
                if (line := f"waiting for {listed(waiting)}{_reasons(unhealthy)}") != said:
                    said = line
                    progress.show(line)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise DeadlineExceeded(
            f"not done within {timeout_s:g} s: {listed(waiting)}{_reasons(waiting)}. It goes on; "
            "`baton workers` shows how far it is"
        ) from None


def _reasons(workers: Iterable[PoolWorker]) -> str:
    return "".join(f"; {worker.name}: {worker.reason}" for worker in workers if worker.reason)
