"""Kills the process groups of a cluster when the process that started them is gone.

The tether ends our own children; what those started, Ray's agents for example, may
outlive a killed parent by a minute. The guard is a process that reads group ids from
a pipe and, at the pipe's end, kills the groups it still knows. Run as a script
it imports nothing of Baton and nothing that is installed, so it starts fast.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterable
from contextlib import suppress
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


def follow(lines: Iterable[str]) -> set[int]:
    """The groups that were named and not forgotten when the lines ended."""
    groups: set[int] = set()
    for line in lines:
        group_id = int(line[1:])
        if line[0] == "+":
            groups.add(group_id)
        else:
            groups.discard(group_id)
    return groups


def _main() -> None:
    # Only the end of the pipe ends the guard.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group_id in follow(sys.stdin):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group_id, signal.SIGKILL)


if __name__ == "__main__":
    _main()
