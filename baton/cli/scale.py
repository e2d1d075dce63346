"""`baton scale`: how many workers of each role there shall be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.fleet_wait import wait_for
from baton.cli.options import DEFAULT_CONTROL, AsJson, ControlAddress, NoWait, with_tls
from baton.cli.worker_words import count, role_name
from baton.cluster.config import MAX_WORKERS
from baton.cluster.control import ControlClient
from baton.errors import InternalError, InvalidRequest
from baton.tls import TlsFiles
from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.pool_service_pb2 import PoolWorker, ScaleResponse

# A pool may have more nodes, and a limit of its own: it is the other end that refuses.
_HELP = f"{{}} workers there shall be, 1 to {MAX_WORKERS} on one machine."

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
    address: ControlAddress = DEFAULT_CONTROL,
    tls: TlsFiles,
    no_wait: NoWait = False,
    timeout_s: Annotated[float, typer.Option(help="Longest wait.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Add workers, or drain and remove some; no request fails of it.

    Waits until those that are added serve and those that are too many are gone. Exit code 1: a worker
    cannot be started, or the wait was too long; 2: that many are refused; 3: nothing answers at the address.
    """
    given = {common_pb2.ROLE_PREFILL: prefill, common_pb2.ROLE_DECODE: decode}
    wanted = {role: number for role, number in given.items() if number is not None}
    if not wanted:
        raise typer.BadParameter("say how many, as in --decode 2", param_hint="'--prefill' / '--decode'")
    connect = partial(ControlClient, address, opener=tls.opener())
    asyncio.run(_scale(wanted, connect, timeout_s=0.0 if no_wait else timeout_s, as_json=as_json))


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
