"""What the user types in a conversation: lines that belong together, and the history of earlier ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from baton.cache import cache_dir

HISTORY_LENGTH = 1000
_QUOTES = '"""'


class ChatInput:
    """Reads messages. A message of several lines stands between triple quotes, or its lines end in \\.

    prompt: before the first line of a message; rest: before the others.
    """

    def __init__(self, prompt: str = "> ", rest: str = ". ") -> None:
        self._prompt = prompt
        self._rest = rest

    def read(self) -> str | None:
        """The next message, "" to ask again, or None when the user leaves."""
        try:
            return self._message().strip()
        except EOFError:
            sys.stdout.write("\n")
            return None
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            return ""

    def _message(self) -> str:
        line = input(self._prompt)
        if line.lstrip().startswith(_QUOTES):
            return self._quoted(line.lstrip().removeprefix(_QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(self._rest))
        return "\n".join(lines)

    def _quoted(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(input(self._rest))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines)


def history_path() -> Path:
    """Where the lines of earlier conversations are kept, for the arrow keys; only this user can read it."""
    return cache_dir() / "chat_history"


@contextmanager
def line_editing(*, keep_history: bool) -> Iterator[bool]:
    """Lets input() edit lines, where the platform can, which it yields; keeps what was typed if told to."""
    try:
        import readline  # noqa: PLC0415 - not on every platform; it takes over input() when imported
    except ImportError:
        yield False
        return
    readline.set_history_length(HISTORY_LENGTH)
    if not keep_history:
        yield True
        return
    path = history_path()
    _load(readline, path)
    try:
        yield True
    finally:
        _save(readline, path)


def _load(readline: ModuleType, path: Path) -> None:
    # A history that cannot be read is no reason not to talk; saving it will say so.
    if os.access(path, os.R_OK):
        readline.read_history_file(path)


def _save(readline: ModuleType, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        readline.write_history_file(path)
    except OSError as error:
        sys.stderr.write(f"the history is not kept: {error}\n")
