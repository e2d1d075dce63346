"""An event loop on virtual time, and processes that can be stopped on it.

Owns the clock and who may run: every callback carries the process it belongs to
in its context, so a process can be paused (its callbacks wait, time goes on) or
killed (they wait for ever) without knowing it. Must not know networks or Baton.

The clock jumps to the next timer whenever nothing is ready. The order of ready
callbacks is asyncio's own, first come first served; nothing here reads a wall clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
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


class VirtualLoop(asyncio.BaseEventLoop):
    """asyncio's own loop on a clock that jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self._now = 0.0
        # Ordered by time, then by age: timers of the same time fire in the order they were set.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self.set_exception_handler(self._record_error)
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def run_again(self, handles: list[asyncio.Handle]) -> None:
        """Handles that were held back run next, in this order."""
        self._ready.extend(handles)

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            self._jump()
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is None or process.state is State.RUNNING:
                handle._run()
            else:
                process.hold(handle)

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"nothing will ever happen after {self._now:.3f} s")
        self._now = max(self._now, timers[0][0])

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes."""

    def _write_to_self(self) -> None:
        """There is no other thread that this loop could be woken by."""

    def _process_events(self, event_list: object) -> None:
        """There are no file descriptors."""

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
