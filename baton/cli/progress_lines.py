"""Says what a command waits for: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status

# Plain lines stay: one that is not new is said again this long after the last, in seconds.
LINE_INTERVAL_S = 15.0


class ProgressLines:
    """Shows one line at a time with the seconds passed, and says it again while nothing changes.

    `async with ProgressLines(console) as progress: progress.show("waiting for prefill-0")`
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner = Status("", console=console) if console.is_terminal else None
        self._text = ""
        self._since_s = 0.0
        self._due_s = 0.0

    def show(self, text: str) -> None:
        """A new line."""
        self._text = text
        self._say()

    async def __aenter__(self) -> Self:
        self._since_s = time.monotonic()
        if self._spinner is not None:
            self._spinner.start()
        self._ticking = asyncio.create_task(self._tick(), name="progress")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticking.cancel()
        with suppress(asyncio.CancelledError):
            await self._ticking
        if self._spinner is not None:
            self._spinner.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
            # A new line may have been said meanwhile.
            if time.monotonic() >= self._due_s:
                self._say()

    def _say(self) -> None:
        self._due_s = time.monotonic() + (LINE_INTERVAL_S if self._spinner is None else 1.0)
        if not self._text:
            return
        line = f"{self._text} ({time.monotonic() - self._since_s:.0f} s)"
        if self._spinner is not None:
            self._spinner.update(escape(line))
        else:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
