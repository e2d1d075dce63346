"""`baton workers`: the workers as whoever places them sees them."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from baton.cli import worker_words
from baton.cli.options import DEFAULT_CONTROL, AsJson, ControlAddress, with_tls
from baton.cli.whole_table import print_whole
from baton.cli.worker_words import duration, role_name, state_name
from baton.cluster.control import ControlClient
from baton.tls import TlsFiles
from baton.v1.pool_service_pb2 import ListWorkersResponse

_LEFT = ("name", "role", "state", "runner", "node")
_RIGHT = ("pid", "restarts", "attempts", "since")


@with_tls
def workers(*, address: ControlAddress = DEFAULT_CONTROL, tls: TlsFiles, as_json: AsJson = False) -> None:
    """Show which workers there are, who runs them, and how far each one is.

    `baton status` shows the same workers as a router sees them. Exit code 3: nothing answers at the address.
    """
    found = asyncio.run(_fetch(address, tls))
    if as_json:
        typer.echo(json.dumps(as_dict(found)))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    print_whole(console, workers_table(found))
    for line in notes(found):
        console.print(line, soft_wrap=True)


async def _fetch(address: str, tls: TlsFiles) -> ListWorkersResponse:
    async with ControlClient(address, opener=tls.opener()) as control:
        return await control.list_workers()


def workers_table(found: ListWorkersResponse) -> Table:
    """One row per worker; pid is a dash while it does not run."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for title in _LEFT:
        table.add_column(title, no_wrap=True)
    for title in _RIGHT:
        table.add_column(title, justify="right", no_wrap=True)
    for worker in found.workers:
        table.add_row(
            worker.name,
            role_name(worker.role),
            state_name(worker.state),
            worker.runner,
            worker.node or "-",
            str(worker.pid or "-"),
            str(worker.num_restarts),
            str(worker.num_attempts),
            duration(worker.since_ms),
        )
    return table


def notes(found: ListWorkersResponse) -> Iterator[str]:
    """What does not fit into the table: reasons, and how Ray is."""
    for worker in found.workers:
        if worker.reason:
            yield f"note: {worker.name} {state_name(worker.state)}: {worker.reason}"
    yield from _releases(found)
    if found.ray_silent_ms:
        silent = duration(found.ray_silent_ms)
        yield f"note: Ray's control service has not answered for {silent}: workers go on, none is started"
    if found.dashboard_url:
        yield f"\nRay dashboard: {found.dashboard_url}"


def _releases(found: ListWorkersResponse) -> Iterator[str]:
    """Who runs what, where that is not the same everywhere: in the middle of an upgrade."""
    named = defaultdict(list)
    for worker in found.workers:
        if worker.release:
            named[worker.release].append(worker.name)
    if len(named) > 1:
        for release, names in sorted(named.items()):
            yield f"note: release {release} is run by {', '.join(names)}"


def as_dict(found: ListWorkersResponse) -> dict[str, Any]:
    """The answer as plain JSON values, with the field names of the proto; every field is present."""
    return {
        "workers": [worker_words.as_dict(worker) for worker in found.workers],
        "dashboard_url": found.dashboard_url,
        "ray_silent_ms": found.ray_silent_ms,
    }
