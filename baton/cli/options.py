"""The options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from baton.client import DEFAULT_TARGET
from baton.cluster.status import DEFAULT_ADMIN_ADDRESS

Address = Annotated[
    str, typer.Option("--address", envvar="BATON_ADDRESS", help="The router's public address, host:port.")
]
AdminAddress = Annotated[
    str,
    typer.Option("--address", envvar="BATON_ADMIN_ADDRESS", help="The router's admin address, host:port."),
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.", show_default="the router's")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens at least this fraction of the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer.", show_default="drawn")]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Deadline in seconds.", show_default="none")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Timings on standard error.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", envvar="BATON_CONFIG", help="TOML file.", dir_okay=False)
]
TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar="BATON_TLS_CA", help="PEM file: who signed the router's certificate."),
]
InsecureKey = Annotated[
    bool, typer.Option("--insecure-key", help="Send BATON_API_KEY over plain text to another machine.")
]
TlsCert = Annotated[
    Path | None,
    typer.Option("--tls-cert", envvar="BATON_TLS_CERT", help="PEM file: a certificate of the cluster."),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", envvar="BATON_TLS_KEY", help="PEM file: its private key.")
]
TlsServerName = Annotated[
    str | None,
    typer.Option(
        "--tls-server-name",
        envvar="BATON_TLS_SERVER_NAME",
        help="Name that the router's certificate carries.",
    ),
]

# A person waits for this; the SDK's own default suits a program that starts beside its router.
CONNECT_S = 5.0
DEFAULT_ADDRESS = DEFAULT_TARGET
DEFAULT_ADMIN = DEFAULT_ADMIN_ADDRESS


def api_key() -> str | None:
    """The key that says who is calling. From BATON_API_KEY only: others can read a command's arguments."""
    return os.environ.get("BATON_API_KEY") or None
