"""`baton drain`: one worker ends what it has, and leaves for good."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.fleet_wait import wait_for
from baton.cli.options import DEFAULT_CONTROL, ControlAddress, NoWait, with_tls
from baton.cli.worker_words import count, duration, role_name, state_name
from baton.cluster.control import ControlClient
from baton.tls import TlsFiles
from baton.v1 import pool_service_pb2
from baton.v1.pool_service_pb2 import DrainResponse, PoolWorker

# Beyond the grace that the other end states: what it takes to notice, and to ask.
_EXTRA_S = 10.0


@with_tls
def drain(
    *,
    name: Annotated[str, typer.Argument(help="The worker, as `baton workers` names it.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if it is the last of its role.")] = False,
    address: ControlAddress = DEFAULT_CONTROL,
    tls: TlsFiles,
    no_wait: NoWait = False,
) -> None:
    """Let a worker end what it has, then remove it: there is one less of its role from then on.

    It takes no new requests meanwhile; what it cannot end within its grace goes on at the others. Exit
    code 1: it is still there; 2: there is no such worker, or it is the last; 3: nothing answers at the
    address.
    """
    asyncio.run(_drain(name, address, tls, dry_run=dry_run, force=force, wait=not no_wait))


async def _drain(name: str, address: str, tls: TlsFiles, *, dry_run: bool, force: bool, wait: bool) -> None:
    async with ControlClient(address, opener=tls.opener()) as control:
        response = await control.drain(name, dry_run=dry_run, force=force)
        for line in described(response, dry_run=dry_run):
            typer.echo(line)
        if dry_run or not wait:
            return
        still_open = partial(still_there, response.worker)
        timeout_s = response.grace_ms / 1000 + _EXTRA_S
        await wait_for(control, still_open, timeout_s=timeout_s, console=Console(stderr=True))
    typer.echo(f"{name} is gone")


def described(response: DrainResponse, *, dry_run: bool) -> Iterator[str]:
    """What the worker holds, who is left, and how long it may take."""
    worker = response.worker
    process = f"process {worker.pid} on {worker.node}" if worker.pid else "no process"
    runner = "Ray actor, " if worker.runner == "ray" else ""
    yield (
        f"{worker.name} ({runner}{process}) is {state_name(worker.state)} "
        f"and holds {count(worker.num_attempts, 'attempt')}"
    )
    others = count(response.num_others, f"other {role_name(worker.role)} worker")
    yield f"{others} serving; it is gone within {duration(response.grace_ms)}"
    if dry_run:
        need = "" if response.num_others else "; it would need --force"
        yield f"nothing was done{need}"


def still_there(drained: PoolWorker, workers: Sequence[PoolWorker]) -> list[PoolWorker]:
    """The drained worker as it is now, or nobody. Its name may have been given to a new one since."""
    leaving = pool_service_pb2.POOL_WORKER_STATE_DRAINING
    return [
        worker
        for worker in workers
        if worker.name == drained.name and (worker.state == leaving or worker.pid == drained.pid)
    ]
