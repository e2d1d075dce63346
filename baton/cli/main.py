"""The `baton` command: its options, its commands, its exit codes.

The help lists the exit codes. Each command lives in a module of its own; this one holds none.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated

import typer

from baton.cli.chat import chat
from baton.cli.demo import demo
from baton.cli.drain import drain
from baton.cli.explain import explain
from baton.cli.generate import generate
from baton.cli.pull import pull
from baton.cli.scale import scale
from baton.cli.status import status
from baton.cli.tenants import tenants
from baton.cli.up import up
from baton.cli.workers import workers
from baton.errors import (
    BatonError,
    ConfigError,
    IncompatiblePeer,
    InvalidRequest,
    Unauthenticated,
    Unavailable,
)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3

# What nobody but the one who typed the command can mend.
_FOR_THE_USER = InvalidRequest | ConfigError | Unauthenticated
# Whoever answers at an address without serving the call is not the one who was meant.
_NOBODY_THERE = Unavailable | IncompatiblePeer

_DISTRIBUTION = "baton-serve"


@dataclass(slots=True)
class _Options:
    debug: bool = False


app = typer.Typer(
    name="baton",
    help="Serve large language models with prefill and decode on different workers.",
    epilog=(
        "Exit codes: 0 done, 1 failed or the model cannot be used, 2 wrong usage or setting, "
        "3 nothing answers, 130 interrupted."
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (pull, up, status, workers, scale, drain, explain, generate, chat, demo):
    app.command()(_command)
app.add_typer(tenants, name="tenants")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"baton {version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that come before the command."""
    context.ensure_object(_Options).debug = debug
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def version() -> str:
    """Version of the installed distribution, or "unknown" in a bare source tree."""
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def exit_code(error: BatonError) -> int:
    """Exit code of an error: who has to act, the user, the network or us."""
    if isinstance(error, _NOBODY_THERE):
        return EXIT_UNREACHABLE
    return EXIT_USAGE if isinstance(error, _FOR_THE_USER) else EXIT_FAILED


def main() -> None:
    """Entry point of the `baton` script."""
    given = _Options()
    try:
        app(prog_name="baton", obj=given)
    except BatonError as error:
        if given.debug:
            raise
        sys.stderr.write(f"error: {error}\n")
        sys.exit(exit_code(error))
    except ModuleNotFoundError as error:
        if given.debug:
            raise
        sys.stderr.write(f"error: {error.name} is missing; install {_DISTRIBUTION}[all] for this command\n")
        sys.exit(EXIT_FAILED)
    except Exception as error:
        if given.debug:
            raise
        sys.stderr.write(f"error: {type(error).__name__}: {error} (--debug shows where)\n")
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
