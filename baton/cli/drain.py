"""`baton drain`: one worker ends what it has, and leaves for good."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.cli import worker_words
from baton.cli.confirm import confirm, must_ask
from baton.cli.exit_codes import EXIT_USAGE
from baton.cli.fleet_wait import wait_for
from baton.cli.options import DEFAULT_CONTROL, AsJson, ControlAddress, NoWait, Yes, with_tls
from baton.cli.worker_words import count, duration, role_name, state_name
from baton.cluster.control import ControlClient
from baton.tls import TlsFiles
from baton.v1 import pool_service_pb2
from baton.v1.pool_service_pb2 import DrainRequest, DrainResponse, PoolWorker

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
    yes: Yes = False,
    no_wait: NoWait = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(help="Longest wait.", show_default=f"{_EXTRA_S:g} s beyond what it may take"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let a worker end what it has, then remove it: there is one less of its role from then on.

    It takes no new requests meanwhile; what it cannot end within its grace goes on at the others. On a
    terminal it asks first. Exit code 1: it is still there; 2: there is no such worker, or it is the last; 3:
    nothing answers at the address.
    """
    asyncio.run(
        _drain(
            partial(ControlClient, address, opener=tls.opener()),
            DrainRequest(name=name, dry_run=dry_run, force=force),
            yes=yes or dry_run,
            wait=not (dry_run or no_wait),
            timeout_s=timeout_s,
            as_json=as_json,
        )
    )


async def _drain(
    connect: Callable[[], ControlClient],
    request: DrainRequest,
    *,
    yes: bool,
    wait: bool,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    async with connect() as control:
        if must_ask(yes=yes):
            planned = await control.drain(request.name, dry_run=True, force=request.force)
            for line in described(planned):
                typer.echo(line, err=True)
            confirm(f"Drain {request.name}?", yes=yes)
        response = await control.drain(request.name, dry_run=request.dry_run, force=request.force)
        if not as_json:
            for line in described(response):
                typer.echo(line)
            if request.dry_run:
                need = "; it would need --force" if _needs_force(request, response) else ""
                typer.echo(f"nothing was done{need}")
        if wait:
            limit_s = response.grace_ms / 1000 + _EXTRA_S if timeout_s is None else timeout_s
            still_open = partial(still_there, response.worker)
            await wait_for(control, still_open, timeout_s=limit_s, console=Console(stderr=True))
    if as_json:
        typer.echo(json.dumps(as_dict(response)))
    elif wait:
        typer.echo(f"{request.name} is gone")
    if request.dry_run and _needs_force(request, response):
        # As the drain itself would end.
        raise typer.Exit(EXIT_USAGE)


def as_dict(response: DrainResponse) -> dict[str, Any]:
    """The answer as plain JSON values, with the field names of the proto: what was before the drain."""
    return {
        "worker": worker_words.as_dict(response.worker),
        "num_others": response.num_others,
        "grace_ms": response.grace_ms,
    }


def _needs_force(request: DrainRequest, response: DrainResponse) -> bool:
    is_of_no_use = response.worker.state == pool_service_pb2.POOL_WORKER_STATE_FAILED
    return not (request.force or response.num_others or is_of_no_use)


def described(response: DrainResponse) -> Iterator[str]:
    """What the worker holds, who is left, and how long it may take."""
    worker = response.worker
    process = f"process {worker.pid} on {worker.node}" if worker.pid else "no process"
    runner = "Ray actor, " if worker.runner == "ray" else ""
    yield (
        f"{worker.name} ({runner}{process}) is {state_name(worker.state)} "
        f"and holds {count(worker.num_attempts, 'attempt')}"
    )
    others = count(response.num_others, f"other {role_name(worker.role)} worker")
    yield f"{others} serving; it is gone within {duration(response.grace_ms)} at most"


def still_there(drained: PoolWorker, workers: Sequence[PoolWorker]) -> list[PoolWorker]:
    """The drained worker as it is now, or nobody. Its name may have been given to a new one since."""
    leaving = pool_service_pb2.POOL_WORKER_STATE_DRAINING
    return [
        worker
        for worker in workers
        if worker.name == drained.name and (worker.state == leaving or worker.pid == drained.pid)
    ]
