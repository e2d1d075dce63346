"""Reads a prompt from an argument or from standard input, and refuses what is not text."""

from __future__ import annotations

import sys

import typer


def read_text(given: str, *, name: str) -> str:
    """The text that an argument stands for: itself, or all of standard input for "-".

    name: of the argument, for the message. Raises typer.BadParameter (exit code 2) for
    bytes that are not UTF-8, and for no text at all.
    """
    text = _read_stdin(name) if given == "-" else given
    try:
        # Bytes that are not UTF-8 arrive in an argument as lone surrogates.
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _refusal(name, f"it is not valid UTF-8 at character {error.start}") from None
    if not text:
        raise _refusal(name, "it is empty")
    return text


def _read_stdin(name: str) -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"standard input is not valid UTF-8 at byte {error.start}"
        raise _refusal(name, message) from None


def _refusal(name: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=f"'{name}'")


def open_stdout() -> None:
    """Lets standard output take any text: what its encoding lacks is replaced."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
