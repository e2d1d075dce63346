"""Clears up after a cluster when the process that started it is gone: kills groups, removes folders.

The tether ends our own children; what those started, Ray's agents for example, may
outlive a killed parent by a minute. The guard is a process that reads group ids and
folders from a pipe and, at the pipe's end, clears those it still knows. Run as a script
it imports nothing of Baton and nothing that is installed, so it starts fast.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self


class Guard:
    """The parent's end. `async with Guard() as guard: guard.watch(pid)`."""

    def __init__(self) -> None:
        self._process: Process | None = None

    def watch(self, group_id: int) -> None:
        """Kills this process group if this process dies before forget()."""
        self._tell(f"+{group_id}\n")

    def forget(self, group_id: int) -> None:
        """The group has ended; its id may belong to others soon."""
        self._tell(f"-{group_id}\n")

    def own(self, folder: Path) -> None:
        """Removes this temporary folder at the end, whatever that is."""
        self._tell(f"={folder}\n")

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", __file__),
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=DEVNULL,
            start_new_session=True,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            await process.wait()

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(line.encode())


def follow(lines: Iterable[str]) -> tuple[set[int], set[str]]:
    """The groups that were named and not forgotten when the lines ended, and the folders to remove."""
    groups: set[int] = set()
    folders: set[str] = set()
    for line in lines:
        kind, value = line[0], line[1:].rstrip("\n")
        if kind == "+":
            groups.add(int(value))
        elif kind == "-":
            groups.discard(int(value))
        else:
            folders.add(value)
    return groups, folders


def _main() -> None:
    # Only the end of the pipe ends the guard.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups, folders = follow(sys.stdin)
    for group_id in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group_id, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
