"""`baton explain`: where one request's time went, and why it was placed as it was."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options import DEFAULT_ADMIN, AdminAddress, AsJson, with_tls
from baton.cli.text_input import open_stdout
from baton.cli.waterfall import waterfall
from baton.cluster.status import fetch_explain
from baton.route_explain import RouteExplain
from baton.tls import TlsFiles

# Where no terminal says how wide it is.
_WIDTH = 100


@with_tls
def explain(
    *,
    request_id: Annotated[
        str,
        typer.Argument(help="As `baton generate --verbose` shows it.", show_default="the last that ended"),
    ] = "",
    address: AdminAddress = DEFAULT_ADMIN,
    tls: TlsFiles,
    as_json: AsJson = False,
) -> None:
    """Show where a request's time went: one in flight, or one of the last that ended.

    Bars share one scale; one that is cut off ends in >. Exit code 2: the router does not know the request;
    3: nothing answers at the address.
    """
    found = asyncio.run(fetch_explain(request_id, address, opener=tls.opener()))
    answers = [RouteExplain.from_proto(answer) for answer in found.answers]
    open_stdout()
    if as_json:
        typer.echo(json.dumps({"answers": [dataclasses.asdict(answer) for answer in answers]}))
        return
    _draw(Console(highlight=False, markup=False, soft_wrap=True), answers)


def _draw(console: Console, answers: list[RouteExplain]) -> None:
    """One answer after the other, with an empty line between two."""
    width = console.width if console.is_terminal else _WIDTH
    in_ascii = not console.encoding.startswith("utf")
    for index, answer in enumerate(answers):
        if index:
            console.print()
        for line in waterfall(answer, width=width, in_ascii=in_ascii):
            console.print(line, soft_wrap=True)
