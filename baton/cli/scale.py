"""`baton scale`: how many workers of each role there shall be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.confirm import confirm, must_ask
from baton.cli.fleet_wait import wait_for
from baton.cli.options import DEFAULT_CONTROL, AsJson, ControlAddress, NoWait, Yes, with_tls
from baton.cli.worker_words import count, role_name
from baton.cluster.control import ControlClient
from baton.cluster.defaults import MAX_WORKERS
from baton.errors import InternalError, InvalidRequest
from baton.tls import TlsFiles
from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.pool_service_pb2 import PoolWorker, ScaleResponse

# A pool may have more nodes, and a limit of its own: it is the other end that refuses.
_HELP = f"{{}} workers there shall be, 1 to {MAX_WORKERS} on one machine."

_DRAINING = pool_service_pb2.POOL_WORKER_STATE_DRAINING

Wanted = dict[common_pb2.Role.ValueType, int]


@with_tls
def scale(
    *,
    prefill: Annotated[
        int | None, typer.Option(min=1, help=_HELP.format("Prefill"), show_default="as many as now")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=1, help=_HELP.format("Decode"), show_default="as many as now")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")] = False,
    yes: Yes = False,
    address: ControlAddress = DEFAULT_CONTROL,
    tls: TlsFiles,
    no_wait: NoWait = False,
    timeout_s: Annotated[float, typer.Option(help="Longest wait.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Add workers, or drain and remove some; no request fails of it.

    Waits until those that are added serve and those that are too many are gone. On a terminal it asks before
    it removes any. Exit code 1: a worker cannot be started, or the wait was too long; 2: that many are
    refused; 3: nothing answers at the address.
    """
    given = {common_pb2.ROLE_PREFILL: prefill, common_pb2.ROLE_DECODE: decode}
    wanted = {role: number for role, number in given.items() if number is not None}
    if not wanted:
        raise typer.BadParameter("say how many, as in --decode 2", param_hint="'--prefill' / '--decode'")
    connect = partial(ControlClient, address, opener=tls.opener())
    if dry_run or must_ask(yes=yes):
        planned = asyncio.run(_planned(wanted, connect))
        if dry_run:
            _say_planned(planned, as_json=as_json)
            return
        if removals := [change for change in planned if change.num_workers < change.num_now]:
            typer.echo("\n".join(map(in_words, removals)), err=True)
            confirm("Remove them?", yes=yes)
    asyncio.run(_scale(wanted, connect, timeout_s=0.0 if no_wait else timeout_s, as_json=as_json))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What would become of a role."""

    role: str
    num_now: int
    num_workers: int


async def _planned(wanted: Wanted, connect: Callable[[], ControlClient]) -> list[Change]:
    async with connect() as control:
        workers = (await control.list_workers()).workers
    return [
        Change(
            role=role_name(role),
            num_now=sum(worker.role == role and worker.state != _DRAINING for worker in workers),
            num_workers=number,
        )
        for role, number in wanted.items()
    ]


def in_words(change: Change) -> str:
    """One line."""
    difference = change.num_workers - change.num_now
    if not difference:
        return f"{change.role}: {change.num_workers} already"
    verb = "start" if difference > 0 else "drain and remove"
    return f"{change.role}: {change.num_now} now; would {verb} {count(abs(difference), 'worker')}"


def _say_planned(planned: list[Change], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"planned": [asdict(change) for change in planned]}))
        return
    for change in planned:
        typer.echo(in_words(change))
    typer.echo("nothing was done")


async def _scale(
    wanted: Wanted, connect: Callable[[], ControlClient], *, timeout_s: float, as_json: bool
) -> None:
    all_changes = ScaleResponse()
    workers: list[PoolWorker] = []
    async with connect() as control:
        for role, number in wanted.items():
            response = await _set(control, role, number)
            all_changes.MergeFrom(response)
            if not as_json:
                for line in changes(role_name(role), number, response):
                    typer.echo(line)
        if timeout_s:
            still_open = partial(unsteady, wanted)
            workers = await wait_for(control, still_open, timeout_s=timeout_s, console=Console(stderr=True))
    if as_json:
        typer.echo(json.dumps({"added": [*all_changes.added], "removed": [*all_changes.removed]}))
    elif timeout_s:
        for role in wanted:
            number = sum(worker.role == role for worker in workers)
            typer.echo(f"{count(number, f'{role_name(role)} worker')} serving")


async def _set(control: ControlClient, role: common_pb2.Role.ValueType, number: int) -> ScaleResponse:
    try:
        return await control.scale(role, number)
    except InvalidRequest as error:
        # What the wire calls num_workers is an option here.
        message = error.message.replace("num_workers", f"--{role_name(role)}", 1)
        raise InvalidRequest(message, field=error.field) from None


def changes(role: str, number: int, response: ScaleResponse) -> Iterator[str]:
    """What one call has begun, in lines."""
    if response.added:
        yield f"starting {', '.join(response.added)}"
    if response.removed:
        yield f"draining {', '.join(response.removed)}"
    if not response.added and not response.removed:
        yield f"{role}: {number} already"


def unsteady(wanted: Wanted, workers: Sequence[PoolWorker]) -> list[PoolWorker]:
    """The workers of those roles that do not serve yet, or still drain; raises if one is given up."""
    chosen = [worker for worker in workers if worker.role in wanted]
    for worker in chosen:
        if worker.state == pool_service_pb2.POOL_WORKER_STATE_FAILED:
            raise InternalError(f"{worker.name} is given up: {worker.reason}; its log says more")
    return [worker for worker in chosen if worker.state != pool_service_pb2.POOL_WORKER_STATE_SERVING]
