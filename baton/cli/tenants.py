"""`baton tenants`: what the operator of a cluster with several tenants needs."""

from __future__ import annotations

import json
import sys

import typer

from baton.api_keys import ApiKey
from baton.cli.options import AsJson

tenants = typer.Typer(help="Tell callers apart: the routers' tenants_file holds digests of API keys.")


@tenants.callback()
def group() -> None:
    """Tell callers apart: the routers' tenants_file holds digests of API keys."""


@tenants.command("hash")
def hash_key(*, as_json: AsJson = False) -> None:
    """Print the digest of an API key, for the list of keys in a tenants_file.

    The key is asked for, or read from standard input: openssl rand -hex 32 | tee key | baton tenants hash
    """
    given = typer.prompt("API key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.read()
    # Several lines are several keys, or none: the blanks between them make it no key.
    digest = ApiKey(given.strip()).digest
    typer.echo(json.dumps({"digest": digest}) if as_json else digest)
