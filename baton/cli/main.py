"""The `baton` command: its options, and what becomes of errors.

The commands are listed in baton/cli/commands.py, the exit codes in baton/cli/exit_codes.py.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from baton.cli.commands import HELP_OPTIONS, Commands
from baton.cli.exit_codes import EXIT_FAILED, exit_code, in_words
from baton.errors import BatonError

_DISTRIBUTION = "baton-serve"
_EXAMPLES = (
    'Examples: `baton demo` shows a whole cluster, `baton up` starts one, `baton chat "Hello"` asks it, '
    "`baton doctor` looks for what may be wrong."
)


@dataclass(slots=True)
class _Options:
    debug: bool = False


app = typer.Typer(
    name="baton",
    cls=Commands,
    help="Serve large language models with prefill and decode on different workers.",
    epilog=f"{_EXAMPLES}\n\n{in_words()}",
    context_settings=HELP_OPTIONS,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"baton {version()}")
        raise typer.Exit


def _drop_colors(wanted: bool) -> None:
    if wanted:
        # The variable that rich, and whatever else writes to a terminal, looks at.
        os.environ["NO_COLOR"] = "1"


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _no_color: Annotated[
        bool,
        typer.Option("--no-color", callback=_drop_colors, is_eager=True, help="No colors; as NO_COLOR=1."),
    ] = False,
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
    from importlib import metadata  # noqa: PLC0415 - slow, and hardly ever needed

    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


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
    except OSError as error:
        if given.debug:
            raise
        # Of a file or a pipe, as a full disk is; what a peer does is an error of Baton's own.
        place = f": {error.filename}" if error.filename else ""
        sys.stderr.write(f"error: {error.strerror or error}{place}\n")
        sys.exit(EXIT_FAILED)
    except Exception as error:
        if given.debug:
            raise
        sys.stderr.write(f"error: {type(error).__name__}: {error} (--debug shows where)\n")
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
