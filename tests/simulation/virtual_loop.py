"""An event loop on virtual time, and processes that can be stopped on it.

Owns the clock and who may run: every callback carries the process it belongs to
in its context, so a process can be paused (its callbacks wait, time goes on) or
killed (they wait for ever) without knowing it. Must not know networks or Baton.

The clock jumps to the next timer whenever nothing is ready. The order of ready
callbacks is asyncio's own; nothing here reads a wall clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import selectors
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: nobody will ever run again."""


class State(Enum):
    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class Process:
    """One life of a node: its tasks, and whether they may run.

    name: of the node. Tasks that a process starts belong to it, and so do theirs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = State.RUNNING
        self.tasks: list[asyncio.Task[Any]] = []
        # What no task may do: end with an error that nobody expected.
        self.failures: list[str] = []
        self._held: list[asyncio.Handle] = []
        self._context = contextvars.Context()
        self._context.run(PROCESS.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Starts a task inside the process."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name, context=self._context.copy())
        task.add_done_callback(self._ended, context=NOBODY)
        return task

    def living(self) -> list[str]:
        """Names of its tasks that have not ended."""
        self.tasks = [task for task in self.tasks if not task.done()]
        return [task.get_name() for task in self.tasks]

    def pause(self) -> None:
        """Its callbacks wait from now on."""
        self.state = State.PAUSED

    def kill(self) -> None:
        """Its callbacks never run again."""
        self.state = State.DEAD

    def resume(self, loop: VirtualLoop) -> None:
        """What waited runs now, in order."""
        self.state = State.RUNNING
        held, self._held = self._held, []
        loop.run_again(held)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(f"{self.name}: {task.get_name()} ended with {task.exception()!r}")

    def hold(self, handle: asyncio.Handle) -> None:
        self._held.append(handle)


PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")
NOBODY = contextvars.Context()


class _Handle(asyncio.Handle):
    __slots__ = ()

    def _run(self) -> None:
        if _may_run(self):
            super()._run()


class _Timer(asyncio.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        if _may_run(self):
            super()._run()


def _may_run(handle: asyncio.Handle) -> bool:
    process = handle._context.get(PROCESS)
    if process is None or process.state is State.RUNNING:
        return True
    process.hold(handle)
    return False


class _ClockSelector(selectors.BaseSelector):
    """Never waits: it moves the clock instead."""

    def __init__(self) -> None:
        self.now = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"nothing will ever happen after {self.now:.3f} s")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop on a clock that jumps."""

    def __init__(self) -> None:
        self._clock = _ClockSelector()
        self.errors: list[str] = []
        super().__init__(self._clock)
        self._clock_resolution = 1e-9
        self.set_exception_handler(self._record_error)
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._clock.now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def run_again(self, handles: list[asyncio.Handle]) -> None:
        """Handles that were held back run next, in this order."""
        self._ready.extend(handles)

    def _record_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context['message']}: {error!r}")


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any],
    context: contextvars.Context | None = None,
) -> asyncio.Task[Any]:
    task = asyncio.Task(coroutine, loop=loop, context=context)
    process = PROCESS.get(None) if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks.append(task)
    return task
