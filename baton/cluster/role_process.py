"""One role as a child process: its start, its log, its end.

Owns the process group of the child. It decides nothing: the supervisor does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from baton.cluster.guard import Guard
from baton.cluster.log_entries import read_entry
from baton.errors import Unavailable
from baton.tether import tethered

# Where the packages of this tree were imported from; the child must find the same ones.
_ROOT = Path(__file__).resolve().parent.parent.parent
_NUM_LAST_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """What to run.

    name: of the process, for example "prefill-0".
    role: "router", "prefill", "decode" or "pool".
    command: arguments of the Python interpreter.
    environment: added to this process's own; passwords travel here, never in `command`.
    logs: files this role's children write, shown with its own log when it fails.
    extra_grace_s: how much longer than others it may need to end, in seconds.
    """

    name: str
    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    logs: tuple[Path, ...] = ()
    extra_grace_s: float = 0.0


class RoleProcess:
    """A role that can be started again and again; at most one child lives at a time.

    spec: what is to be run; another one of the same name holds from the next start.

    The child leads a process group of its own, so that Ctrl-C at the terminal reaches the parent only,
    and is tethered and guarded: however this process ends, the child and its children do too.
    """

    def __init__(self, spec: RoleSpec, log_file: Path, guard: Guard) -> None:
        self.spec = spec
        self._guard = guard
        self.log_file = log_file
        self._process: Process | None = None
        self._started_s = 0.0

    @property
    def name(self) -> str:
        """Name of the role."""
        return self.spec.name

    @property
    def is_running(self) -> bool:
        """Whether the child lives."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Process id of the child; raises Unavailable between a death and the next start."""
        if self._process is None or self._process.returncode is not None:
            raise Unavailable(f"{self.name} is not running")
        return self._process.pid

    async def start(self) -> None:
        """Starts the child; its standard output and error are appended to the log file."""
        command = tethered([sys.executable, *self.spec.command], signal_number=signal.SIGKILL)
        # The child gets a copy of the descriptor; ours can be closed at once.
        log = os.open(self.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                cwd=_ROOT,
                # gRPC's own lines about closed connections would stand between those of the log.
                env={"GRPC_VERBOSITY": "ERROR", **os.environ, **self.spec.environment},
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._guard.watch(self._process.pid)
        self._started_s = asyncio.get_running_loop().time()

    async def wait(self) -> tuple[int, float]:
        """Waits for the end; returns the exit status (negative: a signal) and the life in seconds.

        What the child left of its process group is killed.
        """
        assert self._process is not None, "wait() follows start()"
        status = await self._process.wait()
        self._clear()
        return status, asyncio.get_running_loop().time() - self._started_s

    async def stop(self, grace_s: float) -> None:
        """Asks the child to end, and kills its whole group after grace_s seconds and what its spec adds."""
        if self._process is None:
            return
        if self.is_running:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s + self.spec.extra_grace_s):
                    await self._process.wait()
        self.kill()
        await self._process.wait()
        self._clear()

    def kill(self) -> None:
        """Kills the child and what it left behind, at once."""
        if self._process is not None:
            _kill_group(self._process.pid)

    def last_lines(self) -> str:
        """The end of the logs, for people: structured lines are reduced to what happened."""
        lines = [line for path in (*self.spec.logs, self.log_file) for line in _tail(path)]
        return "\n".join(f"  {line}" for line in lines) or "  (nothing was logged)"

    def _clear(self) -> None:
        """Kills what an ended child left of its group, and lets go of the group's id."""
        process, self._process = self._process, None
        if process is not None:
            _kill_group(process.pid)
            self._guard.forget(process.pid)


def _kill_group(group_id: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group_id, signal.SIGKILL)


def describe_end(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


def _tail(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as log:
        last = deque((line.rstrip() for line in log if line.strip()), maxlen=_NUM_LAST_LINES)
    return [_readable(line) for line in last]


def _readable(line: str) -> str:
    entry = read_entry(line)
    if not entry:
        return line
    reason = f": {entry['reason']}" if "reason" in entry else ""
    trace = f"\n{entry['exception']}" if "exception" in entry else ""
    return f"{entry.get('role', '')} {entry['event']}{reason}{trace}".strip()
