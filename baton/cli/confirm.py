"""Asks before what cannot be undone, where there is somebody to ask."""

from __future__ import annotations

import sys

import typer


def must_ask(*, yes: bool) -> bool:
    """Whether confirm() would ask."""
    return not yes and sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Returns if the user agrees, or cannot be asked: a script says what it wants.

    Ends the command with exit code 1 otherwise.
    """
    if must_ask(yes=yes):
        typer.confirm(question, abort=True, err=True)
