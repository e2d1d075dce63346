"""`baton ready`: whether a router takes requests."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.exit_codes import EXIT_NOT_READY
from baton.cli.options import Address, AsJson, TlsCa
from baton.cli.progress_lines import ProgressLines
from baton.client_tls import opener
from baton.cluster.defaults import DEFAULT_ADDRESS
from baton.connection import KEY_VARIABLE, Connection
from baton.readiness import wait_ready
from baton.rpc import OpenChannel


def ready(
    *,
    address: Address = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0.0, help="Seconds to wait for it.", show_default="ask once")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Say whether a router takes requests, and wait for it if told to.

    It needs no API key. Exit code 0: it does; 4: it is there, but not ready; 3: nothing answers at the
    address.
    """
    connection = Connection.resolve(
        address, tls=None, tls_ca=tls_ca, api_key=None, insecure_key=False, environ=_without_key()
    )
    opens = opener(connection.tls)
    found = asyncio.run(_wait(address, opens, wait_s))
    if as_json:
        typer.echo(json.dumps({"address": address, "ready": found}))
    else:
        typer.echo("ready" if found else "not ready")
    if not found:
        raise typer.Exit(EXIT_NOT_READY)


def _without_key() -> dict[str, str]:
    """The environment: a key is not asked for, and would not be sent."""
    return {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}


async def _wait(address: str, opens: OpenChannel, wait_s: float) -> bool:
    async with ProgressLines(Console(stderr=True)) as progress:
        said = ""

        def say(line: str) -> None:
            nonlocal said
            if line != said:
                said = line
                progress.show(f"{address}: {line}")

        return await wait_ready(address, opens, wait_s=wait_s, waiting=say)
