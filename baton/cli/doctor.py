"""`baton doctor`: looks for what keeps Baton from working well."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from baton.cli.exit_codes import EXIT_FAILED
from baton.cli.options import AsJson, ConfigFile, api_key, check_address, with_tls
from baton.cli.worker_words import count
from baton.client import AsyncClient
from baton.client_tls import TlsConfig, opener
from baton.cluster.config import ClusterConfig
from baton.cluster.defaults import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS
from baton.config import explain_config
from baton.doctor import cluster_check, devices, machine, ports, redis_check, versions
from baton.doctor.check import Check, ok, problem, warning
from baton.errors import BatonError, ConfigError
from baton.model_shelf import pulled_models
from baton.tls import TlsFiles

_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}
_PORTS = ("port", "http_port", "admin_port", "control_port", "dashboard_port")


@with_tls
def doctor(
    *,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="BATON_ADMIN_ADDRESS",
            callback=lambda given: given if given is None else check_address(given),
            help="A router's admin address, which should answer then.",
            show_default=f"{DEFAULT_ADMIN_ADDRESS}, if one is there",
        ),
    ] = None,
    tls: TlsFiles,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and the cluster for what keeps Baton from working well.

    Each check is ok, a warning, or a problem, and says what to do. It works with nothing running, and changes
    nothing. Exit code 1: there is a problem.
    """
    found: list[Check] = []
    console = Console(highlight=False, markup=False, soft_wrap=True)
    argv = [f"--config={config}"] if config else []
    asyncio.run(_look(found, None if as_json else console, address, tls, argv))
    counts = {state: sum(check.state == state for check in found) for state in _STYLES}
    if as_json:
        typer.echo(json.dumps({"counts": counts, "checks": [asdict(check) for check in found]}))
    else:
        problems = f"{count(counts['warning'], 'warning')}, {count(counts['problem'], 'problem')}"
        console.print(f"\n{counts['ok']} ok, {problems}")
    if counts["problem"]:
        raise typer.Exit(EXIT_FAILED)


async def _look(
    found: list[Check], console: Console | None, address: str | None, tls: TlsFiles, argv: list[str]
) -> None:
    async for check in _checks(address, tls, argv):
        found.append(check)
        if console is not None:
            for line in shown(check):
                console.print(line)


def shown(check: Check) -> Iterator[Text]:
    """One line, and a second one with the remedy."""
    line = Text(f"{check.state:>7}", style=_STYLES[check.state])
    line.append(f"  {check.name}: {check.found}", style="default")
    yield line
    if check.remedy:
        yield Text(f"         -> {check.remedy}")


async def _checks(address: str | None, tls: TlsFiles, argv: list[str]) -> AsyncIterator[Check]:
    for group in (machine.checks(), versions.checks(), devices.checks(), _models()):
        for check in group:
            yield check
    try:
        settings = _cluster_settings(argv)
    except ConfigError as error:
        yield problem("settings", error.message, "`baton config show cluster` says where each one comes from")
        settings = {}
    for check in ports.checks({name: int(settings.get(name, 0)) for name in _PORTS}):
        yield check
    async for check in redis_check.checks(str(settings.get("redis_url", "")), time.time):
        yield check
    status, router = await cluster_check.find(
        address or DEFAULT_ADMIN_ADDRESS, tls.opener(), is_expected=address is not None
    )
    yield router
    if status is not None:
        for check in cluster_check.cluster(status):
            yield check
        async for check in _public(tls):
            yield check


async def _public(tls: TlsFiles) -> AsyncIterator[Check]:
    """The port that clients use, of a cluster that is there."""
    address = os.environ.get("BATON_ADDRESS") or DEFAULT_ADDRESS
    trusted = replace(TlsConfig.trusting(tls.ca), server_name=tls.server_name) if tls.ca else None
    opens = opener(trusted)
    async with AsyncExitStack() as stack:
        try:
            connecting = AsyncClient.connect(address, timeout_s=2.0, tls=trusted, api_key=api_key())
            client = await stack.enter_async_context(await connecting)
        except BatonError as error:
            yield warning("public port", error.message, "name it with BATON_ADDRESS")
            return
        async for check in cluster_check.public_port(address, opens, client):
            yield check


def _cluster_settings(argv: list[str]) -> dict[str, Any]:
    """What `baton up` would run with."""
    origins = explain_config(ClusterConfig, section="cluster", argv=argv, environ=os.environ)
    return {origin.name: origin.value for origin in origins}


def _models() -> Iterator[Check]:
    """What has been pulled."""
    usable = [model.name for model in pulled_models() if not model.problem]
    yield ok("models", f"pulled: {', '.join(usable) or 'none'}")
    for model in pulled_models():
        if model.problem:
            yield warning(f"model {model.name}", model.problem, "pull it again, or remove its folder")
