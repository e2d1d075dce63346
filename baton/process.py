"""How every role runs as a process: signals, the file that says it is ready, and its end.

A role is a coroutine that gets an event; it serves until the event is set, then
drains and returns. SIGTERM and SIGINT set the event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from baton.errors import BatonError
from baton.exit_status import FAILED, status_of
from baton.logs import get_logger

log = get_logger(__name__)

ResultT = TypeVar("ResultT")
Role = Callable[[asyncio.Event], Awaitable[None]]


def run(role: Role) -> int:
    """Runs a role to its end. Returns its status: 0 after a drain, else that of the error, which it logs."""
    try:
        asyncio.run(_until_stopped(role))
    except BatonError as error:
        log.error("cannot run", code=error.code, reason=error.message, field=error.field)
        return status_of(error)
    except Exception:
        log.exception("failed")
        return FAILED
    return 0


def report_errors(main: Callable[[], int]) -> int:
    """Runs an entry point and returns its status, whatever escapes it, so that leave() can follow.

    A BatonError is one line and its status, a defect a traceback.
    """
    try:
        return main()
    except BatonError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return status_of(error)
    except Exception:  # noqa: BLE001  (there is nobody above to raise it to)
        traceback.print_exc()
        return FAILED


def leave(status: int) -> NoReturn:
    """Ends a process whose threads may still be inside native code, as a model that is being loaded is.

    Where the interpreter takes itself down under such a thread, the process aborts, whatever its status was
    to be.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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
    A service that ends before is an error, and is raised, as is one that fails while draining.
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
            await _beside(tasks, drain())
    finally:
        for task in (stopped, *tasks):
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)


async def unless_stopped(stop: asyncio.Event, work: Awaitable[ResultT]) -> ResultT | None:
    """What work comes to; None, with work cancelled, if stop is set before it is done.

    For what takes long while a role starts: nobody wants to wait for a model that will not be used.
    """
    stopped = asyncio.ensure_future(stop.wait())
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((stopped, task), return_when=asyncio.FIRST_COMPLETED)
        return None if stop.is_set() else task.result()
    finally:
        for future in (stopped, task):
            future.cancel()
        await asyncio.gather(stopped, task, return_exceptions=True)


async def _beside(tasks: Sequence[asyncio.Future[None]], drain: Awaitable[None]) -> None:
    """Drains while the tasks run. One that fails is raised at once: nothing would come of waiting."""
    running = asyncio.gather(*tasks)
    draining = asyncio.ensure_future(drain)
    try:
        await asyncio.wait((running, draining), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        await draining
    finally:
        draining.cancel()
        running.cancel()
        await asyncio.gather(draining, running, return_exceptions=True)


def stop_on_signals(stop: asyncio.Event) -> None:
    """Lets SIGTERM and SIGINT set the event; call it again after a library has taken the signals over.

    Each ends the process at once when it comes a second time: nobody has to wait for a drain.
    """
    loop = asyncio.get_running_loop()

    def heard(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heard, number)


async def _until_stopped(role: Role) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    await role(stop)
