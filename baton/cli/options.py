"""The options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, get_type_hints

import typer

from baton.cluster.defaults import DEFAULT_ADMIN_ADDRESS, DEFAULT_CONTROL_ADDRESS
from baton.errors import ConfigError
from baton.targets import check_target
from baton.tls import TlsFiles


def check_address(address: str) -> str:
    """The address, host:port or one of gRPC's own names; raises typer.BadParameter for another text."""
    try:
        return check_target(address, "address")
    except ConfigError as error:
        raise typer.BadParameter(error.message) from None


Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="BATON_ADDRESS",
        callback=check_address,
        help="The router's public address, host:port.",
    ),
]
AdminAddress = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="BATON_ADMIN_ADDRESS",
        callback=check_address,
        help="The router's admin address, host:port.",
    ),
]
ControlAddress = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="BATON_CONTROL_ADDRESS",
        callback=check_address,
        help="Control port of `baton up` or a pool, host:port.",
    ),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait until it is done.")]
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
# Of an inner port, a router's or whoever's.
ClusterCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar="BATON_TLS_CA", help="PEM file: who signs the cluster's certificates."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        envvar="BATON_API_KEY_FILE",
        dir_okay=False,
        help="File with the API key.",
        show_default="the key in BATON_API_KEY",
    ),
]
InsecureKey = Annotated[
    bool, typer.Option("--insecure-key", help="Send the API key over plain text to another machine.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
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
        help="Name that the certificate of the other end carries.",
    ),
]

# A person waits for this; the SDK's own default suits a program that starts beside its router.
CONNECT_S = 2.0
DEFAULT_ADMIN = DEFAULT_ADMIN_ADDRESS
DEFAULT_CONTROL = DEFAULT_CONTROL_ADDRESS


def api_key(file: Path | None = None) -> str | None:
    """The key that says who is calling: the file's, else that of BATON_API_KEY.

    Never an argument: others can read those. Raises typer.BadParameter for a file that holds none.
    """
    if file is None:
        return os.environ.get("BATON_API_KEY") or None
    try:
        key = file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint="'--api-key-file'") from None
    if not key:
        raise typer.BadParameter(f"{file} is empty", param_hint="'--api-key-file'")
    return key


def with_tls(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command of an inner port the options of TLS; it gets what they name as `tls`."""

    @functools.wraps(command)
    def run(
        *,
        tls_ca: ClusterCa = None,
        tls_cert: TlsCert = None,
        tls_key: TlsKey = None,
        tls_server_name: TlsServerName = None,
        **given: object,
    ) -> None:
        files = {"ca": tls_ca, "cert": tls_cert, "key": tls_key, "server_name": tls_server_name}
        command(tls=TlsFiles(**{name: str(value or "") for name, value in files.items()}), **given)

    hints = get_type_hints(command, include_extras=True) | {
        "tls_ca": ClusterCa,
        "tls_cert": TlsCert,
        "tls_key": TlsKey,
        "tls_server_name": TlsServerName,
    }
    own = list(inspect.signature(command).parameters.values())
    added = list(inspect.signature(run, follow_wrapped=False).parameters.values())
    # typer reads a command's options from its signature and its annotations.
    kept = [item for item in (*own, *added) if item.name not in ("tls", "given")]
    options = [item.replace(annotation=hints[item.name]) for item in kept]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in options}
    return run
