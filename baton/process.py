"""How every role runs as a process: signals, the file that says it is ready, and its end.

A role is a coroutine that gets an event; it serves until the event is set, then
drains and returns. SIGTERM and SIGINT set the event.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from baton.errors import BatonError
from baton.logs import get_logger

log = get_logger(__name__)

Role = Callable[[asyncio.Event], Awaitable[None]]


def run(role: Role) -> int:
    """Runs a role to its end and returns the exit status: 0 after a drain, 1 after a BatonError."""
    try:
        asyncio.run(_until_stopped(role))
    except BatonError as error:
        log.error("cannot run", code=error.code, reason=error.message, field=error.field)
        return 1
    return 0


def report_errors(main: Callable[[], int]) -> int:
    """Runs an entry point; a BatonError that escapes it, from its settings, is one line and status 2."""
    try:
        return main()
    except BatonError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2


def write_ready_file(path: str, **facts: object) -> None:
    """Writes facts such as bound addresses as JSON, atomically; nothing if path is empty."""
    if not path:
        return
    partial = Path(f"{path}.part")
    partial.write_text(json.dumps(facts), encoding="utf-8")
    partial.replace(path)


async def run_until(
    stop: asyncio.Event, *services: Awaitable[None], drain: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Runs services until stop is set, then drains, then cancels them.

    drain: called once stop is set, while the services still run.
    A service that ends before is an error, and is raised.
    """
    stopped = asyncio.ensure_future(stop.wait())
    tasks = [asyncio.ensure_future(service) for service in services]
    try:
        done, _ = await asyncio.wait((stopped, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if stopped not in done:
            raise RuntimeError("a service ended although nobody stopped it")
        if drain is not None:
            await drain()
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in (stopped, *tasks):
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)


def stop_on_signals(stop: asyncio.Event) -> None:
    """Lets SIGTERM and SIGINT set the event; call it again after a library has taken the signals over."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def _until_stopped(role: Role) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    await role(stop)
